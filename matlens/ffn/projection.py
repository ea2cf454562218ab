"""Vectors read in the vocabulary: ``r = E v``, a score for each token, and the tokens that stand out.

What adds ``v`` to the stream multiplies the odds of token ``w`` by ``exp(e_w . v)``, as far as the read-out
is linear, so the tokens with the largest scores are those that ``v`` promotes (paper B, section 3). Scores of
many vectors are made in blocks, and only what is asked of them is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from matlens.errors import InputError, check_int, checked
from matlens.ffn.norms import linear_head
from matlens.ffn.values import ValueName, ValueVectors
from matlens.models.families.encoder_decoders import ENCODER, stack_of
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.readout import check_vectors, head_modules, narrowing
from matlens.models.tokens import token_texts, word_tokens
from matlens.models.weights import WeightChecksum, float32_on
from matlens.numerics import largest
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TOP = 30  # top tokens of a value vector that the paper looks at
TOKEN_COLUMNS = ("value", "layer", "index", "side", "rank", "token", "token_id", "score")
_SCORES = 2**25  # scores that are held at once, 128 MiB


class TopTokens(NamedTuple):
    """Tokens that stand out for each of ``n`` vectors, the most extreme first, and their scores."""

    ids: Int[Tensor, "n k"]
    scores: Float[Tensor, "n k"]


def unembedding(model: TransformerBridge) -> Float[Tensor, "d_vocab d_model"]:
    """``E``, a row for each token, in float32; of a masked-LM model the decoder of its head.

    Where embeddings are narrower than the stream (OPT-350m), what makes the stream as narrow is part of it.
    """
    check_raw(model)
    if stack_of(model) == ENCODER or not hasattr(model, "unembed"):
        raise InputError(
            "This model has no unembedding, so its value vectors cannot be read in the vocabulary. Load it "
            "with its language-model head (a ...ForCausalLM or ...ForMaskedLM checkpoint)."
        )
    weight = model.unembed.original_component.weight.detach().float()
    for projection in narrowing(model):
        weight = weight @ projection.get_parameter("weight").detach().float()
    return weight


@checked
@dataclass(frozen=True, eq=False)
class Projection:
    """How vectors are read in a model's vocabulary (paper B, section 3).

    Attributes
    ----------
    unembedding
        ``E``, a row for each token, in float32. Its bias, where there is one, is no part of a score.
    tokenizer
        The tokenizer of the model.
    norm
        What vectors go through first: nothing, the model's final norm, or the linear parts of its head.
    identity
        The model whose vocabulary it is; ``None`` where that is not known.
    weights
        The model's weights that it reads; scores raise InputError once they have changed.
    """

    unembedding: Float[Tensor, "d_vocab d_model"]
    tokenizer: Any
    norm: nn.Module | None = None
    identity: ModelIdentity | None = None
    weights: WeightChecksum | None = field(default=None, repr=False)

    @classmethod
    def from_model(cls, model: TransformerBridge) -> Projection:
        """``E v``, the paper's own."""
        rows = unembedding(model)
        if model.tokenizer is None:
            raise InputError(f"This {model.cfg.architecture} has no tokenizer, so its scores have no words.")
        identity = ModelIdentity.from_model(model, hash_unembedding=False).of_weights
        weights = WeightChecksum(head_modules(model), "the projection")
        return cls(rows, model.tokenizer, identity=identity, weights=weights)

    @classmethod
    def after_norm(cls, model: TransformerBridge) -> Projection:
        """``E ln_f(v)``, through the final norm with its own weights (appendix A.1)."""
        plain = cls.from_model(model)
        if not hasattr(model, "ln_final"):
            raise InputError(f"{model.cfg.architecture} has no final norm. Project its vectors without one.")
        norm = float32_on(copy.deepcopy(model.ln_final.original_component), plain.unembedding.device)
        return replace(plain, norm=norm)

    @classmethod
    def through_head(cls, model: TransformerBridge) -> Projection:
        """``E (f * v)``, with the gain ``f`` of the final norm; in a masked-LM head ``E (f * W v)``.

        These are the linear parts of what the model does behind its last block (``W`` is the head's dense
        layer), without biases and scale. In a masked-LM model ``E v`` alone says nothing of what ``v``
        promotes: the head turns the stream before the unembedding reads it.
        """
        normed = cls.after_norm(model)
        dense = None
        if hasattr(model, "mlm_head"):
            dense = model.mlm_head.original_component.weight.to(normed.unembedding.device)
        assert normed.norm is not None  # after_norm has one
        return replace(normed, norm=linear_head(dense, normed.norm, model.cfg.d_model))

    def check_same(self, other: ModelIdentity | Provenance, *, theirs: str = "the value vectors") -> None:
        """Refuse vectors of another model; where one of the models is not known they are taken."""
        self._check_weights()
        model = other.model if isinstance(other, Provenance) else other
        if self.identity is not None and model is not None:
            Provenance(self.identity).check_same(other, ours="the projection", theirs=theirs)

    @torch.inference_mode()
    def scores(self, vectors: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_vocab"]:
        """Score of every token for each vector."""
        self._check_weights()
        return self._inputs(vectors) @ self.unembedding.T

    def _check_weights(self) -> None:
        if self.weights is not None:
            self.weights.check()

    def _inputs(self, vectors: Tensor) -> Tensor:
        """What is multiplied with the unembedding."""
        check_vectors(vectors, self.unembedding.shape[1])
        inputs = vectors.to(self.unembedding.device, torch.float32)
        return self.norm(inputs) if self.norm is not None else inputs

    def top(self, vectors: Float[Tensor, "n d_model"], k: int = TOP) -> TopTokens:
        """The ``k`` tokens with the largest scores for each vector: what it promotes."""
        return self._extreme(vectors, k, lambda scores: largest(scores, k))

    def bottom(self, vectors: Float[Tensor, "n d_model"], k: int = TOP) -> TopTokens:
        """The ``k`` tokens with the smallest scores for each vector, the smallest first: what it demotes."""
        return self._extreme(vectors, k, lambda scores: scores.topk(k, largest=False))

    def blocks(self, vectors: Float[Tensor, "n d_model"]) -> tuple[Tensor, ...]:
        """Split vectors into blocks, each of as many rows as may have their scores held at once."""
        return vectors.split(max(_SCORES // len(self.unembedding), 1))

    def _extreme(self, vectors: Tensor, k: int, pick: Callable[[Tensor], Any]) -> TopTokens:
        check_int(k, "k", min=1, max=len(self.unembedding))
        self._check_weights()
        blocks = self.blocks(vectors)
        # One place for the scores of all blocks: to get memory anew for each takes longer than to order them.
        with torch.inference_mode():
            held = self.unembedding.new_empty(len(blocks[0]), len(self.unembedding))
            picked = [
                pick(torch.matmul(self._inputs(block), self.unembedding.T, out=held[: len(block)]))
                for block in blocks
            ]
        scores, ids = zip(*picked, strict=True)
        return TopTokens(torch.cat(ids).cpu(), torch.cat(scores).cpu())


@checked
def top_tokens_of_all(
    values: ValueVectors, projection: Projection, *, k: int = TOP, progress: bool = True
) -> TopTokens:
    """Top tokens of every value vector of a model, ``n_layers x d_mlp`` rows, layer after layer.

    ``values.at(row)`` says which value vector a row is. The paper looks at 30 tokens of each (section 4).

    Parameters
    ----------
    values, projection
        Value vectors of the model, and how they are read.
    k
        How many tokens of each value vector.
    progress
        Whether to show a bar over the layers.
    """
    projection.check_same(values.identity)
    layers = [projection.top(values.layer(layer), k) for layer in _layers(values, "projecting", progress)]
    ids, scores = zip(*layers, strict=True)
    return TopTokens(torch.cat(ids), torch.cat(scores))


@checked
def values_promoting(
    values: ValueVectors, projection: Projection, words: Sequence[str], *, n: int = 10, progress: bool = True
) -> pd.DataFrame:
    """Find the value vectors that promote a word, or a set of words, most.

    Columns are ``value, layer, index, score, lift``, the largest lift first. The score is ``e_w . v``, the
    lift how far it lies above the vector's mean score over the vocabulary: what is added to all scores alike
    moves no probability. Of several words both are means.

    Parameters
    ----------
    values, projection
        Value vectors of the model, and how they are read.
    words
        Words to look for, each a single token.
    n
        How many value vectors to list.
    progress
        Whether to show a bar over the layers.
    """
    n = check_int(n, "The number of value vectors", min=1, max=len(values))
    projection.check_same(values.identity)
    embedding = projection.unembedding[word_tokens(projection.tokenizer, words)].mean(0)
    score_and_lift = torch.stack([embedding, embedding - projection.unembedding.mean(0)])
    words_alone = Projection(score_and_lift, projection.tokenizer, projection.norm)
    layers = _layers(values, "scoring", progress)
    scores = torch.cat([words_alone.scores(values.layer(layer)) for layer in layers]).cpu()
    best = scores[:, 1].topk(n).indices
    score, lift = scores[best].T.tolist()
    return name_columns(values, best.tolist()).assign(score=score, lift=lift)


@checked
def values_with_tokens(
    values: ValueVectors, projection: Projection, tokens: TopTokens, words: Sequence[str]
) -> pd.DataFrame:
    """Find the value vectors that have one of the words, or several, among their top tokens.

    Columns are ``value, layer, index, words, rank, score``: how many of the words there are, and the rank and
    the score of the first. Those with most words come first, and then those that rank them highest.

    Parameters
    ----------
    values, projection
        Value vectors of the model, and how they are read.
    tokens
        Top tokens of all value vectors, as `top_tokens_of_all` gives them.
    words
        Words to look for, each a single token.
    """
    projection.check_same(values.identity)
    if len(tokens.ids) != len(values):
        raise InputError(
            f"Top tokens of {len(tokens.ids)} vectors for {len(values)} value vectors. Expected those of all "
            "of them, as top_tokens_of_all gives."
        )
    hits = torch.isin(tokens.ids, torch.tensor(word_tokens(projection.tokenizer, words)))
    rows = hits.any(1).nonzero()[:, 0]
    first = hits[rows].int().argmax(1)
    table = name_columns(values, rows.tolist()).assign(
        words=hits[rows].sum(1).tolist(),
        rank=(first + 1).tolist(),
        score=tokens.scores[rows, first].tolist(),
    )
    order = ["words", "rank", "score"]
    return table.sort_values(order, ascending=[False, True, False], ignore_index=True, kind="stable")


@checked
def token_table(
    values: ValueVectors, projection: Projection, names: Sequence[ValueName], *, k: int = 10
) -> pd.DataFrame:
    """Top and bottom tokens of value vectors, one row a token (paper B, section 3).

    Columns are ``value, layer, index, side, rank, token, token_id, score``; a side is ``top`` or ``bottom``.

    Parameters
    ----------
    values, projection
        Value vectors of the model, and how they are read.
    names
        Names of value vectors, such as ``"L3D12"``.
    k
        How many tokens of each side.
    """
    projection.check_same(values.identity)
    chosen, vectors = [values.resolve(name) for name in names], values.vectors(names)
    rows: list[tuple[Any, ...]] = []
    for side, tokens in (("top", projection.top(vectors, k)), ("bottom", projection.bottom(vectors, k))):
        for value, ids, scores in zip(chosen, tokens.ids.tolist(), tokens.scores.tolist(), strict=True):
            texts = token_texts(projection.tokenizer, ids)
            for rank, token in enumerate(zip(texts, ids, scores, strict=True), start=1):
                rows.append((str(value), value.layer, value.index, side, rank, *token))
    return pd.DataFrame(rows, columns=list(TOKEN_COLUMNS))


def name_columns(values: ValueVectors, rows: Iterable[int]) -> pd.DataFrame:
    """Names of value vectors by their rows, with the columns ``value, layer, index``."""
    names = [values.at(row) for row in rows]
    return pd.DataFrame(
        {
            "value": list(map(str, names)),
            "layer": [name.layer for name in names],
            "index": [name.index for name in names],
        }
    )


def _layers(values: ValueVectors, doing: str, progress: bool) -> Iterator[int]:
    yield from Bar(range(values.n_layers), desc=doing, unit="layer", disable=not progress)
