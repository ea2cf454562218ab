"""What a model goes on from: prompts, of RealToxicityPrompts, JSON lines or a text; and running text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from matlens.data.corpus import Corpus, as_corpus
from matlens.data.examples import LAST, TOKENIZATION, Examples, end_to_end
from matlens.data.readers import (
    check_decoder,
    check_model,
    check_readable,
    context_length,
    is_masked,
)
from matlens.data.sources import json_rows, text_of_row
from matlens.data.streams import numbered_lines
from matlens.errors import Between, InputError, PositiveInt, check, checked, short
from matlens.models.tokenization import (
    TextTokens,
    check_tokenizer,
    encode_text,
    token_policy,
    warn_of_unknown,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PROMPT_FIELD = "prompt"
"""Field of JSON lines that holds a prompt unless another is given."""
CHALLENGING_FIELD = "challenging"
WINDOW_TOKENS = 1024  # tokens that running text is read in at once, as in paper B


@checked
def read_prompts(path: str | Path, *, field: str = PROMPT_FIELD, challenging: bool = False) -> list[str]:
    """Read prompts from a file; blank ones are left out, and so is white space around them.

    Parameters
    ----------
    path
        JSON lines where the name ends in ``.jsonl`` or ``.json``, such as RealToxicityPrompts; otherwise a
        text with one prompt a line.
    field
        Name of the field that holds the prompt in JSON lines: a text, or an object with a ``text``.
    challenging
        Whether to keep only prompts that are marked as challenging, as the paper does with
        RealToxicityPrompts.

    Raises
    ------
    InputError
        There is no such file, a line of it is not as expected (the message names it), or no prompt is left.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(
            f"There is no file {str(path)!r}. Expected prompts: a text with one a line, or JSON lines such "
            "as those of RealToxicityPrompts."
        )
    if path.name.lower().endswith((".jsonl", ".json")):
        texts = list(_json_prompts(path, field, challenging))
    elif path.name.lower().endswith((".csv", ".tsv")):
        raise InputError(
            f"{str(path)!r} is a table, whose heading would be read as a prompt. Expected a text with one "
            "prompt a line, or JSON lines."
        )
    elif challenging:
        raise InputError(
            f"{str(path)!r} is a text, which marks no prompt as challenging. Expected JSON lines with a "
            f"truth value in {CHALLENGING_FIELD!r}, as RealToxicityPrompts has, or to read all prompts."
        )
    else:
        texts = [line.strip() for _, line in numbered_lines(path)]
    prompts = [prompt for prompt in texts if prompt]
    if not prompts:
        kind = "challenging prompt" if challenging else "prompt"
        raise InputError(f"{str(path)!r} has no {kind} in its {len(texts)} lines. Expected at least one.")
    return prompts


def _json_prompts(path: Path, field: str, challenging: bool) -> Iterator[str]:
    for where, row in json_rows(path):
        if row is None:
            continue
        text = _prompt_text(row, field, where)
        yield "" if challenging and not _is_challenging(row, where) else text.strip()


def _prompt_text(row: dict[str, Any], field: str, where: str) -> str:
    prompt = row.get(field)
    if isinstance(prompt, dict):
        return text_of_row(prompt, "text", f"{field!r} in {where}")
    return text_of_row(row, field, where)


def _is_challenging(row: dict[str, Any], where: str) -> bool:
    mark = row.get(CHALLENGING_FIELD)
    if not isinstance(mark, bool):
        raise InputError(
            f"The field {CHALLENGING_FIELD!r} in {where} holds {mark!r}. Expected true or false, as in "
            "RealToxicityPrompts."
        )
    return mark


@checked
def make_prompts(model: TransformerBridge, prompts: Corpus | Iterable[str]) -> Examples:
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
        There is no prompt, a prompt is empty, or does not hold exactly one mask token where one is needed; or
        these are no texts.
    """
    check_model(model)
    prompts = list_of_texts(prompts)
    check_readable(model)
    tokenizer = check_tokenizer(model)
    n_ctx = context_length(model)
    ids, positions = [], []
    of_prompts = [encode_text(model, prompt) for prompt in prompts]
    warn_of_unknown(model, prompts, of_prompts)
    for prompt, encoded in zip(prompts, of_prompts, strict=True):
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
            raise InputError(f"The prompt {short(prompt)} cannot be read out: expected {expected} in it.")
        positions.append(int(places[0]))
    if not ids:
        raise InputError("There are no prompts. Expected at least one.")
    provenance = {"corpus": "prompts", TOKENIZATION: token_policy(model).digest, "n": len(ids)}
    return end_to_end(ids, np.array(positions), provenance)


@checked
def make_windows(
    model: TransformerBridge,
    source: str | Path | Corpus | Sequence[str],
    *,
    size: Annotated[int, Between(2)] = WINDOW_TOKENS,
    most: PositiveInt | None = None,
    name: str | None = None,
) -> Examples:
    """Cut running text into windows that do not overlap, to be read each for itself (paper B, Table 5).

    The tokens are those of the whole text, and the last window may be shorter. What the model is given in
    front of any text, such as a BOS, stands in front of each window. The position of a window is its last
    token.

    Parameters
    ----------
    model
        The model that is to read them, a decoder.
    source
        The path of a file that holds the text, plain or packed; or a corpus or a list of texts,
        which are joined by spaces in their order.
    size
        Tokens of a window, or the model's context where that is shorter.
    most
        Take no more whole windows than this, spread evenly over the text; by default all there are.
    name
        What the windows are called in tables, by default as the corpus or the file.

    Raises
    ------
    InputError
        The text has fewer than two tokens, the file cannot be read, a size is not usable, or the model
        predicts masked tokens.
    """
    check_model(model)
    check_readable(model)
    check_decoder(model, "reads no running text")
    size = min(size, context_length(model))
    text, default = _running_text(source)
    ids, front = _with_front(encode_text(model, text))
    step = size - len(front)
    if step < 1:
        raise InputError(
            f"A window of {size} tokens has no room for text: {len(front)} tokens stand in front of each. "
            f"Expected a size of {len(front) + 1} at least."
        )
    windows = [np.concatenate([front, ids[start : start + step]]) for start in range(0, len(ids), step)]
    if len(windows) > 1 and len(windows[-1]) < 2:  # it would predict nothing
        windows.pop()
    if not windows or len(windows[0]) < 2:
        raise InputError(
            f"The text {short(text)} has {len(ids)} tokens. Expected two at least: one to predict another."
        )
    if most is not None and most < len(windows):
        whole = [window for window in windows if len(window) == size]
        windows = [
            whole[i] for i in np.linspace(0, len(whole) - 1, min(most, len(whole))).round().astype(int)
        ]
    provenance = {
        "corpus": default if name is None else name,
        "corpus_fingerprint": hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16],
        "given_as": "running text",
        TOKENIZATION: token_policy(model).digest,
        "window": size,
        "position": LAST,
        "masked": False,
        "n": len(windows),
    }
    return end_to_end(windows, np.array([len(window) - 1 for window in windows]), provenance)


def _with_front(tokens: TextTokens) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a text itself, and those that a tokenizer puts in front of it."""
    n_front = tokens.added.index(False) if False in tokens.added else len(tokens.added)
    text_ids = [token for token, added in zip(tokens.ids, tokens.added, strict=True) if not added]
    return np.asarray(text_ids, dtype=np.int64), np.asarray(tokens.ids[:n_front], dtype=np.int64)


def _running_text(source: str | Path | Corpus | Sequence[str]) -> tuple[str, str]:
    """A text, and what it is called."""
    if not isinstance(source, str | Path):
        corpus = as_corpus(source)
        return " ".join(corpus.sentences), corpus.name
    path = Path(source).expanduser()
    if not path.is_file():
        raise InputError(f"There is no file {short(str(path))}. Expected a file with running text.")
    return "".join(line for _, line in numbered_lines(path)), path.name


def list_of_texts(prompts: Any) -> list[str]:
    """Texts as a list; raises InputError if it is one text, or if an item is not a text."""
    if isinstance(prompts, Corpus):
        return list(prompts.sentences)
    check(prompts, Sequence[Any], "prompts")
    texts = list(prompts)
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise InputError(
            f"prompts must be texts, got {short(wrong[0])}. Use matlens.make_token_examples for token ids."
        )
    return texts
