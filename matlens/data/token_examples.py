"""Examples of token ids, read at any of their positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from matlens.data.examples import LAST, VOCABULARY, Examples, end_to_end
from matlens.data.readers import check_readable, check_tokens, is_masked
from matlens.errors import InputError, checked, short
from matlens.models.inputs import DECODER, stack_of
from matlens.models.tokens import vocabulary_digest

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TokenIds = Sequence[Sequence[int]] | Tensor | np.ndarray | Mapping[str, Any]
GivenPositions = (
    Literal["last"] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[bool]] | Tensor | np.ndarray
)

# What a tokenizer returns without any effect on what a model reads.
_NOT_READ = (
    "input_ids", "attention_mask", "special_tokens_mask", "offset_mapping", "length", "labels",
    "overflow_to_sample_mapping", "overflowing_tokens", "num_truncated_tokens",
)  # fmt: skip


@checked
def make_token_examples(
    model: TransformerBridge,
    tokens: TokenIds,
    *,
    attention_mask: Tensor | np.ndarray | Sequence[Sequence[int]] | Sequence[Sequence[bool]] | None = None,
    positions: GivenPositions = "last",
    sources: TokenIds | None = None,
    name: str = "tokens",
) -> Examples:
    """Make examples of token ids, read at any of their positions.

    Nothing is added, truncated or masked.

    Parameters
    ----------
    tokens
        A list of ids for each sentence; or a padded batch ``[n, longest]`` with its mask; or the output of a
        Hugging Face tokenizer.
    attention_mask
        1 at tokens of the batch and 0 at padding, which may be on the left or on the right.
    positions
        ``"last"``; or integers, one or a list for each sentence, counted from its first token without
        padding, or from its end if negative; or a Boolean mask of the shape of the tokens. Rows of vectors
        have the same order.
    sources
        For the decoder of an encoder-decoder, a list of ids for each sentence that the encoder reads. The
        tokens are then those of the decoder, including its start token.
    name
        Name of the examples in tables.

    Examples
    --------
    >>> encoded = model.tokenizer(["The capital of France is Paris.", "Two and two is four."])
    >>> examples = matlens.make_token_examples(model, encoded, positions=[[-2, -1], [-1]])
    """
    check_readable(model)
    if isinstance(tokens, Mapping):
        tokens, attention_mask = _from_encoding(tokens, attention_mask)
    rows = _rows(tokens, "tokens", "iu")
    if attention_mask is not None:
        masks = _masks(_rows(attention_mask, "attention_mask", "iub"), rows)
    else:
        is_batch = isinstance(tokens, Tensor | np.ndarray)
        if is_batch or (len(rows) > 1 and len({len(row) for row in rows}) == 1):
            _check_unpadded(rows, model)
        masks = [np.ones(len(row), dtype=bool) for row in rows]
    ids = [row[mask] for row, mask in zip(rows, masks, strict=True)]
    for number, sentence in enumerate(ids):
        _check_ids(sentence, number, model)
    if isinstance(positions, str):
        if is_masked(model):
            raise InputError("positions must be those of the masks in a masked-LM model, got 'last'.")
        kind, chosen = LAST, [np.array([len(sentence) - 1]) for sentence in ids]
    else:
        given = _rows(positions, "positions", "iub")
        if len(given) != len(ids):
            raise InputError(f"positions must have {len(ids)} entries, one per sentence, got {len(given)}.")
        kind = "tokens of a mask" if given[0].dtype.kind == "b" else "given"
        chosen = [_positions(*each) for each in zip(given, masks, range(len(ids)), strict=True)]
    counts = [len(each) for each in chosen]
    provenance = {
        "corpus": name,
        "given_as": "tokens",
        "position": kind,
        "masked": False,
        VOCABULARY: vocabulary_digest(model.tokenizer),
        "n": len(ids),
        "n_positions": sum(counts),
    }
    sentences = np.repeat(np.arange(len(ids)), counts)
    examples = end_to_end(
        [sentence.astype(np.int64) for sentence in ids], np.concatenate(chosen), provenance, sentences
    )
    return examples if sources is None else with_sources(model, examples, _rows(sources, "sources", "iu"))


def with_sources(model: TransformerBridge, examples: Examples, sources: Sequence[np.ndarray]) -> Examples:
    """Examples of a decoder, with the tokens that its encoder reads for each sentence."""
    if stack_of(model) != DECODER:
        raise InputError("sources must be None unless the model was loaded with stack='decoder'.")
    if len(sources) != len(examples):
        raise InputError(f"sources must have {len(examples)} entries, one per sentence, got {len(sources)}.")
    for number, source in enumerate(sources):
        _check_ids(source, number, model)
    offsets = np.concatenate([[0], np.cumsum([len(source) for source in sources])])
    tokens = np.concatenate(sources).astype(np.int64)
    return replace(examples, source_tokens=tokens, source_offsets=offsets)


def _from_encoding(encoding: Mapping[str, Any], mask: Any) -> tuple[Any, Any]:
    """Ids and mask of the output of a tokenizer."""
    segments = any(torch.as_tensor(row).any() for row in encoding.get("token_type_ids", ()))
    unknown = [key for key in encoding if key not in _NOT_READ and (key != "token_type_ids" or segments)]
    if "input_ids" not in encoding or unknown:
        raise InputError(
            "tokens must hold 'input_ids' and 'attention_mask' alone, got "
            f"{', '.join(map(short, encoding))}. Examples do not store other inputs of a model."
        )
    own = encoding.get("attention_mask")
    if mask is not None and own is not None:
        raise InputError("attention_mask must be None where the tokens hold their own.")
    return encoding["input_ids"], own if mask is None else mask


def _rows(values: Any, name: str, kinds: str) -> list[np.ndarray]:
    """An array with one axis for each sentence; of positions also a single integer."""
    rows = [np.asarray(row.tolist() if isinstance(row, Tensor) else row) for row in values]
    if not rows:
        raise InputError(f"{name} must have at least one sentence.")
    n_axes = (0, 1) if name == "positions" else (1,)
    for number, row in enumerate(rows):
        if row.ndim not in n_axes or not row.size or row.dtype.kind not in kinds:
            raise InputError(
                f"{name} must be integers for each sentence, got {short(row)} for number {number}."
            )
    return [np.atleast_1d(row) for row in rows]


def _check_ids(ids: np.ndarray, number: int, model: TransformerBridge) -> None:
    check_tokens(model, ids, f"sentence {number}")
    if len(ids) > model.cfg.n_ctx:
        raise InputError(f"Sentence {number} must have at most {model.cfg.n_ctx} tokens, got {len(ids)}.")


def _masks(given: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Boolean masks of tokens other than padding."""
    if [row.shape for row in given] != [row.shape for row in rows]:
        raise InputError("attention_mask must have the shape of the tokens.")
    for number, row in enumerate(given):
        at = np.flatnonzero(row)
        if not np.isin(row, (0, 1)).all() or not len(at) or at[-1] - at[0] + 1 != len(at):
            raise InputError(
                "attention_mask must be 1 at the tokens of a sentence and 0 at padding around them, got "
                f"{short(row.tolist())} for sentence {number}."
            )
    return [row.astype(bool) for row in given]


def _check_unpadded(rows: Sequence[np.ndarray], model: TransformerBridge) -> None:
    """Refuse a batch that begins or ends with padding, which would be read as tokens."""
    tokenizer = model.tokenizer
    pad = None if tokenizer is None else tokenizer.pad_token_id
    if pad is None:
        return
    in_front = 2 if pad == tokenizer.bos_token_id else 1  # if padding is the BOS, the last of them is a token
    for number, row in enumerate(rows):
        if row[-1] == pad or (row[:in_front] == pad).sum() == in_front:
            raise InputError(
                f"attention_mask must be given, since sentence {number} begins or ends with {pad}, the "
                "padding token."
            )


def _positions(given: np.ndarray, mask: np.ndarray, number: int) -> np.ndarray:
    """Positions counted from a sentence's first token, from a mask or from some that count from its end."""
    where, length = f"positions of sentence {number}", int(mask.sum())
    if given.dtype.kind == "b":
        if given.shape != mask.shape or (given & ~mask).any():
            raise InputError(f"{where} must have the shape of its tokens, and be False at padding.")
        given = np.flatnonzero(given[mask])
    outside = (given < -length) | (given >= length)
    if outside.any():
        raise InputError(f"{where} must be between 0 and {length - 1}, got {given[outside.argmax()]}.")
    positions = given.astype(np.int64)  # after the check: it turns 2**64 - 1 into -1
    positions = np.where(positions < 0, positions + length, positions)
    if not len(positions) or len(np.unique(positions)) < len(positions):
        raise InputError(f"{where} must be one or more, and different, got {given.tolist()[:10]}.")
    return positions
