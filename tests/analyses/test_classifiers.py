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


def test_features_that_separate_are_left_at_the_right_layer() -> None:
    features, made_at = layers_of(400, 4, 6, noise=0.2)
    split = split_examples(400)
    signals = (
        ExitClassifiers(folds=3, fewest=2)
        .fit(features, made_at, split, progress=False)
        .signals(features, split.test)
    )
    assert (signals == (made_at[split.test, None] == np.arange(4))).all()
    expected = np.where(made_at < 0, 3, made_at)[split.test]
    assert first_exit(signals).tolist() == expected.tolist()


def test_noise_tells_nothing() -> None:
    """What is said of new examples does not depend on the truth: a hit is as rare as an event."""
    generator = np.random.default_rng(0)
    hits, said, events = 0, 0, []
    for seed in range(6):
        n = 600
        features = [generator.normal(size=(n, 5))]
        made_at = np.where(generator.random(n) < 0.3, 0, -1)
        split = split_examples(n, seed=seed)
        learnt = ExitClassifiers(folds=3, fewest=2, seed=seed).fit(features, made_at, split, progress=False)
        signals = learnt.signals(features, split.test)[:, 0]
        hits, said = hits + int((signals & (made_at[split.test] == 0)).sum()), said + int(signals.sum())
        events.append((made_at[split.test] == 0).mean())
    assert said > 50
    assert hits / said == pytest.approx(np.mean(events), abs=0.12)


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


@pytest.mark.parametrize("kinds", [(RIDGE,), (LASSO,), (RIDGE, LASSO)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_chosen_penalty_is_that_of_a_plain_loop(seed: int, kinds: tuple[int, ...]) -> None:
    x, truth = one_of_many(seed)
    n = len(x)
    split = ExampleSplit(np.arange(100), np.arange(100, 125), np.arange(125, n))
    learnt = ExitClassifiers(strengths=STRENGTHS, kinds=kinds, folds=4, fewest=2, seed=seed)
    learnt.fit([x], np.where(truth, 0, -1), split, progress=False)
    penalty, expected = by_loops(x[:100], truth[:100], kinds, 4, seed)
    assert learnt.penalties == [penalty]
    np.testing.assert_allclose(learnt.models_[0].decision_function(x[:100]), expected, atol=2e-3)


def test_different_data_choose_different_penalties() -> None:
    penalties = [by_loops(*one_of_many(seed), (RIDGE, LASSO), 4, seed)[0] for seed in range(9)]
    assert {name.split()[0] for name in penalties} == {"ridge", "lasso"}
    assert len(set(penalties)) > 2, "the comparison of choices proves little"


def test_rare_events_weigh_as_much_as_all_others() -> None:
    """One event in twenty: balanced, an example halfway between both has even odds."""
    generator = np.random.default_rng(0)
    n = 1200
    truth = np.arange(n) % 20 == 0
    x = generator.normal(size=(n, 1)) + 2 * truth[:, None]
    learnt = ExitClassifiers(strengths=[1.0], kinds=[RIDGE], folds=3, fewest=2)
    learnt.fit([x], np.where(truth, 0, -1), split_examples(n), progress=False)
    halfway = learnt.models_[0].predict_proba(np.array([[1.0]]))[0, 1]
    assert halfway == pytest.approx(0.5, abs=0.12)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=25))
def test_the_threshold_has_the_largest_f1_of_all(pairs: list[tuple[int, bool]]) -> None:
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


def test_neighbouring_numbers_have_nothing_between_them() -> None:
    lower = 0.5
    upper = float(np.nextafter(lower, 1))
    threshold = best_threshold(np.array([lower, upper, 0.1]), np.array([False, True, False]))
    assert threshold == upper


def test_the_threshold_is_set_on_the_calibration_part() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 1))
    truth = x[:, 0] + generator.normal(size=300) > 1
    split = split_examples(300)
    learnt = ExitClassifiers(folds=3, fewest=2).fit([x], np.where(truth, 0, -1), split, progress=False)
    score = learnt.models_[0].predict_proba(x)[:, 1]
    assert learnt.thresholds_ == [best_threshold(score[split.calibration], truth[split.calibration])]
    said = learnt.signals([x], split.test)[:, 0]
    assert (said == (score[split.test] >= learnt.thresholds_[0])).all()
    assert 0 < said.sum() < len(said)


def test_layers_without_enough_of_a_class_are_not_learnt() -> None:
    """Too few events to learn from or to calibrate on: never. Too few others: always."""
    n = 100
    x = np.random.default_rng(0).normal(size=(n, 2))
    split = ExampleSplit(np.arange(60), np.arange(60, 80), np.arange(80, n))

    def learnt(events: int, calibrating: int) -> ExitClassifiers:
        made_at = np.full(n, -1)
        made_at[:events] = made_at[60 : 60 + calibrating] = 0
        return ExitClassifiers(folds=3, fewest=5).fit([x], made_at, split, progress=False)

    for events, calibrating, model, always in (
        (5, 5, True, False), (4, 5, False, False), (5, 4, False, False), (0, 0, False, False),
        (55, 5, True, False), (56, 5, False, True), (60, 20, False, True), (60, 4, False, False),
    ):  # fmt: skip
        classifiers = learnt(events, calibrating)
        assert (classifiers.models_[0] is not None) == model
        assert len(classifiers.penalties) == model
        if not model:
            assert classifiers.signals([x], split.test)[:, 0].tolist() == [always] * 20


@pytest.mark.parametrize("events", [8, 9, 52])
def test_folds_are_as_many_as_the_rarer_class_allows(events: int) -> None:
    """Without a warning that a class has fewer members than there are folds."""
    n = 100
    generator = np.random.default_rng(1)
    x = generator.normal(size=(n, 2))
    made_at = np.where(np.arange(n) % 60 < events, 0, -1)
    split = ExampleSplit(np.arange(60), np.arange(60, 90), np.arange(90, n))
    learnt = ExitClassifiers(folds=20).fit([x], made_at, split, progress=False)
    assert learnt.models_[0].n_splits_ == min(events, 60 - events)


def test_a_seed_gives_the_same_numbers_and_another_other_folds() -> None:
    features, made_at = layers_of(200, 2, 5, noise=4.0)
    split = split_examples(200)

    def scores(seed: int) -> np.ndarray:
        learnt = ExitClassifiers(folds=3, fewest=2, seed=seed).fit(features, made_at, split, progress=False)
        return np.array([model.cv_results_["mean_test_score"] for model in learnt.models_])

    assert (scores(0) == scores(0)).all()
    assert (scores(0) != scores(1)).any()


def test_many_correlated_dimensions_are_learnt_without_a_warning() -> None:
    """Warnings are errors here: no solver stops before its time."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 8)) @ generator.normal(size=(8, 120)) * 100
    x += generator.normal(size=x.shape)
    x[:, 3] = 7.0  # a coordinate that does not vary
    made_at = np.where(x[:, 0] > 150, 0, -1)
    learnt = ExitClassifiers(folds=3, fewest=2).fit([x], made_at, split_examples(200), progress=False)
    assert len(learnt.penalties) == 1


def test_a_layer_where_all_look_alike_lets_all_go_or_none() -> None:
    """The largest F1 is had by taking all, so that a new one with the same score is taken too."""
    x, made_at = np.zeros((100, 2)), np.where(np.arange(100) % 3 == 0, 0, -1)
    learnt = ExitClassifiers(folds=3, fewest=2).fit([x], made_at, split_examples(100), progress=False)
    assert learnt.signals([x], np.arange(100)).all()
