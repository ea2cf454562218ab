"""How common the tokens are that vectors promote, told from a running text."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from matlens.corpora.corpus import Corpus

KINDS = ("unlikely", "common", "other")
_HALF = 0.5  # of the running text is made of common tokens
_COMMON, _UNSEEN = 0.5, 0.9  # of a vector's top tokens, from which on it is of a kind


class TokenFrequency:
    """How common each token is in a running text.

    Attributes
    ----------
    counts
        ``[d_vocab]``, how often each token occurs.
    common
        ``[d_vocab]``, whether it is of the fewest tokens that make half of the text, of equally frequent
        ones those with the smaller numbers.

    Parameters
    ----------
    tokens
        The text.
    d_vocab
        How many tokens there are.
    """

    def __init__(self, tokens: Int[np.ndarray, " n"], d_vocab: int) -> None:
        self.counts = np.bincount(tokens, minlength=d_vocab)
        order = np.argsort(-self.counts, kind="stable")
        running = np.cumsum(self.counts[order])
        self.common = np.zeros(d_vocab, dtype=bool)
        self.common[order[: int(np.searchsorted(running, _HALF * running[-1])) + 1]] = True

    @classmethod
    def from_corpus(cls, corpus: Corpus, tokenizer: Any, d_vocab: int) -> TokenFrequency:
        """Count the tokens of all sentences of a corpus."""
        encoded = tokenizer(list(corpus.sentences), add_special_tokens=False)["input_ids"]
        return cls(np.concatenate([np.asarray(one, dtype=np.int64) for one in encoded]), d_vocab)

    def shares(self, ids: Int[np.ndarray, "n k"]) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """For each list of tokens the share that is common, and the share that does not occur."""
        return self.common[ids].mean(1), (self.counts[ids] == 0).mean(1)


def frequency_kinds(common: Float[np.ndarray, " n"], unseen: Float[np.ndarray, " n"]) -> list[str]:
    """``common`` where half of the tokens are, ``unlikely`` where nine in ten do not occur, or ``other``."""
    return [
        "common" if often >= _COMMON else "unlikely" if never >= _UNSEEN else "other"
        for often, never in zip(common, unseen, strict=True)
    ]
