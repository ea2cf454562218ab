"""Which words are used alike: a vector for each word of a corpus, learned from its sentences alone.

Words that stand near the same words get similar vectors: a word's vector is the positive pointwise mutual
information with the words around it, reduced by a truncated singular value decomposition. Nothing of a
language model goes into it, so it can judge what one promotes.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sparse
from jaxtyping import Bool, Float, Int
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from matlens.errors import InputError

WINDOW, DIMENSIONS, MIN_COUNT = 5, 100, 4
LINKED = 0.01  # share of word pairs that count as used alike
_WORD = re.compile(r"\w+")
_LETTERS = 3  # shorter ones are pieces of words as often as words
_SMOOTHING = 0.75  # of how frequent contexts are, so that rare ones do not win
_PAIRS = 20_000  # that each link is taken from
_IN_BAND = 100
_FAMILY = 5


@dataclass(frozen=True, eq=False)
class WordSimilarity:
    """Words of a corpus, and how each is used.

    Attributes
    ----------
    words
        Of three letters and more, in lower case, without English stop words.
    vectors
        Of unit length, a row a word; their mean was taken off before.
    bands
        How frequent each word is, from 0 for the rarest.
    links
        From which similarity on words of two bands are used alike: one pair of them in a hundred is.
    """

    words: tuple[str, ...]
    vectors: Float[np.ndarray, "n_words d"]
    bands: Int[np.ndarray, " n_words"]
    links: Float[np.ndarray, "n_bands n_bands"]

    @classmethod
    def fit(
        cls,
        sentences: Sequence[str],
        *,
        window: int = WINDOW,
        dimensions: int = DIMENSIONS,
        min_count: int = MIN_COUNT,
        seed: int = 0,
    ) -> WordSimilarity:
        """Learn how words are used.

        Parameters
        ----------
        sentences
            Of the corpus.
        window
            How many words to either side are a word's context; words never look into another sentence.
        dimensions
            Of the vectors; fewer where there are not so many words.
        min_count
            Words that are rarer are not known, and no context either.
        seed
            Of the decomposition, and of the pairs that the link is taken from.

        Raises
        ------
        InputError
            The corpus has too few words that come often enough.
        """
        texts = [[word.lower() for word in _WORD.findall(sentence)] for sentence in sentences]
        counts = Counter(word for text in texts for word in text)
        known = sorted(word for word, count in counts.items() if count >= min_count)
        chosen = [
            i for i, word in enumerate(known) if len(word) >= _LETTERS and word not in ENGLISH_STOP_WORDS
        ]
        if len(chosen) < 3:
            raise InputError(
                f"{len(chosen)} words of the corpus are used {min_count} times or more. Expected at least 3: "
                "take a larger corpus."
            )
        information = _information(_cooccurrences(texts, known, window))
        reduction = TruncatedSVD(min(dimensions, len(known) - 1), random_state=seed)
        vectors = _unit(reduction.fit_transform(information)[chosen])
        vectors = _unit(vectors - vectors.mean(0))
        words = tuple(known[i] for i in chosen)
        bands = _bands(np.array([counts[word] for word in words]))
        return cls(words, vectors, bands, _links(vectors, bands, _families(words), seed))

    @cached_property
    def rows(self) -> dict[str, int]:
        """Where each word's vector is."""
        return {word: row for row, word in enumerate(self.words)}

    @cached_property
    def families(self) -> Int[np.ndarray, " n_words"]:
        """Which words are forms of one, more or less: those with the same first five letters.

        A number for each word. An ``s`` at the end is left out first, so that *car* and *cars* are one.
        """
        return _families(self.words)

    def alike(self, rows: Int[np.ndarray, " m"]) -> tuple[Float[np.ndarray, "m m"], Bool[np.ndarray, "m m"]]:
        """Similarity of some words to each other, and which of them are used alike."""
        similar = self.vectors[rows] @ self.vectors[rows].T
        bands = self.bands[rows]
        return similar, similar >= self.links[bands[:, None], bands]

    def row(self, text: str) -> int:
        """Where the vector of a token's text is, whatever its case and leading space; -1 if there is none."""
        return self.rows.get(text.strip().lower(), -1)


def _families(words: Sequence[str]) -> Int[np.ndarray, " n_words"]:
    numbers: dict[str, int] = {}
    stems = ((word.rstrip("s") or word)[:_FAMILY] for word in words)
    return np.array([numbers.setdefault(stem, len(numbers)) for stem in stems])


def _bands(counts: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """A band for each doubling of the count; the highest hold too few words and are one."""
    bands = np.log2(counts).astype(int)
    enough = [band for band in range(bands.max() + 1) if (bands >= band).sum() >= _IN_BAND]
    bands = np.minimum(bands, max(enough, default=0))
    return bands - bands.min()


def _links(vectors: np.ndarray, bands: np.ndarray, families: np.ndarray, seed: int) -> np.ndarray:
    """The similarity that one pair in a hundred of different families passes, for each pair of bands.

    Frequent words are all more alike than rare ones are, whatever they mean.
    """
    generator = np.random.default_rng(seed)
    members = [np.flatnonzero(bands == band) for band in range(bands.max() + 1)]
    links = np.full((len(members), len(members)), np.inf)
    for one, other in itertools.combinations_with_replacement(range(len(members)), 2):
        if not len(members[one]) or not len(members[other]):
            continue
        pairs = generator.choice(members[one], _PAIRS), generator.choice(members[other], _PAIRS)
        left, right = (rows[families[pairs[0]] != families[pairs[1]]] for rows in pairs)
        if len(left):
            similar = np.einsum("nd,nd->n", vectors[left], vectors[right])
            links[one, other] = links[other, one] = np.quantile(similar, 1 - LINKED)
    return links


def _cooccurrences(texts: Sequence[Sequence[str]], known: Sequence[str], window: int) -> sparse.csr_array:
    """How often one known word stands within the window of another, ``[n, n]``."""
    number = {word: i for i, word in enumerate(known)}
    ids = np.array([number.get(word, -1) for text in texts for word in text])
    text_of = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    total = sparse.csr_array((len(known), len(known)))
    for distance in range(1, window + 1):
        left, right = ids[:-distance], ids[distance:]
        near = (text_of[:-distance] == text_of[distance:]) & (left >= 0) & (right >= 0)
        both = (left[near], right[near])
        total = total + sparse.coo_array((np.ones(near.sum()), both), shape=total.shape).tocsr()
    return (total + total.T).tocsr()


def _information(counts: sparse.csr_array) -> sparse.csr_array:
    """Positive pointwise mutual information of words with their contexts, in nats."""
    word = np.asarray(counts.sum(1), dtype=float)
    context = np.asarray(counts.sum(0), dtype=float) ** _SMOOTHING
    entries = counts.tocoo()
    found = np.log(entries.data / (word[entries.row] * context[entries.col] / context.sum()))
    positive = found > 0
    at = (entries.row[positive], entries.col[positive])
    return sparse.coo_array((found[positive], at), shape=counts.shape).tocsr()


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)
