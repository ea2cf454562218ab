"""Vectors read in the vocabulary: ``r = E v``, a score for each token.

Adding ``v`` to the residual stream multiplies the odds of token ``w`` by ``exp(e_w . v)``, as far as the
readout is linear, so ``v`` promotes the tokens with the largest scores (paper B, section 3).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from matlens.errors import InputError, check_int, checked
from matlens.ffn.values import ValueName, ValueVectors
from matlens.models.identity import ModelIdentity, Provenance, check_raw
from matlens.models.inputs import ENCODER, stack_of
from matlens.models.norms import NormGain
from matlens.models.readout import check_vectors, output_projection
from matlens.models.tokens import token_texts, word_tokens
from matlens.models.weights import float32_on
from matlens.numerics import largest, without_autocast
from matlens.parallel import Bar

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TOP = 30  # top tokens of a value vector that the paper looks at
TOKEN_COLUMNS = ("value", "layer", "index", "side", "rank", "token", "token_id", "score")
_SCORES = 2**25  # scores in memory at once, 128 MiB
_CHECKED = 32  # rows whose scores are compared, spread over all layers
_ROUNDING = 1e-4  # of the largest score, between devices and shapes of products


class TopTokens(NamedTuple):
    """The most extreme tokens of each of ``n`` vectors, and their scores."""

    ids: Int[Tensor, "n k"]
    scores: Float[Tensor, "n k"]


@without_autocast()
def unembedding(model: TransformerBridge) -> Float[Tensor, "d_vocab d_model"]:
    """``E``, a row for each token, in float32; of a masked-LM model the decoder of its head.

    To be read only, as it can be the model's own weight. For narrower embeddings (OPT-350m), it includes the
    projection to them.
    """
    check_raw(model)
    if stack_of(model) == ENCODER or not hasattr(model, "unembed"):
        raise InputError(
            "This model has no unembedding. Load it with its language-model head (a ...ForCausalLM or "
            "...ForMaskedLM checkpoint)."
        )
    weight = model.unembed.original_component.weight.detach().float()
    for projection in output_projection(model):
        weight = weight @ projection.get_parameter("weight").detach().float()
    return weight


class LinearHead(nn.Module):
    """The linear parts before an unembedding: a dense layer, if any, and a norm's gain."""

    def __init__(self, dense: Tensor | None, gain: NormGain) -> None:
        super().__init__()
        self.dense, self.gain = None if dense is None else dense.detach().to(torch.float32, copy=True), gain

    def forward(self, vectors: Tensor) -> Tensor:  # noqa: D102
        return self.gain(vectors if self.dense is None else vectors @ self.dense.T)


@checked
@dataclass(frozen=True, eq=False)
class Projection:
    """How vectors are read in a model's vocabulary (paper B, section 3).

    Attributes
    ----------
    unembedding
        ``E``, a row for each token, in float32. A bias of the unembedding is not part of a score.
    norm
        Applied to vectors first: nothing, the model's final norm, or the linear parts of its head.
    identity
        The model; ``None`` if unknown.
    """

    unembedding: Float[Tensor, "d_vocab d_model"]
    tokenizer: Any
    norm: nn.Module | None = None
    identity: ModelIdentity | None = None

    @classmethod
    def from_model(cls, model: TransformerBridge) -> Projection:
        """``E v``, as in the paper."""
        rows = unembedding(model).clone()  # editing it in place must not change the model
        if model.tokenizer is None:
            raise InputError(f"This {model.cfg.architecture} has no tokenizer.")
        return cls(rows, model.tokenizer, identity=ModelIdentity.from_model(model))

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

        The linear parts of everything after the last block (``W`` is the dense layer of the head), without
        biases and scale. In masked-LM models ``E v`` alone is not meaningful.
        """
        normed = cls.after_norm(model)
        dense = None
        if hasattr(model, "mlm_head"):
            dense = model.mlm_head.original_component.weight.to(normed.unembedding.device)
        assert normed.norm is not None  # after_norm has one
        return replace(normed, norm=LinearHead(dense, NormGain.from_module(normed.norm, model.cfg.d_model)))

    def on(self, model: TransformerBridge, *, strict: bool = True) -> Projection:
        """The same projection for the value vectors and vectors of a model, see `Lens.on`."""
        own, identity = Provenance(self.identity), ModelIdentity.from_model(model)
        return replace(self, identity=own.on(identity, ours="the projection", strict=strict).model)

    def check_same(self, other: ModelIdentity | Provenance, *, theirs: str = "the value vectors") -> None:
        """Refuse vectors of another model, if both models are known."""
        model = other.model if isinstance(other, Provenance) else other
        if self.identity is not None and model is not None:
            Provenance(self.identity).check_same(other, ours="the projection", theirs=theirs)

    @torch.no_grad()
    @without_autocast()
    def scores(self, vectors: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_vocab"]:
        """Score of every token for each vector."""
        return self._inputs(vectors) @ self.unembedding.T

    def _tokens_of(self, words: str | Sequence[str]) -> list[int]:
        return word_tokens(self.tokenizer, _as_list(words), n_tokens=len(self.unembedding))

    def _inputs(self, vectors: Tensor) -> Tensor:
        check_vectors(vectors, self.unembedding.shape[1])
        inputs = vectors.to(self.unembedding.device, torch.float32)
        return self.norm(inputs) if self.norm is not None else inputs

    def top(self, vectors: Float[Tensor, "n d_model"], k: int = TOP) -> TopTokens:
        """The ``k`` tokens with the largest scores for each vector."""
        return self._extremes(vectors, (k, True))[0]

    def bottom(self, vectors: Float[Tensor, "n d_model"], k: int = TOP) -> TopTokens:
        """The ``k`` tokens with the smallest scores for each vector, the smallest first."""
        return self._extremes(vectors, (k, False))[0]

    def top_and_bottom(
        self, vectors: Float[Tensor, "n d_model"], k_top: int = TOP, k_bottom: int = TOP
    ) -> tuple[TopTokens, TopTokens]:
        """Both `top` and `bottom`, of the same scores."""
        top, bottom = self._extremes(vectors, (k_top, True), (k_bottom, False))
        return top, bottom

    def blocks(self, vectors: Float[Tensor, "n d_model"]) -> tuple[Tensor, ...]:
        """Split vectors into blocks whose scores fit into 128 MiB."""
        return vectors.split(max(_SCORES // len(self.unembedding), 1))

    @without_autocast()
    def _extremes(self, vectors: Tensor, *ends: tuple[int, bool]) -> list[TopTokens]:
        """The tokens at some ends of the same scores: how many, and whether they are the largest."""
        for k, _ in ends:
            check_int(k, "k", min=1, max=len(self.unembedding))
        blocks = self.blocks(vectors)
        # One buffer for the scores of all blocks: allocating one for each takes longer than ordering them.
        with torch.no_grad():
            buffer = self.unembedding.new_empty(len(blocks[0]), len(self.unembedding))
            picked = []
            for block in blocks:
                scores = torch.matmul(self._inputs(block), self.unembedding.T, out=buffer[: len(block)])
                picked.append(
                    [largest(scores, k) if is_top else scores.topk(k, largest=False) for k, is_top in ends]
                )
        return [
            TopTokens(torch.cat([ids for _, ids in parts]).cpu(), torch.cat([top for top, _ in parts]).cpu())
            for parts in zip(*picked, strict=True)
        ]

    def top_of_all(self, values: ValueVectors, k: int = TOP, *, progress: bool = True) -> TopTokens:
        """The ``k`` top tokens of every value vector of a model; `ValueVectors.at` names a row."""
        self.check_same(values.identity)
        layers = [self.top(values.layer_view(layer), k) for layer in _layers(values, "projecting", progress)]
        ids, scores = zip(*layers, strict=True)
        return TopTokens(torch.cat(ids), torch.cat(scores))

    def table(
        self,
        vectors: ValueVectors | Float[Tensor, "... d_model"],
        names: Sequence[ValueName] | None = None,
        k: int = 10,
    ) -> pd.DataFrame:
        """Top and bottom tokens of vectors, one row per token (paper B, section 3).

        Columns are ``vector, side, rank, token, token_id, score``, with ``value, layer, index`` instead of
        ``vector`` for value vectors; ``side`` is top or bottom.

        Parameters
        ----------
        vectors
            Any vectors ``[n, d_model]``, or one ``[d_model]``; or the value vectors of a model.
        names
            Names of the vectors, by default their row numbers. Of value vectors, those to read.

        Examples
        --------
        >>> projection.table(torch.stack([direction, -direction]), ["cold", "warm"])
        >>> projection.table(ffn.ValueVectors(model), ["L24D219"])
        """
        columns = list(TOKEN_COLUMNS)
        if isinstance(vectors, ValueVectors):
            self.check_same(vectors.identity)
            if names is None or not len(names):
                raise InputError("names must have at least one value vector, such as 'L3D12'.")
            chosen = [vectors.resolve(name) for name in names]
            keys: list[tuple[Any, ...]] = [(str(value), value.layer, value.index) for value in chosen]
            matrix = vectors.vectors(chosen)
        else:
            matrix, columns = torch.atleast_2d(vectors), ["vector", *columns[3:]]
            keys = [(name,) for name in (range(len(matrix)) if names is None else names)]
            if len(keys) != len(matrix):
                raise InputError(f"names must have {len(matrix)} names, one per vector, got {len(keys)}.")
        rows: list[tuple[Any, ...]] = []
        for side, tokens in zip(("top", "bottom"), self.top_and_bottom(matrix, k, k), strict=True):
            for key, ids, scores in zip(keys, tokens.ids.tolist(), tokens.scores.tolist(), strict=True):
                texts = token_texts(self.tokenizer, ids)
                for rank, token in enumerate(zip(texts, ids, scores, strict=True), start=1):
                    rows.append((*key, side, rank, *token))
        return pd.DataFrame(rows, columns=columns)

    def of_tokens(self, ids: Int[Tensor, " n"]) -> Projection:
        """The same projection onto some tokens: its scores have one column per token."""
        return replace(self, unembedding=self.unembedding[ids])

    def score_and_lift(self, words: str | Sequence[str]) -> Projection:
        """A projection onto two columns, the score and the lift of a word or of several on average.

        The lift is how far the score lies above the mean score of all tokens: a number added to all scores
        changes no probability. Each word is a single token.
        """
        ids = self._tokens_of(words)
        embedding = self.unembedding[ids].mean(0)
        return replace(self, unembedding=torch.stack([embedding, embedding - self.unembedding.mean(0)]))

    def promoting(
        self, values: ValueVectors, words: str | Sequence[str], n: int = 10, *, progress: bool = True
    ) -> pd.DataFrame:
        """The ``n`` value vectors that promote a word, or several on average, most.

        Columns are ``value, layer, index, score, lift``, the largest lift first; see `score_and_lift`.
        """
        n = check_int(n, "n", min=1, max=len(values))
        self.check_same(values.identity)
        reading, layers = self.score_and_lift(words), _layers(values, "scoring", progress)
        scores = torch.cat([reading.scores(values.layer_view(layer)) for layer in layers]).cpu()
        best = scores[:, 1].topk(n).indices
        score, lift = scores[best].T.tolist()
        return values.name_columns(best.tolist()).assign(score=score, lift=lift)

    def search(self, values: ValueVectors, tokens: TopTokens, words: str | Sequence[str]) -> pd.DataFrame:
        """The value vectors with the words in their top tokens (see `top_of_all`).

        Columns are ``value, layer, index, words, rank, score``: how many of the words there are, and the rank
        and the score of the first. Those with most words come first, and then those that rank them highest.
        """
        self.check_same(values.identity)
        if len(tokens.ids) != len(values):
            raise InputError(
                f"tokens must have a row for each of {len(values)} value vectors, got {len(tokens.ids)}. Use "
                "top_of_all."
            )
        self._check_scores(values, tokens)
        hits = torch.isin(tokens.ids, torch.tensor(self._tokens_of(words)))
        rows = hits.any(1).nonzero()[:, 0]
        first = hits[rows].int().argmax(1)
        table = values.name_columns(rows.tolist()).assign(
            words=hits[rows].sum(1).tolist(),
            rank=(first + 1).tolist(),
            score=tokens.scores[rows, first].tolist(),
        )
        order = ["words", "rank", "score"]
        return table.sort_values(order, ascending=[False, True, False], ignore_index=True, kind="stable")

    def _check_scores(self, values: ValueVectors, tokens: TopTokens) -> None:
        """Raise InputError if the scores of some rows are not those that this projection gives."""
        if not bool(tokens.scores.any()):  # tokens of one's own, without scores
            return
        rows = list(range(0, len(values), -(-len(values) // _CHECKED)))
        scores = self.scores(values.vectors(map(values.at, rows))).cpu()
        own, given = scores.gather(1, tokens.ids[rows]), tokens.scores[rows]
        if not torch.allclose(own, given, rtol=0, atol=_ROUNDING * float(scores.abs().max())):
            raise InputError(
                "tokens must be those of this projection, got scores of another. Use "
                "top_of_all(values) of the same projection."
            )


def _as_list(words: str | Sequence[str]) -> Sequence[str]:
    return [words] if isinstance(words, str) else words


def _layers(values: ValueVectors, doing: str, progress: bool) -> Iterator[int]:
    yield from Bar(range(values.n_layers), desc=doing, unit="layer", disable=not progress)
