"""Text on which a loss is measured: for decoders the next token, for masked-LM models what masks hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from jaxtyping import Int

from matlens.data.corpus import Corpus, as_corpus
from matlens.data.examples import TOKENIZATION, Examples, end_to_end
from matlens.data.prompts import make_windows
from matlens.data.readers import context_length, mask_token
from matlens.errors import Between, InputError, Seed, checked
from matlens.models.tokens import encode_text, token_policy

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

MASKED = 0.15  # of a sentence's tokens, as BERT is trained


@checked
@dataclass(frozen=True, eq=False)
class JudgedText:
    """Text with the tokens that a model should think likely.

    Attributes
    ----------
    examples
        What the model reads; its positions are those that something is predicted at.
    truth
        The right token at each position.
    """

    examples: Examples
    truth: Int[np.ndarray, " n_positions"]

    def __post_init__(self) -> None:
        if len(self.truth) != self.examples.n_positions:
            raise InputError(
                f"There are {len(self.truth)} right tokens for {self.examples.n_positions} positions. "
                "Expected one for each."
            )

    @property
    def texts(self) -> Int[np.ndarray, " n_positions"]:
        """The number of the text that each position is in."""
        return self.examples.sentences


@checked
def make_judged_text(
    model: TransformerBridge,
    corpus: Corpus | Sequence[str],
    *,
    size: Annotated[int, Between(2)] = 64,
    most: Annotated[int, Between(2)] | None = None,
    seed: Seed = 0,
) -> JudgedText:
    """Running text in windows, with the next token at every place; or sentences with some tokens masked.

    Parameters
    ----------
    model
        The model that is to read it. For a decoder, windows of the joined sentences are made, see
        `matlens.data.make_windows`; for a masked-LM model each sentence stands for itself, and 15% of its
        tokens, at least one, are masked.
    corpus
        The sentences.
    size
        Tokens of a window, or most tokens of a sentence, which is cut there.
    most
        Take no more windows or sentences than this, by default all.
    seed
        Seed of the masks.

    Raises
    ------
    InputError
        There are fewer than two texts, or the model has no mask.
    """
    corpus = as_corpus(corpus)
    mask = mask_token(model)
    if mask is None:
        made = _running(make_windows(model, corpus, size=size, most=most))
    else:
        made = _masked(model, mask, corpus, size, most, seed)
    if len(made.examples) < 2:
        raise InputError(
            f"{corpus.name} gives {len(made.examples)} text of {size} tokens. Expected two at least, so that "
            "intervals can be told: a larger corpus, or smaller windows."
        )
    return made


def _running(windows: Examples) -> JudgedText:
    """All places of windows but the last of each."""
    last = np.zeros(len(windows.tokens), dtype=bool)
    last[windows.offsets[1:] - 1] = True
    sentences = np.repeat(np.arange(len(windows)), windows.lengths)
    examples = replace(
        windows, positions=windows.places[~last], sentences=sentences[~last],
        provenance={**windows.provenance, "position": "all but the last"},
    )  # fmt: skip
    return JudgedText(examples, windows.tokens[1:][~last[:-1]])


def _masked(
    model: TransformerBridge, mask: int, corpus: Corpus, size: int, most: int | None, seed: int
) -> JudgedText:
    generator, longest = np.random.default_rng(seed), min(size, context_length(model))
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    truth: list[np.ndarray] = []
    sentences: list[np.ndarray] = []
    for text in corpus.sentences[:most]:
        encoded = encode_text(model, text, longest=longest)
        tokens = np.asarray(encoded.ids, dtype=np.int64)
        free = np.flatnonzero(~np.asarray(encoded.added, dtype=bool))
        if not len(free):
            continue
        n = max(1, round(MASKED * len(free)))
        chosen = np.sort(generator.choice(free, n, replace=False))
        truth.append(tokens[chosen].copy())
        tokens[chosen] = mask
        sentences.append(np.full(n, len(ids)))
        ids.append(tokens)
        positions.append(chosen)
    if not ids:
        raise InputError(f"{corpus.name} holds no token that could be masked. Expected sentences.")
    provenance = {
        "corpus": corpus.name, "corpus_fingerprint": corpus.fingerprint, "seed": seed,
        "position": f"{MASKED:.0%} of a sentence's tokens", "masked": True,
        TOKENIZATION: token_policy(model).digest, "n": len(ids),
    }  # fmt: skip
    examples = end_to_end(ids, np.concatenate(positions), provenance, np.concatenate(sentences))
    return JudgedText(examples, np.concatenate(truth))
