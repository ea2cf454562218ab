"""Splits, leaving and judging by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from exits.outcomes import EvaluatedExits, evaluate_exits, split_examples, summarize_exits


@pytest.mark.parametrize("n", [10, 11, 19, 20, 57, 2000])
def test_parts_are_disjoint_and_complete(n):
    split = split_examples(n, seed=3)
    assert sorted(np.concatenate(split)) == list(range(n))
    assert (len(split.test), len(split.calibration)) == (n // 10, n // 10)
    assert all((one == two).all() for one, two in zip(split, split_examples(n, seed=3), strict=True))
    assert any((one != two).any() for one, two in zip(split, split_examples(n, seed=4), strict=True))


def test_layers_saved_are_those_of_right_examples():
    right = np.array([[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1], [0, 0, 0, 1]], dtype=bool)
    exits = evaluate_exits(np.array([1, 1, 0, 3]), right)  # right, wrong, right (by luck), at the end
    assert (exits.accuracy, exits.exited) == (0.75, 0.75)
    assert exits.saved == pytest.approx((2 + 3 + 0) / 3)
    nobody = evaluate_exits(np.array([0, 1]), right[:2])
    assert nobody.accuracy == 0
    assert np.isnan(nobody.saved)


def test_chance_is_the_mean_over_all_ways_to_deal_out_the_layers():
    generator = np.random.default_rng(0)
    right = generator.random((5, 4)) < 0.5
    right[:, -1] = True
    leaves = np.array([0, 3, 1, 1, 2])
    dealt = [evaluate_exits(np.array(order), right) for order in itertools.permutations(leaves)]
    accuracies = [one.accuracy for one in dealt]
    assert len(set(accuracies)) > 2
    for one in dealt:
        assert one.chance == pytest.approx(np.mean(accuracies))
        assert one.chance_sd == pytest.approx(np.std(accuracies))
    assert evaluate_exits(np.array([1]), np.array([[False, True]])).chance_sd == 0


def test_the_summary_is_mean_and_deviation_over_seeds():
    evaluated = {
        "a": [EvaluatedExits(0.8, 3, 0.5, 0.6, 0), EvaluatedExits(0.9, 5, 0.7, 0.5, 0)],
        "b": [EvaluatedExits(1, 0, 0, 1, 0)],
    }
    a, b = summarize_exits(evaluated, 16).to_dict("records")
    assert a == {
        "method": "a", "accuracy": pytest.approx(0.85), "accuracy_sd": pytest.approx(0.1 / 2**0.5),
        "saved": 4, "saved_sd": pytest.approx(2**0.5), "saved_share": 0.25, "exited": pytest.approx(0.6),
        "chance": pytest.approx(0.55), "above": pytest.approx(0.3), "above_sd": pytest.approx(0.02**0.5),
        "seeds": 2,
    }  # fmt: skip
    assert (b["accuracy"], b["saved"], b["saved_share"], b["seeds"]) == (1, 0, 0, 1)
    assert np.isnan(b["accuracy_sd"])
    assert np.isnan(b["saved_sd"])
