"""Patterns, shares and the search are those counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from annotation.patterns import (
    PATTERN_COLUMNS,
    PATTERN_SIZES,
    distinct_concepts,
    find_patterns,
    pattern_shares,
    search_concepts,
)
from annotation.word_similarity import WordSimilarity
from conftest import D_MODEL, N_LAYERS
from scipy import stats

from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors
from matlens.io.tables import COLUMNS

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


TOKENIZER = SimpleNamespace(
    encode=None,
    convert_ids_to_tokens=lambda token: TEXTS[token],
    decode=lambda tokens: "".join(TEXTS[t] for t in tokens),
)


@pytest.mark.parametrize(
    ("tokens", "known", "words", "n_tokens", "pattern"),
    [
        ([0, 1, 4, 9, 7], 3, 2, 3, {"wine", "tea"}),  # forms of one word are one
        ([0, 1, 2, 9, 10], 1, 1, 3, {"wine"}),
        ([0, 2, 3, 9, 7], 2, 1, 3, {"wine"}),
        ([12, 13, 15, 16, 9], 4, 4, 4, {"internet", "interest", "international", "interview"}),
        ([12, 13, 14, 15, 9], 3, 3, 4, {"internet", "interest", "international"}),
        ([4, 5, 6, 0, 7], 5, 4, 4, {"tea", "coffee", "beer", "wine"}),
        ([7, 8, 11, 9, 4], 4, 2, 2, {"spade", "moon"}),
        ([9, 10, 9, 10, 9], 0, 0, 0, set()),
    ],
)
def test_the_largest_pattern_is_that_seen_by_hand(tokens, known, words, n_tokens, pattern):
    ids = torch.tensor([tokens, [4, 5, 6, 0, 7]])
    patterns = find_patterns(ids, by_hand(), TOKENIZER)
    assert list(patterns.columns) == list(PATTERN_COLUMNS)
    row = patterns.iloc[0]
    assert (row["known"], row["words"], row["tokens"]) == (known, words, n_tokens)
    assert set(filter(None, row["pattern"].split(", "))) == pattern
    assert row["similarity"] == pytest.approx(1) if words > 1 else np.isnan(row["similarity"])


# All vectors of a model


@pytest.fixture(scope="module")
def spoken():
    generator = np.random.default_rng(0)
    return WordSimilarity.fit([" ".join(f"w{i}" for i in generator.integers(10, 50, 8)) for _ in range(300)])


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2"])
def test_all_vectors_are_searched_with_their_controls(name, spoken, small_model):
    model = small_model(name)
    values, projection = ValueVectors(model), Projection.from_model(model)
    tables = search_concepts(model, spoken, k=6, seed=2)
    assert list(tables) == ["values", "random", "shuffled"]
    for method, table in tables.items():
        assert len(table) == len(values)
        assert table["layer"].tolist() == np.repeat(range(N_LAYERS), values.d_mlp).tolist()
        rows = table.itertuples()
        vectors = {
            "values": torch.cat([values.layer(i) for i in range(N_LAYERS)]),
            "random": torch.cat([values.random(i, values.d_mlp, seed=2) for i in range(N_LAYERS)]),
        }.get(method)
        if vectors is None:
            continue
        assert vectors.shape == (len(values), D_MODEL)
        tops = projection.top(vectors, 6).ids
        assert [len(row.top.split(", ")) for row in rows] == [6] * len(values)
        expected = find_patterns(tops, spoken, model.tokenizer)
        pd.testing.assert_frame_equal(table[list(PATTERN_COLUMNS)], expected)
    assert tables["values"]["value"].tolist() == [str(values.at(row)) for row in range(len(values))]
    # Dealt anew, each rank has the same tokens, and lists are others.
    real, shuffled = (tables[method]["top"].str.split(", ", expand=True) for method in ("values", "shuffled"))
    for rank in range(6):
        assert sorted(real[rank]) == sorted(shuffled[rank])
    assert not (real == shuffled).all(axis=None)


def made(words: list[int], tokens: list[int], known: list[int], layers: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"words": words, "tokens": tokens, "known": known, "layer": layers})


def test_shares_are_counted_over_layers_and_all():
    tables = {
        "values": made([0, 4, 5, 12], [0, 6, 9, 30], [3, 6, 9, 12], [0, 0, 1, 1]),
        "random": made([3, 1, 2, 4], [9, 1, 2, 4], [3, 3, 3, 6], [0, 0, 1, 1]),
    }
    table = pattern_shares(tables, "m", "c", k=30)
    assert list(table.columns) == list(COLUMNS)
    for method, layer, size in (
        ("values", None, 5),
        ("values", 1, 12),
        ("random", 0, 4),
        ("random", None, 4),
    ):
        part = tables[method] if layer is None else tables[method].query("layer == @layer")
        same = table["layer"].isna() if layer is None else table["layer"] == layer
        shares = table[same & (table["method"] == method)]
        (row,) = shares[(shares["metric"] == "pattern") & (shares["k"] == size)].itertuples()
        count = int((part["words"] >= size).sum())
        interval = stats.binomtest(count, len(part)).proportion_ci(0.95, method="wilson")
        assert (row.value, row.low, row.high) == pytest.approx(
            (count / len(part), interval.low, interval.high)
        )
        covered = shares[shares["metric"] == "covered"]["value"].item()
        assert covered == pytest.approx(
            np.mean([t / 30 if w >= 4 else 0 for w, t in part[["words", "tokens"]].values])
        )
        assert shares[shares["metric"] == "known"]["value"].item() == pytest.approx(part["known"].mean() / 30)
    assert set(table[table["metric"] == "pattern"]["k"]) == set(PATTERN_SIZES)


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
    assert distinct_concepts(mixed)["value"].tolist() == ["A", "C", "D", "F", "H"]
    assert distinct_concepts(mixed, per_layer=9)["value"].tolist() == ["A", "C", "D", "E", "F", "H"]
    assert distinct_concepts(mixed, n=2)["value"].tolist() == ["A", "C"]
    assert distinct_concepts(mixed, words=4)["value"].tolist() == ["G", "A", "C", "D", "F", "H"]
    assert distinct_concepts(mixed, shared=0.5, n=2)["value"].tolist() == ["A", "B"]
