"""Classifiers of early exit: chosen penalties, thresholds and weights against plain loops."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from exits.classifiers import LASSO, RIDGE, ExitClassifiers, best_threshold
from exits.outcomes import ExampleSplit, first_exit, split_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold

STRENGTHS = (1e-4, 3e-2, 1e-1, 1.0)


def layers_of(n: int, n_layers: int, d: int, noise: float, seed: int = 0) -> tuple[list[np.ndarray], Any]:
    """Features that tell by their first coordinate whether the prediction is made at a layer, and noise."""
    generator = np.random.default_rng(seed)
    made_at = generator.integers(-1, n_layers, n)
    features = []
    for layer in range(n_layers):
        x = noise * generator.normal(size=(n, d)) + 100
        x[:, 0] += 5 * (made_at == layer)
        features.append(x * 10.0 ** np.arange(-3, d - 3))  # of very different sizes
    return features, made_at


def test_features_that_separate_are_left_at_the_right_layer():
    features, made_at = layers_of(400, 4, 6, noise=0.2)
    split = split_examples(400)
    signals = ExitClassifiers(folds=3, fewest=2).fit(features, made_at, split).signals(features, split.test)
    assert (signals == (made_at[split.test, None] == np.arange(4))).all()
    expected = np.where(made_at < 0, 3, made_at)[split.test]
    assert first_exit(signals).tolist() == expected.tolist()


def by_loops(
    x: np.ndarray, truth: np.ndarray, kinds: tuple[int, ...], folds: int, seed: int
) -> tuple[str, np.ndarray]:
    """The penalty with the best mean average precision, and the scores of all examples with it."""

    def fitted(rows: np.ndarray, kind: int, strength: float) -> np.ndarray:
        mean, sd = x[rows].mean(0), x[rows].std(0)
        y = truth[rows]
        weight = np.where(y, len(y) / (2 * y.sum()), len(y) / (2 * (~y).sum()))
        model = LogisticRegression(
            C=strength, l1_ratio=kind, solver="liblinear" if kind else "lbfgs", max_iter=5000,
            random_state=seed,
        )  # fmt: skip
        return model.fit((x[rows] - mean) / sd, y, sample_weight=weight).decision_function((x - mean) / sd)

    tried = []
    for kind, strength in itertools.product(kinds, STRENGTHS):
        precisions = []
        for train, held in StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, truth):
            precisions.append(average_precision_score(truth[held], fitted(train, kind, strength)[held]))
        tried.append((np.mean(precisions), kind, strength))
    _, kind, strength = max(tried, key=lambda each: each[0])
    return f"{('ridge', 'lasso')[kind]} {strength:g}", fitted(np.arange(len(x)), kind, strength)


def one_of_many(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One coordinate of thirty tells, with more or less noise; their sizes are very different."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(150, 30))
    truth = x[:, 0] + [0.1, 1, 3][seed % 3] * generator.normal(size=150) > 0.5
    return x * 10.0 ** generator.integers(-2, 3, 30), truth


@pytest.mark.parametrize("kinds", [(RIDGE,), (RIDGE, LASSO)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_the_chosen_penalty_is_that_of_a_plain_loop(seed, kinds):
    x, truth = one_of_many(seed)
    n = len(x)
    split = ExampleSplit(np.arange(100), np.arange(100, 125), np.arange(125, n))
    learnt = ExitClassifiers(strengths=STRENGTHS, kinds=kinds, folds=4, fewest=2, seed=seed)
    learnt.fit([x], np.where(truth, 0, -1), split)
    penalty, expected = by_loops(x[:100], truth[:100], kinds, 4, seed)
    assert learnt.penalties == [penalty]
    np.testing.assert_allclose(learnt.models_[0].decision_function(x[:100]), expected, atol=2e-3)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=25))
def test_the_threshold_has_the_largest_f1_of_all(pairs):
    """Of those midway between two scores, and of the lowest score; the highest of equals."""
    score = np.array([value / 6 for value, _ in pairs])
    truth = np.array([true for _, true in pairs])
    known = sorted(set(score), reverse=True)
    best, wanted = Fraction(-1), 0.0
    for threshold in [*((a + b) / 2 for a, b in itertools.pairwise(known)), known[-1]]:
        hits = sum(t and s >= threshold for s, t in zip(score, truth, strict=True))
        wrong = sum(t != (s >= threshold) for s, t in zip(score, truth, strict=True))
        f1 = Fraction(2 * int(hits), 2 * int(hits) + int(wrong)) if hits + wrong else Fraction(0)
        if f1 > best:
            best, wanted = f1, threshold
    assert best_threshold(score, truth) == wanted


def test_the_threshold_is_set_on_the_calibration_part():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 1))
    truth = x[:, 0] + generator.normal(size=300) > 1
    split = split_examples(300)
    learnt = ExitClassifiers(folds=3, fewest=2).fit([x], np.where(truth, 0, -1), split)
    score = learnt.models_[0].predict_proba(x)[:, 1]
    assert learnt.thresholds_ == [best_threshold(score[split.calibration], truth[split.calibration])]
    said = learnt.signals([x], split.test)[:, 0]
    assert (said == (score[split.test] >= learnt.thresholds_[0])).all()
    assert 0 < said.sum() < len(said)


def test_layers_without_enough_of_a_class_are_not_learnt():
    """Too few events to learn from or to calibrate on: never. Too few others: always."""
    n = 100
    x = np.random.default_rng(0).normal(size=(n, 2))
    split = ExampleSplit(np.arange(60), np.arange(60, 80), np.arange(80, n))

    def learnt(events: int, calibrating: int) -> ExitClassifiers:
        made_at = np.full(n, -1)
        made_at[:events] = made_at[60 : 60 + calibrating] = 0
        return ExitClassifiers(folds=3, fewest=5).fit([x], made_at, split)

    for events, calibrating, model, always in (
        (5, 5, True, False), (4, 5, False, False), (5, 4, False, False), (0, 0, False, False),
        (55, 5, True, False), (56, 5, False, True), (60, 20, False, True), (60, 4, False, False),
    ):  # fmt: skip
        classifiers = learnt(events, calibrating)
        assert (classifiers.models_[0] is not None) == model
        assert len(classifiers.penalties) == model
        if not model:
            assert classifiers.signals([x], split.test)[:, 0].tolist() == [always] * 20
