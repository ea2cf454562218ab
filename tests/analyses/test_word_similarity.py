"""Words are alike as the corpus uses them, and forms of a word are one family."""

from __future__ import annotations

import numpy as np
import pytest
from annotation import word_similarity
from annotation.word_similarity import WordSimilarity
from hypothesis import given, settings
from hypothesis import strategies as st

DRINKS, TOOLS = ["coffee", "wine", "beer", "juice"], ["hammer", "spade", "drill", "wrench"]


def speech() -> list[str]:
    """Sentences in which drinks are drunk and tools are lifted, and others of any words."""
    generator = np.random.default_rng(0)
    others = [f"filler{i}" for i in range(200)]
    texts = []
    for _ in range(100):
        drink, tool = generator.choice(DRINKS), generator.choice(TOOLS)
        texts += [f"They drank cold {drink}, slowly.", f"They lifted heavy {tool} upward."]
    return texts + [" ".join(generator.choice(others, 6)) for _ in range(800)]


def test_words_used_alike_are_told_from_others():
    similarity = WordSimilarity.fit(speech(), dimensions=20)
    rows = [similarity.row(word) for word in (*DRINKS, *TOOLS)]
    similarities, alike = similarity.compare(np.array(rows))
    same = np.kron(np.eye(2), np.ones((4, 4))).astype(bool)
    off = ~np.eye(8, dtype=bool)
    assert similarities[same & off].min() > similarities[~same].max() + 0.3
    assert alike[same & off].all()
    assert not alike[~same].any()
    np.testing.assert_allclose(similarities, similarity.vectors[rows] @ similarity.vectors[rows].T)
    np.testing.assert_allclose(np.linalg.norm(similarity.vectors, axis=1), 1)
    assert "they" not in similarity.words, "a stop word"
    assert similarity.row("␣wine") == similarity.row("absent") == -1
    assert similarity.row(" Wine") == similarity.row("wine") == similarity.words.index("wine")


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=7), min_size=1, max_size=5), st.integers(1, 4))
def test_cooccurrences_and_information_are_those_of_the_definition(texts, window):
    known = ["a", "b", "c", "d"]  # "e" keeps its place but is not counted
    expected = np.zeros((4, 4))
    for text in texts:
        for i, word in enumerate(text):
            for j, other in enumerate(text):
                if i != j and abs(i - j) <= window and "e" not in (word, other):
                    expected[known.index(word), known.index(other)] += 1
    counts = word_similarity._cooccurrences(texts, known, window)
    np.testing.assert_array_equal(counts.toarray(), expected)
    if not expected.any():
        return
    context = expected.sum(0) ** 0.75 / (expected.sum(0) ** 0.75).sum()
    information = np.zeros((4, 4))
    for i, j in zip(*expected.nonzero(), strict=True):
        information[i, j] = max(0, np.log(expected[i, j] / expected[i].sum() / context[j]))
    np.testing.assert_allclose(
        word_similarity._pointwise_information(counts).toarray(), information, atol=1e-12
    )


def test_one_pair_in_a_hundred_of_each_two_bands_passes_the_threshold():
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((600, 10))
    vectors[300:, 0] += 3  # frequent words are all more alike
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    bands = np.repeat([0, 1], 300)
    thresholds = word_similarity._thresholds(vectors, bands, np.arange(600), 0)
    similarities = vectors @ vectors.T
    for band, other in ((0, 0), (0, 1), (1, 1)):
        block = similarities[bands == band][:, bands == other]
        pairs = block[np.triu_indices(300, 1)] if band == other else block.ravel()
        assert (pairs >= thresholds[band, other]).mean() == pytest.approx(0.01, abs=0.003)
    assert thresholds[1, 1] > thresholds[0, 0] + 0.1
    np.testing.assert_array_equal(thresholds, thresholds.T)


# Families


def of_words(*words: str) -> WordSimilarity:
    n = len(words)
    return WordSimilarity(words, np.eye(n), np.zeros(n, dtype=int), np.array([[0.5]]))


@pytest.mark.parametrize(
    "families",
    [
        ["interest interests interested interesting", "internet", "international internationally"],
        ["season seasons seasonal", "seaside", "search searches searching"],
        ["statue statues", "statistics statistical", "station stations"],
        ["car cars", "care cares caring", "card cards"],  # shorter than five letters
        ["history", "historian historians"],  # a stem is not a meaning
        ["1990s", "1990", "bus", "gas", "this"],
    ],
)
def test_words_with_the_same_stem_are_a_family_and_others_are_not(families):
    words = [word for family in families for word in family.split()]
    expected = [number for number, family in enumerate(families) for _ in family.split()]
    assert of_words(*words).families.tolist() == expected
