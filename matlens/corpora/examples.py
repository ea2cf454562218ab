"""From sentences to what the model reads: tokens, a drawn position in each sentence, and batches.

One sentence is one example and is never packed with another (definitions, section 2). The position is
drawn from the seed and the sentence alone, so it is the same whatever the corpus around it, the split,
the order and the batches are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from matlens.corpora.corpus import Corpus
from matlens.errors import InputError
from matlens.models.tokenization import encode_text, require_tokenizer
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


ARRAYS = ("tokens", "offsets", "positions")  # what is stored of examples beside vectors


@checked
@dataclass(frozen=True)
class Examples:
    """Tokenised sentences with a position in each.

    Attributes
    ----------
    tokens
        Token ids of all sentences end to end; sentence ``s`` is ``tokens[offsets[s]:offsets[s + 1]]``.
        In a masked-LM model the token at the position is the mask already.
    offsets
        ``[n + 1]``, where each sentence starts.
    positions
        ``i_s``, the drawn position in each sentence, counted from 0.
    provenance
        Corpus, seed, how positions were drawn, and how many sentences were cut.
    """

    tokens: Int[np.ndarray, " n_tokens"]
    offsets: Int[np.ndarray, " n_plus_1"]
    positions: Int[np.ndarray, " n"]
    provenance: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        """Number of tokens of each sentence."""
        return np.diff(self.offsets)

    @property
    def places(self) -> Int[np.ndarray, " n_tokens"]:
        """Place of each token in its sentence, counted from 0."""
        return np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def n_truncated(self) -> int:
        """How many sentences were longer than the model's context and were cut."""
        return int(self.provenance.get("n_truncated", 0))

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the tokens and positions."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.offsets, self.positions):
            digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
        return digest.hexdigest()[:16]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are stored beside vectors, by name."""
        return {name: getattr(self, name) for name in ARRAYS}

    def head(self, n: int) -> Examples:
        """The first ``n`` sentences."""
        provenance = {**self.provenance, "n": min(n, len(self))}
        end = self.offsets[: n + 1][-1]
        return Examples(self.tokens[:end], self.offsets[: n + 1], self.positions[:n], provenance)

    def up_to_positions(self) -> Examples:
        """Every sentence cut after its drawn position: all that a decoder reads there.

        A decoder's vectors at the position are the same, and half of the tokens need not be run.
        """
        kept = self.places <= np.repeat(self.positions, self.lengths)
        offsets = np.concatenate([[0], np.cumsum(self.positions + 1)])
        return Examples(self.tokens[kept], offsets, self.positions, self.provenance)

    def batches(self, max_tokens: int) -> Iterator[Batch]:
        """Batches of sentences of like length, the longest first, so that a lack of memory shows at once.

        A batch holds at most ``max_tokens`` tokens, padding counted, and at least one sentence.
        """
        order = np.argsort(-self.lengths, kind="stable")
        start = 0
        while start < len(order):
            length = int(self.lengths[order[start]])
            count = max(max_tokens // length, 1)
            yield self._batch(order[start : start + count], length)
            start += count

    def _batch(self, index: np.ndarray, length: int) -> Batch:
        ids = np.zeros((len(index), length), dtype=np.int64)
        mask = np.zeros((len(index), length), dtype=np.int64)
        for row, sentence in enumerate(index):
            tokens = self.tokens[self.offsets[sentence] : self.offsets[sentence + 1]]
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        return Batch(index, torch.from_numpy(ids), torch.from_numpy(mask))


@dataclass(frozen=True)
class Batch:
    """Sentences padded on the right with token 0, which the mask keeps the model from reading.

    Attributes
    ----------
    index
        Numbers of the sentences.
    tokens, mask
        ``[batch, length]``; the mask is 1 where there is a token of the sentence, and 0 at padding.
    """

    index: Int[np.ndarray, " batch"]
    tokens: Int[Tensor, "batch length"]
    mask: Int[Tensor, "batch length"]


@checked
def make_examples(
    model: TransformerBridge, corpus: Corpus, *, seed: int = 0, draw_special: bool = True
) -> Examples:
    """Tokenise a corpus as the model's own tokenizer does and draw a position in each sentence.

    Parameters
    ----------
    model
        The model, which has the tokenizer and the length of the context. In a masked-LM model the token at
        the position is replaced by the mask.
    corpus
        The corpus.
    seed
        Seed of the positions.
    draw_special
        Whether the position may fall on tokens that the tokenizer adds (``[CLS]``, ``<s>``), as in the
        authors' code. With ``False`` they are read by the model but never drawn.

    Raises
    ------
    InputError
        There are no sentences, a sentence has no token to draw, or the model is a masked-LM without
        a mask token.
    """
    _require_readable(model)
    tokenizer = require_tokenizer(model)
    if not len(corpus):
        raise InputError(f"{corpus.name} holds no sentences. Expected at least one.")
    mask_token = tokenizer.mask_token_id if is_masked(model) else None
    if is_masked(model) and mask_token is None:
        raise InputError("This is a masked-LM model, but its tokenizer has no mask token.")
    n_ctx = _context_length(model)
    encoded = [encode_text(model, text) for text in corpus.sentences]
    too_long = [s for s, encoding in enumerate(encoded) if len(encoding.ids) > n_ctx]
    for s in too_long:
        encoded[s] = encode_text(model, corpus.sentences[s], longest=n_ctx)
    positions = np.array(
        [
            _draw_position(text, encoding.added, seed, draw_special)
            for text, encoding in zip(corpus.sentences, encoded, strict=True)
        ]
    )
    ids = [np.asarray(encoding.ids, dtype=np.int64) for encoding in encoded]
    if mask_token is not None:
        for sentence, position in zip(ids, positions, strict=True):
            sentence[position] = mask_token
    provenance = {
        "corpus": corpus.name,
        "corpus_fingerprint": corpus.fingerprint,
        "seed": seed,
        "position": "uniform over all tokens" if draw_special else "uniform over tokens not special",
        "masked": mask_token is not None,
        "n": len(ids),
        "n_truncated": len(too_long),
    }
    return _end_to_end(ids, positions, provenance)


@checked
def make_prompts(model: TransformerBridge, prompts: Sequence[str]) -> Examples:
    """Tokenise prompts, each with the position whose prediction one wants to read.

    In a decoder that is the last token; in a masked-LM model the mask token, of which a prompt holds exactly
    one.

    Parameters
    ----------
    model
        The model, which has the tokenizer and the length of the context.
    prompts
        The prompts.

    Raises
    ------
    InputError
        A prompt is empty, or does not hold exactly one mask token where one is needed.
    """
    if isinstance(prompts, str):
        raise InputError(f"{prompts!r} is one prompt. Expected a list of them.")
    tokenizer = require_tokenizer(model)
    _require_readable(model)
    n_ctx = _context_length(model)
    ids, positions = [], []
    for prompt in prompts:
        encoded = encode_text(model, prompt)
        tokens = np.asarray(encoded.ids, dtype=np.int64)
        ids.append(tokens)
        if len(tokens) > n_ctx:
            raise InputError(
                f"The prompt of {len(tokens)} tokens is longer than the model's context of {n_ctx}."
            )
        places = np.flatnonzero(tokens == tokenizer.mask_token_id)
        if not is_masked(model):  # an end-of-text token that the tokenizer adds is not the prompt's last
            places = np.flatnonzero(~np.asarray(encoded.added, dtype=bool))[-1:]
        if len(places) != 1:
            expected = f"exactly one {tokenizer.mask_token}" if is_masked(model) else "at least one token"
            raise InputError(f"The prompt {prompt!r} cannot be read out: expected {expected} in it.")
        positions.append(int(places[0]))
    if not ids:
        raise InputError("There are no prompts. Expected at least one.")
    return _end_to_end(ids, np.array(positions), {"corpus": "prompts", "n": len(ids)})


@checked
def is_masked(model: TransformerBridge) -> bool:
    """Whether a model predicts masked tokens rather than the next one."""
    return model.cfg.attention_dir == "bidirectional"


def _end_to_end(ids: list[np.ndarray], positions: np.ndarray, provenance: dict[str, Any]) -> Examples:
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in ids])])
    return Examples(np.concatenate(ids), offsets, positions, provenance)


def _context_length(model: TransformerBridge) -> int:
    return int(min(model.cfg.n_ctx, model.tokenizer.model_max_length))


def _require_readable(model: TransformerBridge) -> None:
    if not is_masked(model) and not model.adapter.supports_causal_loss:
        raise InputError(
            f"{model.cfg.architecture} predicts neither the next token nor a single masked one, so what its "
            "layers predict cannot be read at a position."
        )


def _draw_position(text: str, added: list[bool], seed: int, draw_special: bool) -> int:
    allowed = np.arange(len(added)) if draw_special else np.flatnonzero(~np.asarray(added, dtype=bool))
    if not len(allowed):
        raise InputError(f"The sentence {text!r} has no token whose position could be drawn.")
    digest = hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=8).digest()
    return int(allowed[int.from_bytes(digest, "big") * len(allowed) >> 64])
