"""Sentences of words that small models know, as many and as long as a test wants."""

from __future__ import annotations

import numpy as np
import torch
from conftest import WORDS

from matlens.data.corpus import Corpus
from matlens.data.examples import Examples


def corpus_of(texts: list[str]) -> Corpus:
    return Corpus("words", tuple(texts), len(texts), 0, 0, 0)


def many(n: int, length: int, seed: int = 0) -> list[str]:
    """Different sentences of so many words."""
    drawn = torch.randint(50, (n, length), generator=torch.Generator().manual_seed(seed))
    texts = [" ".join(WORDS[int(word)] for word in row) for row in drawn]
    assert len(set(texts)) == n
    return texts


def examples_of(lengths: list[int]) -> Examples:
    """Sentences of these lengths, no token twice, so that a token says where it comes from."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Examples(np.arange(1, offsets[-1] + 1), offsets, np.zeros(len(lengths), dtype=np.int64))


def sentences_of(examples: Examples) -> list[list[int]]:
    return [tokens.tolist() for tokens in np.split(examples.tokens, examples.offsets[1:-1])]


def positions_of(examples: Examples) -> list[list[int]]:
    return [examples.positions[examples.sentences == s].tolist() for s in range(len(examples))]
