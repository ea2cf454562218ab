"""Similar words, patterns, their shares and the search are those counted by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from annotation import patterns, word_similarity
from annotation.patterns import PATTERN_COLUMNS, find_patterns
from annotation.word_similarity import WordSimilarity
from conftest import N_LAYERS
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from matlens import ffn

# Patterns of lists, with similarities given by hand

GROUPS = {
    "coffee": 0, "tea": 0, "wine": 0, "wines": 0, "wined": 0, "beer": 0, "spade": 1, "moon": 1, "alone": 2,
    "internet": 3, "interest": 3, "interests": 3, "international": 3, "interview": 3,
}  # fmt: skip
WORDS = tuple(GROUPS)
TEXTS = [
    " Wine", "wine", " wines", "Wined", " tea", " COFFEE", " beer", " spade", " moon", " zzz", "wi", "alone",
    " internet", " Interest", " interests", "International", " interview",
]  # fmt: skip


def by_hand() -> WordSimilarity:
    vectors = np.array([np.eye(4)[GROUPS[word]] for word in WORDS])
    return WordSimilarity(WORDS, vectors, np.zeros(len(WORDS), dtype=int), np.array([[0.5]]))


TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({text: i for i, text in enumerate(TEXTS)}, unk_token="zzz"))
)


@pytest.mark.parametrize(
    ("tokens", "known", "words", "n_tokens", "pattern"),
    [
        ([0, 1, 4, 9, 7], 3, 2, 3, {"wine", "tea"}),  # forms of one word are one
        ([0, 2, 3, 9, 7], 2, 1, 3, {"wine"}),
        ([12, 13, 15, 16, 9], 4, 4, 4, {"internet", "interest", "international", "interview"}),
        ([4, 5, 6, 0, 7], 5, 4, 4, {"tea", "coffee", "beer", "wine"}),
        ([7, 8, 11, 9, 4], 4, 2, 2, {"spade", "moon"}),
        ([9, 10, 9, 10, 9], 0, 0, 0, set()),
    ],
)
def test_the_largest_pattern_is_that_seen_by_hand(tokens, known, words, n_tokens, pattern):
    ids = torch.tensor([tokens, [4, 5, 6, 0, 7]])
    row = find_patterns(ids, by_hand(), TOKENIZER).iloc[0]
    assert (row["known"], row["words"], row["tokens"]) == (known, words, n_tokens)
    assert set(filter(None, row["pattern"].split(", "))) == pattern
    assert row["similarity"] == pytest.approx(1) if words > 1 else np.isnan(row["similarity"])


# All vectors of a model


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2"])
def test_all_vectors_are_searched_with_their_controls(name, small_model):
    model, generator = small_model(name), np.random.default_rng(0)
    spoken = WordSimilarity.fit(
        [" ".join(f"w{i}" for i in generator.integers(10, 50, 8)) for _ in range(300)]
    )
    values, projection = ffn.ValueVectors(model), ffn.Projection.from_model(model)
    tables = patterns.search_concepts(model, spoken, k=6, seed=2)
    assert list(tables) == ["values", "random", "shuffled"]
    for method, vectors in {
        "values": torch.cat([values.layer(i) for i in range(N_LAYERS)]),
        "random": torch.cat([values.random(i, values.d_mlp, seed=2) for i in range(N_LAYERS)]),
    }.items():
        expected = find_patterns(projection.top(vectors, 6).ids, spoken, model.tokenizer)
        pd.testing.assert_frame_equal(tables[method][list(PATTERN_COLUMNS)], expected)
        assert tables[method]["layer"].tolist() == np.repeat(range(N_LAYERS), values.d_mlp).tolist()
    assert tables["values"]["value"].tolist() == [str(values.at(row)) for row in range(len(values))]
    # Dealt anew, each rank has the same tokens, and lists are others.
    real, shuffled = (tables[method]["top"].str.split(", ", expand=True) for method in ("values", "shuffled"))
    for rank in range(6):
        assert sorted(real[rank]) == sorted(shuffled[rank])
    assert not (real == shuffled).all(axis=None)


def test_shares_are_counted_over_layers_and_all():
    rows = [
        ("values", 0, 0, 3, 0), ("values", 4, 6, 6, 0), ("values", 5, 9, 9, 1), ("values", 12, 30, 12, 1),
        ("random", 3, 9, 3, 0), ("random", 1, 1, 3, 0), ("random", 2, 2, 3, 1), ("random", 4, 4, 6, 1),
    ]  # fmt: skip
    found = pd.DataFrame(rows, columns=["method", "words", "tokens", "known", "layer"])
    table = patterns.pattern_shares(dict(list(found.groupby("method"))), "m", "c", k=30)
    shares = table.fillna({"layer": -1}).set_index(["method", "layer", "metric", "k"]).sort_index()
    for method, layer in itertools.product(("values", "random"), (-1, 0, 1)):
        part = found[(found["method"] == method) & ((found["layer"] == layer) | (layer < 0))]
        for size in range(4, 13):
            row = shares.loc[(method, layer, "pattern", size)]
            count = int((part["words"] >= size).sum())
            interval = stats.binomtest(count, len(part)).proportion_ci(0.95, method="wilson")
            expected = (count / len(part), interval.low, interval.high)
            assert tuple(row[["value", "low", "high"]]) == pytest.approx(expected)
        covered = [tokens / 30 if words >= 4 else 0 for words, tokens in part[["words", "tokens"]].values]
        assert shares.loc[(method, layer, "covered", 30), "value"] == pytest.approx(np.mean(covered))
        known = part["known"].mean() / 30
        assert shares.loc[(method, layer, "known", 30), "value"] == pytest.approx(known)


def test_the_search_takes_the_fullest_patterns_of_different_concepts():
    rows = [
        ("A", 0, 5, 20, "a, b, c, d, e"), ("B", 0, 5, 19, "a, b, x, y, z"),  # shares two of five
        ("C", 0, 6, 18, "a, g, h, i, j, k"), ("D", 0, 5, 17, "l, m, n, o, p"),
        ("E", 0, 5, 16, "q, r, s, t, u"),
        ("F", 1, 5, 15, "q1, r1, s1, t1, u1"), ("G", 1, 4, 30, "v, w, x1, y1"),
        ("H", 2, 5, 3, "z1, z2, z3, z4, z5"),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["value", "layer", "words", "tokens", "pattern"]).assign(
        similarity=0.5
    )
    mixed = table.sample(frac=1, random_state=1)
    assert patterns.distinct_concepts(mixed)["value"].tolist() == ["A", "C", "D", "F", "H"]
    assert patterns.distinct_concepts(mixed, per_layer=9)["value"].tolist() == ["A", "C", "D", "E", "F", "H"]
    assert patterns.distinct_concepts(mixed, n=2)["value"].tolist() == ["A", "C"]
    assert patterns.distinct_concepts(mixed, words=4)["value"].tolist() == ["G", "A", "C", "D", "F", "H"]
    assert patterns.distinct_concepts(mixed, shared=0.5, n=2)["value"].tolist() == ["A", "B"]


# Words

DRINKS, TOOLS = ["coffee", "wine", "beer", "juice"], ["hammer", "spade", "drill", "wrench"]


def test_words_used_alike_are_told_from_others():
    """In sentences in which drinks are drunk and tools are lifted, and others of any words."""
    generator = np.random.default_rng(0)
    others = [f"filler{i}" for i in range(200)]
    texts = [" ".join(generator.choice(others, 6)) for _ in range(800)]
    for _ in range(100):
        texts.append(f"They drank cold {generator.choice(DRINKS)}, slowly.")
        texts.append(f"They lifted heavy {generator.choice(TOOLS)} upward.")
    similarity = WordSimilarity.fit(texts, dimensions=20)
    rows = [similarity.row(word) for word in (*DRINKS, *TOOLS)]
    similarities, alike = similarity.compare(np.array(rows))
    same = np.kron(np.eye(2), np.ones((4, 4))).astype(bool)
    off = ~np.eye(8, dtype=bool)
    assert similarities[same & off].min() > similarities[~same].max() + 0.3
    assert alike[same & off].all()
    assert not alike[~same].any()
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


def test_words_with_the_same_stem_are_a_family_and_others_are_not():
    families = [
        "interest interests interested interesting", "internet", "international internationally",
        "season seasons seasonal", "statue statues", "statistics statistical", "station stations",
        "car cars", "care cares caring", "card cards", "history", "historian historians", "1990s", "1990",
    ]  # fmt: skip
    words = tuple(" ".join(families).split())
    found = WordSimilarity(words, np.eye(len(words)), np.zeros(len(words), int), np.array([[0.5]])).families
    assert found.tolist() == [number for number, family in enumerate(families) for _ in family.split()]
