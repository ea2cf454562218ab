"""The exit rule is a loop over examples written from its definition, by every option."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from identities import make_identity
from rule_by_hand import layer_left
from traces import make_clusters, make_trace_of_dominant

from matlens.ffn.rule import ExitRule, active_clusters

MODEL = make_identity("none", "one")


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Sub-updates, labels of the value vectors, where predictions are made, how many examples train."""
    n_layers, d_mlp, n = draw(st.integers(1, 4)), draw(st.integers(3, 7)), draw(st.integers(2, 12))
    k = draw(st.integers(1, 3))
    chosen = st.lists(st.integers(0, d_mlp - 1), min_size=k, max_size=k, unique=True)
    dominant = draw(st.lists(st.lists(chosen, min_size=n_layers, max_size=n_layers), min_size=n, max_size=n))
    some = st.integers(0, draw(st.integers(0, n_layers * d_mlp - 1)))
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
    rule = ExitRule(others=others, overlap=overlap).fit(active, made, train)
    signals = rule.signals(active, test)
    signals[:, -1] = True  # the last layer needs no signal
    assert signals.argmax(1).tolist() == expected


def test_clusters_are_ordered_by_the_sizes_of_coefficients() -> None:
    trace = make_trace_of_dominant(np.array([[[0, 1, 2, 3]], [[3, 2, 1, 0]]]), "one")
    trace.coefficient["dominant"] = torch.tensor([[[1.0, -4.0, 3.0, -2.0]], [[1.0, 1.0, 0.0, -1.0]]])
    clusters = make_clusters([5, 4, 3, 2, 0, 1], make_identity("none", "one", n_layers=1))
    assert active_clusters(trace, clusters).tolist() == [[[4, 3, 2, 5]], [[2, 3, 5, 4]]]


def signals(
    sets: list[list[set[int]]], made_at: list[int], new: list[set[int]], others: Any = "together"
) -> list[bool]:
    """The rule's signals for one example after training ones, given as sets by layer of at most 3 clusters.

    Clusters are single value vectors, and the vectors from 50 on are all different fillers.
    """
    filler = itertools.count(50)
    dominant = [
        [[*clusters, *(next(filler) for _ in range(3 - len(clusters)))] for clusters in one]
        for one in [*sets, new]
    ]
    clusters = make_clusters(np.arange(len(new) * 400), MODEL)
    active = active_clusters(make_trace_of_dominant(np.array(dominant), "one"), clusters)
    rule = ExitRule(others=others).fit(active, np.array([*made_at, -1]), np.arange(len(sets)))
    return rule.signals(active, np.array([len(sets)]))[0].tolist()


def test_both_the_mean_and_the_maximum_have_to_exceed() -> None:
    one = [{1, 2}]
    assert signals([[{1, 2}], [{1}]], [0, -1], one) == [True]
    # The same maximum, a larger mean: 2 against 1.5.
    assert signals([[{1, 2}], [{1, 2}], [{1}]], [0, -1, -1], one) == [False]
    # A larger maximum, the same mean: (2 + 0) / 2 against 1.
    assert signals([[{1, 2}], [{3}], [{1}]], [0, 0, -1], one) == [False]
    # Means of 2/3 and of 4/6 are equal.
    sets = [[{1, 2}], [{3}], [{4}], *[[{1}]] * 4, [{3}], [{4}]]
    assert signals(sets, [0] * 3 + [-1] * 6, one) == [False]


def test_layers_without_events_have_no_signal_and_layers_of_events_alone_always() -> None:
    sets = [[{1}, {1}], [{2}, {2}]]
    assert signals(sets, [-1, -1], [{1}, {1}]) == [False, False]
    assert signals(sets, [1, 1], [{9}, {9}]) == [False, True]
