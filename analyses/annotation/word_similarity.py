"""Distributional similarity of the words of a corpus.

Words with similar contexts get similar vectors: a word's vector is its positive pointwise mutual
information with the words around it, reduced by a truncated singular value decomposition. It does not
depend on a language model, so it can evaluate the tokens that one promotes.
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
import snowballstemmer
from jaxtyping import Bool, Float, Int
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from sklearn.preprocessing import normalize

from matlens import InputError

WINDOW, DIMENSIONS, MIN_COUNT = 5, 100, 4
SHARE_ALIKE = 0.01  # share of all pairs of words that count as similar
_WORD = re.compile(r"\w+")
_MIN_LETTERS = 3  # shorter tokens are often word pieces
_SMOOTHING = 0.75  # exponent of context frequencies, so that rare contexts do not dominate
_SAMPLED_PAIRS = 20_000  # for each threshold
_MIN_WORDS_OF_BAND = 100


@dataclass(frozen=True, eq=False)
class WordSimilarity:
    """Words of a corpus and their similarities.

    Attributes
    ----------
    words
        Words of three letters and more, in lower case, without English stop words.
    vectors
        A vector of unit length for each word, centered before normalization.
    frequency_bands
        Frequency band of each word, from 0 for the rarest.
    thresholds
        Minimum similarity of words of two bands that count as similar: one pair in a hundred does.
    """

    words: tuple[str, ...]
    vectors: Float[np.ndarray, "n_words d"]
    frequency_bands: Int[np.ndarray, " n_words"]
    thresholds: Float[np.ndarray, "n_bands n_bands"]

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
        """Fit word vectors on sentences."""
        texts = [[word.lower() for word in _WORD.findall(sentence)] for sentence in sentences]
        counts = Counter(word for text in texts for word in text)
        known = sorted(word for word, count in counts.items() if count >= min_count)
        chosen = [
            i for i, word in enumerate(known) if len(word) >= _MIN_LETTERS and word not in ENGLISH_STOP_WORDS
        ]
        if len(chosen) < 3:
            raise InputError(
                f"sentences must have at least 3 words that occur {min_count} times, got {len(chosen)}. "
                "Use a larger corpus."
            )
        information = _pointwise_information(_cooccurrences(texts, known, window))
        reduction = TruncatedSVD(min(dimensions, len(known) - 1), random_state=seed)
        vectors = normalize(reduction.fit_transform(information)[chosen])
        vectors = normalize(vectors - vectors.mean(0))
        words = tuple(known[i] for i in chosen)
        bands = _frequency_bands(np.array([counts[word] for word in words]))
        return cls(words, vectors, bands, _thresholds(vectors, bands, _word_families(words), seed))

    @cached_property
    def families(self) -> Int[np.ndarray, " n_words"]:
        """An index for each word, equal for words with the same stem.

        Stems are those of the English Snowball stemmer, so *season*, *seasons* and *seasonal* are one family,
        and *interest*, *internet* and *international* are three.
        """
        return _word_families(self.words)

    def row(self, text: str) -> int:
        """Row of a word, ignoring case and surrounding spaces; -1 if unknown."""
        return self._rows.get(text.strip().lower(), -1)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {word: row for row, word in enumerate(self.words)}

    def compare(
        self, rows: Int[np.ndarray, " m"]
    ) -> tuple[Float[np.ndarray, "m m"], Bool[np.ndarray, "m m"]]:
        """Similarities of some words, and which pairs count as similar."""
        similarities = self.vectors[rows] @ self.vectors[rows].T
        bands = self.frequency_bands[rows]
        return similarities, similarities >= self.thresholds[bands[:, None], bands]


def _word_families(words: Sequence[str]) -> Int[np.ndarray, " n_words"]:
    stem_ids: dict[str, int] = {}
    stems = snowballstemmer.stemmer("english").stemWords(words)
    return np.array([stem_ids.setdefault(stem, len(stem_ids)) for stem in stems])


def _frequency_bands(counts: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """A band for each doubling of the count; the highest bands, with few words each, are merged."""
    bands = np.log2(counts).astype(int)
    large = [band for band in range(bands.max() + 1) if (bands >= band).sum() >= _MIN_WORDS_OF_BAND]
    bands = np.minimum(bands, max(large, default=0))
    return bands - bands.min()


def _thresholds(vectors: np.ndarray, bands: np.ndarray, families: np.ndarray, seed: int) -> np.ndarray:
    """The similarity that one pair in a hundred of different families exceeds, for each pair of bands.

    Frequent words are more similar to each other than rare ones, regardless of meaning.
    """
    generator = np.random.default_rng(seed)
    members = [np.flatnonzero(bands == band) for band in range(bands.max() + 1)]
    thresholds = np.full((len(members), len(members)), np.inf)
    for first, second in itertools.combinations_with_replacement(range(len(members)), 2):
        if not len(members[first]) or not len(members[second]):
            continue
        pairs = [generator.choice(members[band], _SAMPLED_PAIRS) for band in (first, second)]
        left, right = (rows[families[pairs[0]] != families[pairs[1]]] for rows in pairs)
        if len(left):
            similarities = np.einsum("nd,nd->n", vectors[left], vectors[right])
            thresholds[first, second] = np.quantile(similarities, 1 - SHARE_ALIKE)
            thresholds[second, first] = thresholds[first, second]
    return thresholds


def _cooccurrences(texts: Sequence[Sequence[str]], known: Sequence[str], window: int) -> sparse.csr_array:
    """How often one known word stands within the window of another, ``[n, n]``."""
    number = {word: i for i, word in enumerate(known)}
    ids = np.array([number.get(word, -1) for text in texts for word in text])
    text_numbers = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    total = sparse.csr_array((len(known), len(known)))
    for distance in range(1, window + 1):
        left, right = ids[:-distance], ids[distance:]
        same_text = text_numbers[:-distance] == text_numbers[distance:]
        counted = same_text & (left >= 0) & (right >= 0)
        places = (left[counted], right[counted])
        total = total + sparse.coo_array((np.ones(counted.sum()), places), shape=total.shape).tocsr()
    return (total + total.T).tocsr()


def _pointwise_information(counts: sparse.csr_array) -> sparse.csr_array:
    """Positive pointwise mutual information of words with their contexts, in nats."""
    words = np.asarray(counts.sum(1), dtype=float)
    contexts = np.asarray(counts.sum(0), dtype=float) ** _SMOOTHING
    entries = counts.tocoo()
    information = np.log(entries.data / (words[entries.row] * contexts[entries.col] / contexts.sum()))
    positive = information > 0
    places = (entries.row[positive], entries.col[positive])
    return sparse.coo_array((information[positive], places), shape=counts.shape).tocsr()
