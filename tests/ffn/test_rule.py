"""The overlap rule against loops written from the definition, under every reading."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from identities import make_identity
from traces import make_clusters, make_trace, make_trace_of_dominant

from matlens import InputError
from matlens.ffn.outcomes import first_exit, judge_exits
from matlens.ffn.rule import OverlapRule, active_clusters, compare_readings

MODEL = make_identity("none", "one")


def common(mine: list[int], known: list[int], overlap: str) -> int:
    if overlap == "sets":
        return len(set(mine) & set(known))
    return sum(one == other for one, other in zip(mine, known, strict=True))


def layer_left(
    example: list[list[int]], known: list[list[list[int]]], made_at: list[int], others: str, overlap: str
) -> int:
    """Where one example leaves, given its clusters by layer, and those of the training examples."""
    for layer in range(len(example)):
        sizes: dict[int, list[int]] = {}
        for clusters, made in zip(known, made_at, strict=True):
            made = 99 if others == "together" and made != layer else made
            sizes.setdefault(made, []).append(common(example[layer], clusters[layer], overlap))
        inside = sizes.pop(layer, None)
        if others == "later":
            sizes = {made: each for made, each in sizes.items() if made > layer}
        if inside and all(
            Fraction(sum(inside), len(inside)) > Fraction(sum(each), len(each)) and max(inside) > max(each)
            for each in sizes.values()
        ):
            return layer
    return len(example) - 1


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Sub-updates, labels of the value vectors, where predictions were made, how many train."""
    n_layers, d_mlp, n = draw(st.integers(1, 4)), draw(st.integers(3, 7)), draw(st.integers(2, 12))
    k = draw(st.integers(1, 3))
    chosen = st.lists(st.integers(0, d_mlp - 1), min_size=k, max_size=k, unique=True)
    dominant = draw(st.lists(st.lists(chosen, min_size=n_layers, max_size=n_layers), min_size=n, max_size=n))
    n_clusters = draw(st.integers(1, n_layers * d_mlp))
    some = st.integers(0, n_clusters - 1)
    labels = draw(st.lists(some, min_size=n_layers * d_mlp, max_size=n_layers * d_mlp))
    made = draw(st.lists(st.integers(-1, n_layers - 1), min_size=n, max_size=n))
    _, dense = np.unique(labels, return_inverse=True)
    return np.array(dominant), dense, np.array(made), draw(st.integers(1, n - 1))


@pytest.mark.parametrize("overlap", ["sets", "places"])
@pytest.mark.parametrize("others", ["later", "by-layer", "together"])
@settings(max_examples=60)
@given(case=cases())
def test_the_rule_is_a_loop_over_examples(
    others: Any, overlap: Any, case: tuple[np.ndarray, np.ndarray, np.ndarray, int]
) -> None:
    dominant, labels, made, n_train = case
    n, n_layers, _ = dominant.shape
    d_mlp = len(labels) // n_layers
    clusters = [
        [[int(labels[layer * d_mlp + i]) for i in dominant[row, layer]] for layer in range(n_layers)]
        for row in range(n)
    ]
    order = np.random.default_rng(0).permutation(n)
    train, test = order[:n_train], order[n_train:]
    active = active_clusters(make_trace_of_dominant(dominant, "one"), make_clusters(labels, MODEL))
    assert active.tolist() == clusters
    known = [clusters[row] for row in train]
    expected = [layer_left(clusters[row], known, made[train].tolist(), others, overlap) for row in test]
    rule = OverlapRule(others=others, overlap=overlap).fit(active, made, train)
    assert first_exit(rule.signals(active, test)).tolist() == expected


def test_clusters_are_ordered_by_the_sizes_of_coefficients() -> None:
    trace = make_trace_of_dominant(np.array([[[0, 1, 2, 3]], [[3, 2, 1, 0]]]), "one")
    trace.coefficient["dominant"] = torch.tensor([[[1.0, -4.0, 3.0, -2.0]], [[1.0, 1.0, 0.0, -1.0]]])
    clusters = make_clusters([5, 4, 3, 2, 0, 1], make_identity("none", "one", n_layers=1))
    assert active_clusters(trace, clusters).tolist() == [[[4, 3, 2, 5]], [[2, 3, 5, 4]]]


def signals(
    sets: list[list[set[int]]], made_at: list[int], new: list[set[int]], **options: Any
) -> list[bool]:
    """The rule's signals for one example after training ones, given as sets by layer of at most 3 clusters.

    Clusters are single value vectors, and the vectors from 50 on are all different fillers.
    """
    filler = itertools.count(50)
    every = [*sets, new]
    dominant = [
        [[*clusters, *(next(filler) for _ in range(3 - len(clusters)))] for clusters in one] for one in every
    ]
    array = np.array(dominant)
    clusters = make_clusters(np.arange(len(new) * 400), MODEL)
    active = active_clusters(make_trace_of_dominant(array, "one"), clusters)
    rule = OverlapRule(**{"others": "together"} | options).fit(
        active, np.array([*made_at, -1]), np.arange(len(sets))
    )
    return rule.signals(active, np.array([len(sets)]))[0].tolist()


def test_both_the_mean_and_the_maximum_have_to_exceed() -> None:
    one = [{1, 2}]
    assert signals([[{1, 2}], [{1}]], [0, -1], one) == [True]
    # The same maximum, a larger mean: 2 against 1.5.
    assert signals([[{1, 2}], [{1, 2}], [{1}]], [0, -1, -1], one) == [False]
    # A larger maximum, the same mean: (2 + 0) / 2 against 1.
    assert signals([[{1, 2}], [{3}], [{1}]], [0, 0, -1], one) == [False]
    # A larger maximum and a smaller mean.
    assert signals([[{1, 2}], [{3}], [{4}], [{1}]], [0, 0, 0, -1], one) == [False]
    # Means of 2/3 and of 4/6 are equal.
    sets = [[{1, 2}], [{3}], [{4}], *[[{1}]] * 4, [{3}], [{4}]]
    assert signals(sets, [0] * 3 + [-1] * 6, one) == [False]


def test_layers_without_events_say_nothing_and_layers_of_events_alone_always_do() -> None:
    sets = [[{1}, {1}], [{2}, {2}]]
    assert signals(sets, [-1, -1], [{1}, {1}]) == [False, False]
    assert signals(sets, [1, 1], [{9}, {9}]) == [False, True]


def test_groups_that_are_exceeded_together_need_not_be_one_by_one() -> None:
    """The mean over all others is 1/2, that over those of layer 1 is 1: as large as the mean inside."""
    sets = [[{1, 2}, {9}], [set(), {9}], [{1}, {9}], [set(), {9}]]
    made, new = [0, 0, 1, -1], [{1, 2}, {5}]
    assert signals(sets, made, new)[0]
    assert not signals(sets, made, new, others="by-layer")[0]


def test_examples_made_earlier_or_nowhere_are_no_others_of_the_published_rule() -> None:
    sets = [[{9}, {1}], [{9}, {1, 2}], [{9}, {1, 2, 3}]]
    new = [{5}, {1, 2}]
    assert signals(sets, [1, 1, 0], new)[1] is False
    assert signals(sets, [1, 1, 0], new, others="later")[1] is True
    assert signals(sets, [1, 1, -1], new, others="by-layer")[1] is False
    assert signals(sets, [1, 1, -1], new, others="later")[1] is True


def test_clusters_of_another_model_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"The clusters and the trace .* fingerprint one, .* fingerprint two"
    ):
        active_clusters(make_trace_of_dominant(np.zeros((2, 1, 1)), "two"), make_clusters([0, 0, 0], MODEL))


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(InputError, match="no layers to learn from"):
        OverlapRule().fit(np.zeros((3, 0, 2), int), np.zeros(3, int), np.arange(3))
    with pytest.raises(InputError, match="OverlapRule is not fitted yet"):
        OverlapRule().signals(np.zeros((3, 2, 2), int), np.arange(3))
    rule = OverlapRule().fit(np.zeros((3, 2, 2), int), np.zeros(3, int), np.arange(3))
    with pytest.raises(InputError, match="as many layers and clusters"):
        rule.signals(np.zeros((3, 1, 2), int), np.arange(3))


def test_every_reading_tests_every_example_once() -> None:
    """Candidates that agree with the final token from a layer on that the clusters tell, at 1 of 3 layers."""
    generator, n, n_layers = np.random.default_rng(0), 60, 3
    made = generator.integers(0, n_layers, n)
    after = torch.from_numpy(
        np.where(np.arange(n_layers) >= made[:, None], 7, generator.integers(0, 7, (n, 3)))
    )
    by_ffn = np.arange(n) % 3 > 0  # of the others attention has brought the token up
    before = torch.from_numpy(np.where(np.arange(n_layers) >= made[:, None] + by_ffn[:, None], 7, 8))
    trace = make_trace(before, after, torch.zeros(n, n_layers), k=2)
    index = generator.integers(0, 4, (n, n_layers, 2))
    index[np.arange(n), made, 0] = 5
    trace.index["dominant"] = torch.from_numpy(index)
    identity = trace.provenance.identity
    vectors, pairs = (make_clusters(np.arange(18) // size, identity) for size in (1, 2))
    table = compare_readings(trace, [vectors, pairs], seed=3)
    reading = ["clusters", "overlap", "others", "events"]
    assert len(table.drop_duplicates(reading)) == len(table) == 2 * 2 * 3 * 2
    assert set(table["n"]) == {n}
    parts = np.array_split(np.random.default_rng(3).permutation(n), 10)
    right = (after == 7).numpy()
    for row in table.to_dict("records"):
        active = active_clusters(trace, vectors if row["clusters"] == 18 else pairs)
        made_at = made if row["events"] == "FFN and attention" else np.where(by_ffn, made, -1)
        hits, chances, variances, saved, left = 0, 0.0, 0.0, 0, 0
        for part in parts:
            rest = [i for i in range(n) if i not in part]
            known = [active[i].tolist() for i in rest]
            leaves = [
                layer_left(active[i].tolist(), known, made_at[rest].tolist(), row["others"], row["overlap"])
                for i in part
            ]
            judged = judge_exits(np.array(leaves), right[part])
            hits += sum(right[i, layer] for i, layer in zip(part, leaves, strict=True))
            saved += sum((2 - layer) * right[i, layer] for i, layer in zip(part, leaves, strict=True))
            left += sum(layer < 2 for layer in leaves)
            chances += len(part) * judged.chance
            variances += (len(part) * judged.chance_sd) ** 2
        assert row["accuracy"] == pytest.approx(hits / n)
        assert (row["left"], row["saved"]) == pytest.approx((left / n, saved / hits))
        assert (row["chance"], row["dealt_sd"]) == pytest.approx((chances / n, variances**0.5 / n))
        assert row["above"] == pytest.approx((hits - chances) / n)
        z = abs(row["above"]) / row["dealt_sd"] if row["dealt_sd"] else 0
        assert row["p"] == pytest.approx(math.erfc(z / 2**0.5))
    published = table[(table["others"] == "later") & (table["overlap"] == "sets")].iloc[0]
    assert published["left"] > 0.3
    assert published["p"] < 1e-3


def test_readings_of_nothing_are_refused() -> None:
    trace = make_trace_of_dominant(np.zeros((9, 1, 1)), "two")
    with pytest.raises(InputError, match="no clusters to read the rule by"):
        compare_readings(trace, [])
    with pytest.raises(InputError, match="9 examples cannot be split"):
        compare_readings(trace, [make_clusters([0], make_identity("none", "two", n_layers=1))])
