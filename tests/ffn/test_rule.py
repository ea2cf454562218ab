"""The exit rule is a loop over examples written from its definition, by every option."""

from __future__ import annotations

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
def test_the_rule_is_a_loop_over_examples(others, overlap, case):
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


def test_clusters_are_ordered_by_the_sizes_of_coefficients():
    trace = make_trace_of_dominant(np.array([[[0, 1, 2, 3]], [[3, 2, 1, 0]]]), "one")
    trace.coefficient["dominant"] = torch.tensor([[[1.0, -4.0, 3.0, -2.0]], [[1.0, 1.0, 0.0, -1.0]]])
    clusters = make_clusters([5, 4, 3, 2, 0, 1], make_identity("none", "one", n_layers=1))
    assert active_clusters(trace, clusters).tolist() == [[[4, 3, 2, 5]], [[2, 3, 5, 4]]]
