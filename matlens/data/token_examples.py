"""Examples of tokens that the user already has, read at any of their positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from matlens.data.examples import LAST, Examples, end_to_end
from matlens.data.readers import check_model, check_readable, check_tokens, is_masked
from matlens.errors import InputError, short
from matlens.models.stacks import DECODER, stack_of

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TokenIds = Sequence[Sequence[int]] | Tensor | np.ndarray | Mapping[str, Any]
GivenPositions = Literal["last"] | Sequence[int] | Sequence[Sequence[int]] | Tensor | np.ndarray

# What a tokenizer returns beside ids and mask, and what a model would not read any differently.
_NOT_READ = (
    "input_ids", "attention_mask", "special_tokens_mask", "offset_mapping", "length", "labels",
    "overflow_to_sample_mapping", "overflowing_tokens", "num_truncated_tokens",
)  # fmt: skip


def make_token_examples(
    model: TransformerBridge,
    tokens: TokenIds,
    *,
    attention_mask: Tensor | np.ndarray | Sequence[Sequence[int]] | None = None,
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
    check_model(model)
    check_readable(model)
    if isinstance(tokens, Mapping) or hasattr(tokens, "input_ids"):
        tokens, attention_mask = _from_encoding(tokens, attention_mask)
    rows = _rows(tokens)
    columns = _columns(tokens, rows, attention_mask, model)
    ids = [row[at] for row, at in zip(rows, columns, strict=True)]
    for number, sentence in enumerate(ids):
        _check_ids(sentence, number, model)
    kind, chosen = _positions(positions, rows, columns)
    if kind == LAST and is_masked(model):
        raise InputError(
            "This is a masked-LM model, which predicts nothing at the last token. Expected positions=, such "
            "as those of the mask."
        )
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
    return examples if sources is None else with_sources(model, examples, _rows(sources))


def with_sources(model: TransformerBridge, examples: Examples, sources: Sequence[np.ndarray]) -> Examples:
    """Examples of a decoder, with what its encoder reads for each sentence.

    Raises
    ------
    InputError
        The model is no decoder that reads an encoder, or the sources are not one for each sentence, or have
        tokens that the model does not know.
    """
    if stack_of(model) != DECODER:
        raise InputError("Sources are for the decoder of an encoder-decoder, loaded with stack='decoder'.")
    if len(sources) != len(examples):
        raise InputError(f"There are {len(sources)} sources for {len(examples)} sentences. Expected as many.")
    for number, source in enumerate(sources):
        _check_ids(source, number, model)
    offsets = np.concatenate([[0], np.cumsum([len(source) for source in sources])])
    tokens = np.concatenate(sources).astype(np.int64)
    return replace(examples, source_tokens=tokens, source_offsets=offsets)


def _from_encoding(encoding: Any, mask: Any) -> tuple[Any, Any]:
    """Ids and mask of what a tokenizer returns."""
    fields = dict(encoding.items()) if hasattr(encoding, "items") else dict(vars(encoding))
    if "input_ids" not in fields:
        raise InputError(
            f"The tokens hold {', '.join(map(short, fields)) or 'nothing'}. Expected 'input_ids', as a "
            "tokenizer returns them."
        )
    kinds = fields.pop("token_type_ids", None)
    if kinds is not None and any(np.asarray(row).any() for row in kinds):
        raise InputError(
            "The tokens hold token_type_ids other than 0, which examples do not keep: the model would read "
            "them as of one segment. Expected sentences that are encoded one by one."
        )
    unknown = [key for key in fields if key not in _NOT_READ]
    if unknown:
        raise InputError(
            f"The tokens hold {short(unknown[0])}, which would change what the model reads and which "
            "examples do not keep. Expected 'input_ids' and 'attention_mask'."
        )
    if mask is not None and fields.get("attention_mask") is not None:
        raise InputError(
            "There are two attention masks: leave out attention_mask=, the tokens hold their own."
        )
    return fields["input_ids"], fields.get("attention_mask") if mask is None else mask


def _columns(
    tokens: Any, rows: Sequence[np.ndarray], mask: Any, model: TransformerBridge
) -> list[np.ndarray]:
    """The columns of each row that hold tokens and no padding."""
    if mask is None:
        alike = len({len(row) for row in rows}) == 1
        if isinstance(tokens, (Tensor, np.ndarray)) or (alike and len(rows) > 1):
            _check_unpadded(rows, model)
        return [np.arange(len(row)) for row in rows]
    columns = [np.flatnonzero(row) for row in _mask_rows(mask, rows)]
    for number, at in enumerate(columns):
        if not len(at):
            raise InputError(f"Sentence {number} is empty: its attention mask is 0 at every token.")
        if at[-1] - at[0] + 1 != len(at):
            raise InputError(
                f"The attention mask of sentence {number} has padding between its tokens. Expected padding "
                "on the left or on the right."
            )
    return columns


def _rows(tokens: Any) -> list[np.ndarray]:
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Iterable):
        raise InputError(
            f"The tokens are {short(tokens)}. Expected lists of token ids or a batch; texts go to "
            "matlens.make_prompts()."
        )
    batch = _array(tokens) if isinstance(tokens, (Tensor, np.ndarray)) else None
    if batch is not None and batch.ndim != 2:
        hint = " One sentence is a batch of one: tokens[None]." if batch.ndim == 1 else ""
        raise InputError(
            f"The tokens have the shape {batch.shape}. Expected a batch of the shape [n, longest].{hint}"
        )
    rows = list(batch) if batch is not None else list(tokens)
    if not rows:
        raise InputError("There are no tokens. Expected at least one sentence.")
    arrays = []
    for number, row in enumerate(rows):
        if isinstance(row, (str, bytes)) or not isinstance(row, (Sequence, Tensor, np.ndarray)):
            raise InputError(
                f"Sentence {number} is {short(row)}. Expected a list of token ids for each sentence; one "
                "sentence is a list of one: [tokens]."
            )
        array = _array(row)
        if array.ndim != 1:
            raise InputError(
                f"Sentence {number} has the shape {array.shape}. Expected a list of token ids, [length]."
            )
        if not len(array):
            raise InputError(f"Sentence {number} is empty. Expected at least one token in each.")
        if array.dtype.kind not in "iu":
            raise InputError(
                f"The tokens of sentence {number} are no whole numbers ({array.dtype}). Expected the ids of "
                "tokens; texts go to matlens.make_prompts()."
            )
        arrays.append(array)
    return arrays


def _array(values: Any) -> np.ndarray:
    if np.ma.is_masked(values):
        raise InputError("Tokens and positions must not be masked: numbers behind the mask would be read.")
    if isinstance(values, Tensor):
        if not values.is_floating_point() and not values.is_complex():
            return values.detach().cpu().numpy()
        return np.empty(tuple(values.shape), dtype=np.float32)  # of the wrong kind, and refused by it
    no_numbers = np.empty(1, dtype=object)
    if isinstance(values, Sequence) and len({isinstance(value, (bool, np.bool_)) for value in values}) > 1:
        return no_numbers  # NumPy would take True for 1
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError):  # lists of different lengths, or what is no number
        return no_numbers


def _check_ids(ids: np.ndarray, number: int, model: TransformerBridge) -> None:
    check_tokens(model, ids, f"sentence {number}")
    if len(ids) > model.cfg.n_ctx:
        raise InputError(
            f"Sentence {number} has {len(ids)} tokens, and the model's context {model.cfg.n_ctx}. Cut it "
            "where it may be cut: tokens that are given are not."
        )


def _mask_rows(mask: Any, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The rows of an attention mask as truth values, in the shape of the tokens."""
    given = _of_shape(mask, rows, "The attention mask")
    for number, row in enumerate(given):
        if row.dtype.kind not in "iub" or not np.isin(row, (0, 1)).all():
            raise InputError(
                f"The attention mask of sentence {number} holds other values than 0 and 1. Expected 1 at "
                "tokens and 0 at padding."
            )
    return [row.astype(bool) for row in given]


def _of_shape(values: Any, rows: Sequence[np.ndarray], what: str) -> list[np.ndarray]:
    """Values for each token, row by row; refused where they are not as many as the tokens."""
    usable = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    given = [_array(row) for row in values] if usable and getattr(values, "ndim", None) != 0 else []
    lengths, expected = [row.shape for row in given], [(len(row),) for row in rows]
    if lengths != expected:
        shape = tuple(getattr(values, "shape", ())) or f"{len(given)} rows"
        differing = next((i for i, (a, b) in enumerate(zip(lengths, expected, strict=False)) if a != b), None)
        where = "" if differing is None else f", and they differ first in sentence {differing}"
        raise InputError(
            f"{what} has another shape than the tokens ({shape}, for {len(rows)} sentences{where}). Expected "
            "one value for each token."
        )
    return given


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
    positions: Any, tokens: Sequence[np.ndarray], columns: Sequence[np.ndarray]
) -> tuple[str, list[np.ndarray]]:
    """How positions were chosen, and those of each sentence, counted from its first token."""
    expected = (
        "Expected 'last', a position or a list of positions for each sentence, or a truth value for each "
        "token."
    )
    if isinstance(positions, str):
        if positions != "last":
            raise InputError(f"The positions are {short(positions)}. {expected}")
        return LAST, [np.array([len(at) - 1]) for at in columns]
    scalar = getattr(positions, "ndim", 1) == 0
    if scalar or isinstance(positions, (bytes, Mapping)) or not isinstance(positions, Iterable):
        raise InputError(f"The positions are {short(positions)}. {expected}")
    whole = positions if isinstance(positions, (Tensor, np.ndarray)) else None
    rows = [_array(row) for row in (positions if whole is None else _array(whole))]
    if len(rows) != len(columns):
        raise InputError(
            f"There are positions for {len(rows)} sentences, and {len(columns)} sentences. {expected}"
        )
    if any(row.dtype.kind == "b" for row in rows):
        return "tokens of a mask", _marked(rows, tokens, columns)
    if any(row.dtype.kind not in "iu" or row.ndim > 1 for row in rows):
        number = next(i for i, row in enumerate(rows) if row.dtype.kind not in "iu" or row.ndim > 1)
        raise InputError(f"The positions of sentence {number} are no whole numbers. {expected}")
    chosen = [
        _resolved(np.atleast_1d(row), len(at), number)
        for number, (row, at) in enumerate(zip(rows, columns, strict=True))
    ]
    return "given", chosen


def _marked(
    mask: Sequence[np.ndarray], tokens: Sequence[np.ndarray], columns: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Positions of the tokens that a mask marks."""
    given = _of_shape(mask, tokens, "The mask of positions")
    chosen = []
    for number, (row, at) in enumerate(zip(given, columns, strict=True)):
        if row.dtype.kind != "b":
            raise InputError(
                f"The mask of positions of sentence {number} holds no truth values. Expected true or false "
                "for each token."
            )
        marked = np.flatnonzero(row)
        if not np.isin(marked, at).all():
            raise InputError(
                f"The mask of positions marks padding in sentence {number}. Expected it true only at tokens."
            )
        if not len(marked):
            raise InputError(
                f"The mask of positions marks no token of sentence {number}. Mark at least one in each "
                "sentence, or leave the sentence out."
            )
        chosen.append(np.searchsorted(at, marked))
    return chosen


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
