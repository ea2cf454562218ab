"""Frequency of tokens in a corpus, and the kind of tokens that a vector promotes."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from matlens.data import Corpus
from matlens.errors import Tokenizer

FREQUENCY_KINDS = ("unlikely", "common", "other")
_SHARE_OF_TEXT = 0.5  # share of the corpus that common tokens make up
_SHARE_COMMON, _SHARE_UNSEEN = 0.5, 0.9  # min share of a vector's top tokens for that kind


class TokenFrequency:
    """Token frequencies in a corpus.

    Attributes
    ----------
    counts
        ``[d_vocab]``, occurrences of each token.
    common
        ``[d_vocab]``, whether it is one of the most frequent tokens that make up half of the corpus; ties go
        to the smaller token id.
    """

    def __init__(self, tokens: Int[np.ndarray, " n"], d_vocab: int) -> None:
        self.counts = np.bincount(tokens, minlength=d_vocab)
        order = np.argsort(-self.counts, kind="stable")
        running = np.cumsum(self.counts[order])
        self.common = np.zeros(d_vocab, dtype=bool)
        self.common[order[: int(np.searchsorted(running, _SHARE_OF_TEXT * running[-1])) + 1]] = True

    @classmethod
    def from_corpus(cls, corpus: Corpus, tokenizer: Tokenizer, d_vocab: int) -> TokenFrequency:
        """Count the tokens of all sentences of a corpus."""
        sentences = tokenizer(list(corpus.sentences), add_special_tokens=False)["input_ids"]
        return cls(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sentences]), d_vocab)

    def shares(self, ids: Int[np.ndarray, "n k"]) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Share of common tokens and of unseen tokens in each list."""
        return self.common[ids].mean(1), (self.counts[ids] == 0).mean(1)


def frequency_kinds(common: Float[np.ndarray, " n"], unseen: Float[np.ndarray, " n"]) -> list[str]:
    """Kind of each list of tokens, by the shares that `TokenFrequency.shares` gives.

    ``common`` if at least half of the tokens are, ``unlikely`` if nine in ten do not occur, else ``other``.
    """
    return [
        "common" if share >= _SHARE_COMMON else "unlikely" if unseen_share >= _SHARE_UNSEEN else "other"
        for share, unseen_share in zip(common, unseen, strict=True)
    ]
