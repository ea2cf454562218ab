"""Examples of tokens that the user already has, read at any of their positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from matlens.data.examples import LAST, Examples, end_to_end
from matlens.data.readers import check_readable, check_tokens, is_masked
from matlens.errors import InputError, checked, short
from matlens.models.families.encoder_decoders import DECODER, stack_of

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TokenIds = Sequence[Sequence[int]] | Tensor | np.ndarray | Mapping[str, Any]
GivenPositions = (
    Literal["last"] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[bool]] | Tensor | np.ndarray
)

# What a tokenizer returns besides ids and mask, and what a model would not read any differently.
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

    The ids are read as they are: nothing is put in front, cut or replaced, and in a masked-LM model the mask
    stands where you have put it.

    Parameters
    ----------
    model
        The model that is to read them.
    tokens
        Lists of ids, one for each sentence; or a padded batch ``[n, longest]`` with its mask; or what a
        Hugging Face tokenizer returns, which holds both.
    attention_mask
        1 where the batch holds a token and 0 at padding, which may be on the left or on the right.
    positions
        Where vectors are read. ``"last"``: at the last token of each sentence. Whole numbers, one for each
        sentence or a list for each: counted from the sentence's own first token, padding not counted, and
        from its end where they are negative; rows of vectors keep their order. Truth values in the shape of
        the tokens: at every token that is marked, such as all tokens of an answer.
    sources
        For the decoder of an encoder-decoder, what the encoder reads for each sentence: lists of ids. The
        tokens are then what the decoder reads, its start token first.
    name
        What the examples are called in tables, where others have the name of a corpus.

    Raises
    ------
    InputError
        An id is not in the vocabulary; a sentence is empty, longer than the model's context, or has no
        position; a position lies outside of its sentence or is given twice; a mask has another shape; the
        batch looks padded and comes without a mask; or it holds what would change what the model reads.

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
        columns = _columns(_rows(attention_mask, "attention_mask", "iub"), rows)
    else:
        if isinstance(tokens, Tensor | np.ndarray) or (
            len(rows) > 1 and len({len(row) for row in rows}) == 1
        ):
            _check_unpadded(rows, model)
        columns = [np.arange(len(row)) for row in rows]
    ids = [row[at] for row, at in zip(rows, columns, strict=True)]
    for number, sentence in enumerate(ids):
        _check_ids(sentence, number, model)
    if isinstance(positions, str):
        if is_masked(model):
            raise InputError(
                "This is a masked-LM model, which predicts nothing at the last token. Give positions=, such "
                "as those of the mask."
            )
        kind, chosen = LAST, [np.array([len(at) - 1]) for at in columns]
    else:
        kind, chosen = _positions(_rows(positions, "positions", "iub"), rows, columns)
    counts = [len(each) for each in chosen]
    provenance = {
        "corpus": name,
        "given_as": "tokens",
        "position": kind,
        "masked": False,
        "n": len(ids),
        "n_positions": sum(counts),
    }
    sentences = np.repeat(np.arange(len(ids)), counts)
    examples = end_to_end(
        [sentence.astype(np.int64) for sentence in ids], np.concatenate(chosen), provenance, sentences
    )
    return examples if sources is None else with_sources(model, examples, _rows(sources, "sources", "iu"))


def with_sources(model: TransformerBridge, examples: Examples, sources: Sequence[np.ndarray]) -> Examples:
    """Examples of a decoder, with what its encoder reads for each sentence."""
    if stack_of(model) != DECODER:
        raise InputError("Sources are for the decoder of an encoder-decoder, loaded with stack='decoder'.")
    if len(sources) != len(examples):
        raise InputError(f"There are {len(sources)} sources for {len(examples)} sentences. Expected as many.")
    for number, source in enumerate(sources):
        _check_ids(source, number, model)
    offsets = np.concatenate([[0], np.cumsum([len(source) for source in sources])])
    tokens = np.concatenate(sources).astype(np.int64)
    return replace(examples, source_tokens=tokens, source_offsets=offsets)


def _from_encoding(encoding: Mapping[str, Any], mask: Any) -> tuple[Any, Any]:
    """Ids and mask of what a tokenizer returns."""
    segments = any(torch.as_tensor(row).any() for row in encoding.get("token_type_ids", ()))
    unknown = [key for key in encoding if key not in _NOT_READ and (key != "token_type_ids" or segments)]
    if "input_ids" not in encoding or unknown:
        raise InputError(
            f"tokens hold {', '.join(map(short, encoding))}. Expected 'input_ids' and 'attention_mask' "
            "alone: examples do not keep what else changes how they are read, such as position_ids."
        )
    own = encoding.get("attention_mask")
    if mask is not None and own is not None:
        raise InputError(
            "There are two attention masks: leave out attention_mask=, the tokens hold their own."
        )
    return encoding["input_ids"], own if mask is None else mask


def _rows(values: Any, name: str, kinds: str) -> list[np.ndarray]:
    """What is given for each sentence: arrays of one axis; of positions also single numbers."""
    if isinstance(values, str) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        raise InputError(
            f"{name} must be a batch or a list with a row for each sentence, got {short(values)}."
        )
    rows = [_array(row) for row in values]
    if not rows:
        raise InputError(f"{name} must be of at least one sentence.")
    n_axes = (0, 1) if name == "positions" else (1,)
    for number, row in enumerate(rows):
        if row.ndim not in n_axes or not row.size or row.dtype.kind not in kinds:
            raise InputError(
                f"{name} must be integers for each sentence, and for sentence {number} is {short(row)}. One "
                "sentence is a list of one, and texts go to matlens.make_prompts()."
            )
    return [np.atleast_1d(row) for row in rows]


def _array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (ValueError, TypeError, RuntimeError):  # ragged lists, kinds that NumPy does not have, no numbers
        return np.empty(1, dtype=object)


def _check_ids(ids: np.ndarray, number: int, model: TransformerBridge) -> None:
    check_tokens(model, ids, f"sentence {number}")
    if len(ids) > model.cfg.n_ctx:
        raise InputError(
            f"Sentence {number} has {len(ids)} tokens, and the model's context {model.cfg.n_ctx}. Cut it "
            "where it may be cut: tokens that are given are not."
        )


def _columns(mask: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The columns of each row that hold tokens and no padding."""
    _check_shapes(mask, rows, "attention_mask")
    columns = [np.flatnonzero(row) for row in mask]
    for number, (row, at) in enumerate(zip(mask, columns, strict=True)):
        if not np.isin(row, (0, 1)).all() or not len(at) or at[-1] - at[0] + 1 != len(at):
            raise InputError(
                "attention_mask must be 1 at the tokens of a sentence and 0 at padding around them; "
                f"for sentence {number} it is {short(row.tolist())}."
            )
    return columns


def _check_shapes(given: Sequence[np.ndarray], rows: Sequence[np.ndarray], name: str) -> None:
    if [row.shape for row in given] != [row.shape for row in rows]:
        raise InputError(f"{name} has another shape than the tokens. Expected a value for each token.")


def _check_unpadded(rows: Sequence[np.ndarray], model: TransformerBridge) -> None:
    """Refuse a batch that begins or ends with padding tokens, which would be read as tokens."""
    tokenizer = model.tokenizer
    pad = None if tokenizer is None else tokenizer.pad_token_id
    if pad is None:
        return
    in_front = 2 if pad == tokenizer.bos_token_id else 1  # the first is no padding there
    for number, row in enumerate(rows):
        if row[-1] == pad or (row[:in_front] == pad).sum() == in_front:
            raise InputError(
                f"Sentence {number} of the batch begins or ends with {pad}, the token for padding, and there "
                "is no attention_mask, which tells padding from tokens. Give the tokenizer's mask, or one of "
                "ones where nothing is padding."
            )


def _positions(
    given: Sequence[np.ndarray], rows: Sequence[np.ndarray], columns: Sequence[np.ndarray]
) -> tuple[str, list[np.ndarray]]:
    """How positions were chosen, and those of each sentence, counted from its first token."""
    if len(given) != len(rows):
        raise InputError(f"There are positions for {len(given)} sentences, and {len(rows)} sentences.")
    is_mask = given[0].dtype.kind == "b"
    if any((row.dtype.kind == "b") != is_mask for row in given):
        raise InputError("positions must be numbers or truth values, got both.")
    if is_mask:
        _check_shapes(given, rows, "positions")
        marked = [np.flatnonzero(row) for row in given]
        if not all(np.isin(*pair).all() for pair in zip(marked, columns, strict=True)):
            raise InputError("positions marks padding. Expected it true only at tokens.")
        given = [np.searchsorted(at, row) for at, row in zip(columns, marked, strict=True)]
    lengths = map(len, columns)
    chosen = [_resolved(*each) for each in zip(given, lengths, range(len(given)), strict=True)]
    return "tokens of a mask" if is_mask else "given", chosen


def _resolved(positions: np.ndarray, length: int, number: int) -> np.ndarray:
    """Positions that count from the sentence's first token, from those that may count from its end."""
    if not len(positions):
        raise InputError(
            f"Sentence {number} has no position. Expected at least one, or leave the sentence out."
        )
    outside = (positions < -length) | (positions >= length)
    if outside.any():
        raise InputError(
            f"The position {positions[outside.argmax()]} lies outside of sentence {number}, which has the "
            f"tokens 0 to {length - 1}; negative positions count from its end."
        )
    resolved = np.where(positions < 0, positions + length, positions).astype(np.int64)
    if len(np.unique(resolved)) < len(resolved):
        raise InputError(f"A position of sentence {number} is given twice: {positions.tolist()[:10]}.")
    return resolved
