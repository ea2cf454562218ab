"""The overlap rule against sets written from the definition; leaving and judging by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from identities import make_identity
from traces import make_clusters, make_trace_of_dominant

from matlens import InputError
from matlens.ffn.early_exit import (
    JudgedExits,
    OverlapRule,
    active_clusters,
    first_exit,
    judge_exits,
    split_examples,
    summarize_exits,
)

MODEL = make_identity("none", "one")


def layer_left(example: list[set[int]], sets: list[list[set[int]]], made_at: list[int], others: str) -> int:
    """Where one example leaves, given its sets by layer, and those of the training examples."""
    for layer, (mine, known) in enumerate(zip(example, sets, strict=True)):
        inside = [len(mine & each) for each, made in zip(known, made_at, strict=True) if made == layer]
        groups = [[made for made in set(made_at) if made != layer]]
        if others == "by-layer":
            groups = [[made] for made in groups[0]]
        outside = [
            [len(mine & each) for each, made in zip(known, made_at, strict=True) if made in group]
            for group in groups
            if group
        ]
        if inside and all(
            Fraction(sum(inside), len(inside)) > Fraction(sum(each), len(each)) and max(inside) > max(each)
            for each in outside
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


@pytest.mark.parametrize("others", ["together", "by-layer"])
@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_the_rule_is_a_loop_over_sets(
    others: Any, case: tuple[np.ndarray, np.ndarray, np.ndarray, int]
) -> None:
    dominant, labels, made, n_train = case
    n, n_layers, _ = dominant.shape
    d_mlp = len(labels) // n_layers
    sets = [
        [{int(labels[layer * d_mlp + i]) for i in dominant[row, layer]} for layer in range(n_layers)]
        for row in range(n)
    ]
    order = np.random.default_rng(0).permutation(n)
    train, test = order[:n_train], order[n_train:]
    active = active_clusters(make_trace_of_dominant(dominant, "one"), make_clusters(labels, MODEL))
    for row, layer in itertools.product(range(n), range(n_layers)):
        dense = active[layer].toarray()[row]
        assert set(np.flatnonzero(dense)) == sets[row][layer]
        assert set(dense) <= {0, 1}
    known = [[sets[row][layer] for row in train] for layer in range(n_layers)]
    expected = [layer_left(sets[row], known, made[train].tolist(), others) for row in test]
    rule = OverlapRule(others=others).fit(active, made, train)
    assert first_exit(rule.signals(active, test)).tolist() == expected


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
    rule = OverlapRule(**options).fit(active, np.array([*made_at, -1]), np.arange(len(sets)))
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


def test_clusters_of_another_model_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"The clusters and the trace .* fingerprint one, .* fingerprint two"
    ):
        active_clusters(make_trace_of_dominant(np.zeros((2, 1, 1)), "two"), make_clusters([0, 0, 0], MODEL))


# Parts


@pytest.mark.parametrize("n", [10, 11, 19, 20, 57, 2000])
def test_parts_are_disjoint_and_complete(n: int) -> None:
    split = split_examples(n, seed=3)
    assert sorted(np.concatenate(split)) == list(range(n))
    assert (len(split.test), len(split.calibration)) == (n // 10, n // 10)
    assert all((one == two).all() for one, two in zip(split, split_examples(n, seed=3), strict=True))
    assert any((one != two).any() for one, two in zip(split, split_examples(n, seed=4), strict=True))


@pytest.mark.parametrize("n", [0, 9])
def test_too_few_examples_are_refused(n: int) -> None:
    with pytest.raises(InputError, match=rf"{n} examples cannot be split .* Expected 10 or more"):
        split_examples(n)


# Judging


def test_an_example_leaves_at_its_first_signal_and_at_the_last_layer_without_one() -> None:
    said = np.array([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=bool)
    assert first_exit(said).tolist() == [1, 0, 3, 3]


def test_layers_saved_are_those_of_right_examples() -> None:
    right = np.array([[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1], [0, 0, 0, 1]], dtype=bool)
    exits = judge_exits(np.array([1, 1, 0, 3]), right)  # right, wrong, right (by luck), at the end
    assert (exits.accuracy, exits.left) == (0.75, 0.75)
    assert exits.saved == pytest.approx((2 + 3 + 0) / 3)
    nobody = judge_exits(np.array([0, 1]), right[:2])
    assert nobody.accuracy == 0
    assert np.isnan(nobody.saved)


def test_chance_is_the_mean_over_all_ways_to_deal_out_the_layers() -> None:
    generator = np.random.default_rng(0)
    right = generator.random((5, 4)) < 0.5
    right[:, -1] = True
    leaves = np.array([0, 3, 1, 1, 2])
    dealt = [judge_exits(np.array(order), right) for order in itertools.permutations(leaves)]
    assert len({one.accuracy for one in dealt}) > 2
    for one in dealt:
        assert one.chance == pytest.approx(np.mean([one.accuracy for one in dealt]))


def test_the_summary_is_mean_and_deviation_over_seeds() -> None:
    judged = {
        "a": [JudgedExits(0.8, 3, 0.5, 0.2), JudgedExits(0.9, 5, 0.7, 0.3)],
        "b": [JudgedExits(1, 0, 0, 1)],
    }
    a, b = summarize_exits(judged, 16).to_dict("records")
    assert a == {
        "method": "a", "accuracy": pytest.approx(0.85), "accuracy_sd": pytest.approx(0.1 / 2**0.5),
        "saved": 4, "saved_sd": pytest.approx(2**0.5), "saved_share": 0.25, "left": pytest.approx(0.6),
        "chance": pytest.approx(0.25), "seeds": 2,
    }  # fmt: skip
    assert (b["accuracy"], b["saved"], b["saved_share"], b["seeds"]) == (1, 0, 0, 1)
    assert np.isnan(b["accuracy_sd"])
    assert np.isnan(b["saved_sd"])


def test_a_seed_without_a_right_example_has_no_layers_saved() -> None:
    nothing = judge_exits(np.array([0]), np.array([[False, True]]))
    (row,) = summarize_exits({"a": [nothing, JudgedExits(1, 1, 1, 1)]}, 2).to_dict("records")
    assert (row["accuracy"], row["saved"]) == (0.5, 1)


def test_nothing_to_learn_from_or_to_sum_up_is_refused() -> None:
    with pytest.raises(InputError, match="no layers to learn from"):
        OverlapRule().fit([], np.zeros(3, int), np.arange(3))
    judged = {"a": [JudgedExits(1, 1, 1, 1)]}
    for n_layers in (0, -1, 2.0):
        with pytest.raises(InputError, match=r"n_layers .*is"):
            summarize_exits(judged, n_layers)  # type: ignore[arg-type]
    for nothing, message in (({}, "Nothing was judged"), (judged | {"b": []}, "b was judged on no seed")):
        with pytest.raises(InputError, match=message):
            summarize_exits(nothing, 2)
