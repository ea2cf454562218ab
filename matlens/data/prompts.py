"""Prompts, and running text in windows, as examples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from matlens.data.corpus import Corpus, as_corpus
from matlens.data.examples import LAST, TOKENIZATION, Examples, end_to_end
from matlens.data.readers import check_decoder, check_readable, context_length, is_masked
from matlens.data.texts import open_text
from matlens.errors import Between, InputError, PositiveInt, checked, short
from matlens.models.tokens import (
    check_tokenizer,
    encode_text,
    token_policy,
    warn_of_unknown,
)

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

WINDOW_TOKENS = 1024  # tokens that running text is read in at once, as in paper B


@checked
def make_prompts(model: TransformerBridge, prompts: Corpus | Sequence[str]) -> Examples:
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
        There is no prompt, or one is empty or does not hold exactly one mask token where that is needed.
    """
    texts = as_corpus(prompts).sentences
    check_readable(model)
    tokenizer, n_ctx = check_tokenizer(model), context_length(model)
    encoded = [encode_text(model, text) for text in texts]
    warn_of_unknown(model, texts, encoded)
    ids = [np.asarray(tokens.ids, dtype=np.int64) for tokens in encoded]
    positions = []
    for text, tokens, (_, added) in zip(texts, ids, encoded, strict=True):
        if len(tokens) > n_ctx:
            raise InputError(
                f"The prompt of {len(tokens)} tokens is longer than the model's context of {n_ctx}."
            )
        places = np.flatnonzero(tokens == tokenizer.mask_token_id)
        if not is_masked(model):  # an end-of-text token that the tokenizer adds is not the prompt's last
            places = np.flatnonzero(~np.asarray(added, dtype=bool))[-1:]
        if len(places) != 1:
            expected = f"exactly one {tokenizer.mask_token}" if is_masked(model) else "at least one token"
            raise InputError(f"The prompt {short(text)} cannot be read out: expected {expected} in it.")
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
    check_readable(model)
    check_decoder(model, "reads no running text")
    size = min(size, context_length(model))
    text, default = _running_text(source)
    all_ids, added = encode_text(model, text)
    front = all_ids[: added.index(False) if False in added else len(added)]
    ids = [token for token, flag in zip(all_ids, added, strict=True) if not flag]
    step = size - len(front)
    if step < 1:
        raise InputError(
            f"A window of {size} tokens has no room for text: {len(front)} tokens stand in front of each. "
            f"Expected a size of {len(front) + 1} at least."
        )
    windows = [np.array(front + ids[start : start + step]) for start in range(0, len(ids), step)]
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


def _running_text(source: str | Path | Corpus | Sequence[str]) -> tuple[str, str]:
    """A text, and what it is called."""
    if not isinstance(source, str | Path):
        corpus = as_corpus(source)
        return " ".join(corpus.sentences), corpus.name
    path = Path(source).expanduser()
    with open_text(path) as (_, lines):
        return "".join(line for _, line in lines), path.name
