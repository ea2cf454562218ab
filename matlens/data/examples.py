"""Examples: tokenized sentences with positions in each, and batches of them.

One sentence is one example and is never packed with another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.errors import InputError, PositiveInt, checked
from matlens.models.inputs import image_shape, inputs_of, is_visual

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TOKENIZATION = "tokenization"  # the key of the token policy in a provenance
VOCABULARY = "vocabulary"  # of given token ids, the key of the digest of the tokenizer's vocabulary
LAST = "last token"
ARRAYS = ("tokens", "offsets", "positions", "sentences")  # what is stored with vectors
OTHERS = ("source_tokens", "source_offsets", "images", "targets")  # stored if they are not empty


@dataclass(frozen=True)
class Batch:
    """Sentences padded on the right.

    Attributes
    ----------
    index
        Numbers of the sentences.
    tokens, mask
        ``[batch, length]``; the mask is 0 at padding.
    source
        For the decoder of an encoder-decoder, tokens and mask of the encoder's input.
    images
        For a vision transformer, its input.
    """

    index: Int[np.ndarray, " batch"]
    tokens: Int[Tensor, "batch length"]
    mask: Int[Tensor, "batch length"]
    source: tuple[Tensor, Tensor] | None = None
    images: Float[Tensor, "batch channels height width"] | None = None

    def inputs(self, model: TransformerBridge) -> tuple[Tensor, dict[str, Any]]:
        """The arguments of the model, on its device: ``model(first, **others)``."""
        device = torch.device(model.cfg.device)
        if is_visual(model):
            if self.images is None or tuple(self.images.shape[1:]) != image_shape(model):
                raise InputError(
                    f"examples must have images of the shape {image_shape(model)} for "
                    f"{model.cfg.architecture}. Use matlens.data.make_image_examples."
                )
            return self.images.to(device, next(model.original_model.parameters()).dtype), {}
        source = None if self.source is None else (self.source[0].to(device), self.source[1].to(device))
        first, others = inputs_of(model, self.tokens.to(device), self.mask.to(device), source)
        return first, {**others, "use_cache": False}


def padded(
    tokens: np.ndarray, offsets: np.ndarray, index: np.ndarray, length: int | None = None
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """Tokens of some sentences, right-padded to the longest or to ``length``, and their mask."""
    longest = int(np.diff(offsets)[index].max()) if length is None else length
    ids = np.zeros((len(index), longest), dtype=np.int64)
    mask = np.zeros((len(index), longest), dtype=np.int64)
    for row, sentence in enumerate(index):
        of_sentence = tokens[offsets[sentence] : offsets[sentence + 1]]
        ids[row, : len(of_sentence)], mask[row, : len(of_sentence)] = of_sentence, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


@checked
@dataclass(frozen=True)
class Examples:
    """Tokenized sentences with positions in each.

    Attributes
    ----------
    tokens
        Token ids of all sentences end to end; sentence ``s`` is ``tokens[offsets[s]:offsets[s + 1]]``. In a
        masked-LM model, the token at a sampled position is the mask.
    offsets
        ``[n + 1]``, where each sentence starts.
    positions
        The positions at which vectors are read, sentence after sentence; 0 is a sentence's first token.
    provenance
        Corpus, seed, how positions were chosen, and how many sentences were truncated.
    sentences
        The sentence of each position; by default there is one position in each.
    source_tokens, source_offsets
        For the decoder of an encoder-decoder, the input of its encoder, sentence by sentence; else empty.
    images
        For a vision transformer, images ``[n, channels, height, width]`` in place of sentences; else empty.
    targets
        The correct token at each position, where it was asked for (`make_windows`); else empty.
    """

    tokens: Int[np.ndarray, " n_tokens"]
    offsets: Int[np.ndarray, " n_plus_1"]
    positions: Int[np.ndarray, " n_positions"]
    provenance: dict[str, Any] = field(default_factory=dict)
    sentences: Int[np.ndarray, " _"] = field(default_factory=lambda: np.arange(0))
    source_tokens: Int[np.ndarray, " n_source"] = field(default_factory=lambda: np.arange(0))
    source_offsets: Int[np.ndarray, " _"] = field(default_factory=lambda: np.arange(0))
    images: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    targets: Int[np.ndarray, " _"] = field(default_factory=lambda: np.arange(0))

    def __post_init__(self) -> None:
        if not len(self.sentences):
            object.__setattr__(self, "sentences", np.arange(len(self.positions)))
        _check_consistent(self)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any] | None) -> Examples:
        """Examples of their stored `arrays` and their provenance."""
        return cls(**arrays, provenance=dict(data or {}))

    def __repr__(self) -> str:
        corpus = self.provenance.get("corpus")
        return f"Examples({len(self):,} sentences, {self.n_positions:,} positions, corpus={corpus!r})"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_positions(self) -> int:
        """Number of positions in all sentences, and of rows of vectors."""
        return len(self.positions)

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        """Number of tokens of each sentence."""
        return np.diff(self.offsets)

    @property
    def places(self) -> Int[np.ndarray, " n_tokens"]:
        """Position of each token in its sentence, from 0."""
        return np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def n_truncated(self) -> int:
        """Number of sentences that were truncated to the model's context."""
        return int(self.provenance.get("n_truncated", 0))

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the tokens, positions and targets."""
        digest = hashlib.sha256()
        more = [self.sentences] if self.n_positions > len(self) else []
        more += [self.source_tokens, self.source_offsets] if self.has_sources else []
        more += [self.targets] if len(self.targets) else []
        for array in (self.tokens, self.offsets, self.positions, *more):
            digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
        digest.update(np.ascontiguousarray(self.images).data)
        return digest.hexdigest()[:16]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are stored with vectors, by name."""
        others = [name for name in OTHERS if len(getattr(self, name))]
        return {name: getattr(self, name) for name in (*ARRAYS, *others)}

    @property
    def has_sources(self) -> bool:
        """Whether each sentence has a source for the encoder of an encoder-decoder."""
        return len(self.source_offsets) > 0

    def head(self, n: PositiveInt) -> Examples:
        """The first ``n`` sentences, with all of their positions."""
        n = min(n, len(self))
        return self.select(np.arange(n), n=n)

    def select(self, sentences: Int[np.ndarray, " some"], **details: Any) -> Examples:
        """Some sentences by ascending index, with all of their positions.

        ``details`` are added to the provenance.
        """
        selected = np.zeros(len(self), dtype=bool)
        selected[sentences] = True
        of_positions = selected[self.sentences]
        sources = {}
        if self.has_sources:
            lengths = np.diff(self.source_offsets)
            sources["source_tokens"] = self.source_tokens[np.repeat(selected, lengths)]
            sources["source_offsets"] = _offsets(lengths[sentences])
        return Examples(
            self.tokens[np.repeat(selected, self.lengths)], _offsets(self.lengths[sentences]),
            self.positions[of_positions], {**self.provenance, **details},
            np.searchsorted(sentences, self.sentences[of_positions]), **sources,
            images=self.images[sentences] if len(self.images) else self.images,
            targets=self.targets[of_positions] if len(self.targets) else self.targets,
        )  # fmt: skip

    def at_positions(self, positions: Literal["sampled", "all"]) -> Examples:
        """The same sentences; for ``"all"``, every token is a position, without targets."""
        if positions == "sampled":
            return self
        sentences = np.repeat(np.arange(len(self)), self.lengths)
        return replace(self, positions=self.places, sentences=sentences, targets=np.arange(0))

    def up_to_positions(self) -> Examples:
        """Sentences truncated after their last position; decoders give the same vectors."""
        last = np.zeros(len(self), dtype=np.int64)
        np.maximum.at(last, self.sentences, self.positions)
        selected = self.places <= np.repeat(last, self.lengths)
        offsets = _offsets(last + 1)
        return replace(self, tokens=self.tokens[selected], offsets=offsets)

    def rows_of(
        self, index: Int[np.ndarray, " batch"]
    ) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
        """Positions of some sentences, such as those of a batch.

        Returns
        -------
        row, position, number
            For each position, sentence after sentence: the entry of ``index`` that is its sentence, the
            position in it, and its number in all positions.
        """
        starts = np.searchsorted(self.sentences, np.arange(len(self) + 1))
        counts = np.diff(starts)[index]
        row = np.repeat(np.arange(len(index)), counts)
        within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        number = starts[:-1][index][row] + within
        return row, self.positions[number], number

    def batches(
        self, max_tokens: PositiveInt, groups: Int[np.ndarray, " n"] | None = None
    ) -> Iterator[Batch]:
        """Batches of sentences of similar length, the longest first, so that memory runs out early.

        A batch has at most ``max_tokens`` tokens including padding, and at least one sentence. Sentences of
        different ``groups`` never share a batch (`matlens.data.readers.batch_groups`).
        """
        return (self.batch(index) for index in self.batch_indices(max_tokens, groups))

    def batch_indices(
        self, max_tokens: PositiveInt, groups: Int[np.ndarray, " n"] | None = None
    ) -> list[np.ndarray]:
        """Indices of the sentences of each of the `batches`."""
        groups = np.zeros(len(self), dtype=np.int64) if groups is None else groups
        order = np.lexsort((-self.lengths, -groups))  # stable, the last key sorts first
        changes = np.flatnonzero(np.diff(groups[order])) + 1
        indices = []
        for of_group in np.split(order, changes):
            start = 0
            while start < len(of_group):
                count = max(max_tokens // int(self.lengths[of_group[start]]), 1)
                indices.append(of_group[start : start + count])
                start += count
        return indices

    def batch(self, index: Int[np.ndarray, " batch"]) -> Batch:
        """A batch of some sentences, padded to the longest."""
        source = padded(self.source_tokens, self.source_offsets, index) if self.has_sources else None
        images = torch.from_numpy(self.images[index]) if len(self.images) else None
        return Batch(index, *padded(self.tokens, self.offsets, index), source, images)


def check_examples(examples: Examples, fingerprint: str | None, what: str) -> None:
    """Raise InputError if something was made of other examples, where these are known."""
    if fingerprint is not None and fingerprint != examples.fingerprint:
        raise InputError(
            f"examples must be those of {what} ({fingerprint}), got others ({examples.fingerprint})."
        )


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Where texts of these lengths start, end to end, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


def end_to_end(
    ids: Sequence[np.ndarray],
    positions: np.ndarray,
    provenance: dict[str, Any],
    sentences: np.ndarray | None = None,
) -> Examples:
    """Examples of separate sentences."""
    offsets = _offsets(np.array([len(tokens) for tokens in ids]))
    of_each = np.arange(len(ids)) if sentences is None else sentences
    return Examples(np.concatenate(ids), offsets, positions, provenance, of_each)


def _check_consistent(examples: Examples) -> None:
    positions, sentences, n = examples.positions, examples.sentences, len(examples)
    sources = (examples.source_offsets, examples.source_tokens)
    if not _divides(examples.offsets, examples.tokens):
        raise InputError(f"offsets must ascend from 0 to {len(examples.tokens)}, the number of tokens.")
    if examples.has_sources and (len(sources[0]) != n + 1 or not _divides(*sources)):
        raise InputError(f"source_offsets must divide source_tokens into {n} texts, one per sentence.")
    if len(examples.images) not in (0, n) or len(examples.targets) not in (0, len(positions)):
        raise InputError("images must be one per sentence, and targets one per position.")
    is_ascending = len(positions) == len(sentences) and not (np.diff(sentences) < 0).any()
    if not is_ascending or not np.array_equal(np.unique(sentences), np.arange(n)):
        raise InputError(
            f"sentences must be the sentence of each of the {len(positions)} positions, ascending, with each "
            f"of the {n} sentences at least once."
        )
    lengths = examples.lengths[sentences]
    outside = (positions < 0) | (positions >= lengths)
    if outside.any():
        row = int(outside.argmax())
        raise InputError(
            f"positions of sentence {sentences[row]} must be between 0 and {lengths[row] - 1}, got "
            f"{positions[row]}."
        )


def _divides(offsets: np.ndarray, tokens: np.ndarray) -> bool:
    """Whether offsets divide tokens into texts of one or more."""
    ascend = len(offsets) > 0 and bool((np.diff(offsets) > 0).all())
    return ascend and offsets[0] == 0 and offsets[-1] == len(tokens)
