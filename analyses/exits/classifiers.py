"""Per-layer classifiers of whether the prediction is already made (paper B, appendix A.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from exits.outcomes import ExampleSplit
from matlens.parallel import Bar

PENALTY_STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
"""Inverse, and those of the paper: the smaller, the stronger the penalty."""
FOLDS = 8
FEWEST_EVENTS = 8
"""Minimum events of a layer for a classifier."""
RIDGE = 0
"""Penalty on the squares of the weights."""
LASSO = 1
"""Penalty on the sizes of the weights."""
_NAMES = {RIDGE: "ridge", LASSO: "lasso"}


class ExitClassifiers:
    """A logistic regression for each layer, of whether the prediction is made there.

    Features are standardised and classes balanced; the penalty (lasso or ridge) and its strength are
    chosen by cross-validated average precision, and the threshold by the largest F1 on the calibration
    examples. A layer with too few events for training or calibration never exits: a threshold set on one
    or two events may let nearly all examples exit. One with too few non-events always exits.

    Attributes
    ----------
    models_
        The classifier of each layer, or None.
    thresholds_
        The probability at which each layer exits; infinite if never, negative if always.
    """

    def __init__(
        self,
        *,
        strengths: Sequence[float] = PENALTY_STRENGTHS,
        kinds: Sequence[int] = (RIDGE, LASSO),
        folds: int = FOLDS,
        fewest: int = FEWEST_EVENTS,
        seed: int = 0,
    ) -> None:
        self.strengths, self.kinds, self.folds = strengths, kinds, folds
        self.fewest, self.seed = fewest, seed

    def fit(
        self,
        features: Sequence[Float[np.ndarray, "n d"]],
        made_at: Int[np.ndarray, " n"],
        split: ExampleSplit,
    ) -> ExitClassifiers:
        """Train a classifier for each layer on the training part, and calibrate its threshold."""
        bar = Bar(features, desc="classifiers", unit="layer", leave=False)
        trained = [self._train(x, made_at == layer, split) for layer, x in enumerate(bar)]
        self.models_ = [model for model, _ in trained]
        self.thresholds_ = [threshold for _, threshold in trained]
        return self

    @property
    def penalties(self) -> list[str]:
        """The selected penalty of each classifier, such as ``ridge 0.01``."""
        chosen = [model.best_params_ for model in self.models_ if model is not None]
        return [
            f"{_NAMES[parameters['logisticregression__l1_ratio']]} {parameters['logisticregression__C']:g}"
            for parameters in chosen
        ]

    def signals(
        self, features: Sequence[Float[np.ndarray, "n d"]], rows: Int[np.ndarray, " m"]
    ) -> Bool[np.ndarray, "m n_layers"]:
        """Whether each layer predicts that the prediction is made."""
        signals = np.zeros((len(rows), len(features)), dtype=bool)
        classifiers = zip(features, self.models_, self.thresholds_, strict=True)
        for layer, (x, model, threshold) in enumerate(classifiers):
            signals[:, layer] = (0.0 if model is None else _probability(model, x[rows])) >= threshold
        return signals

    def _train(
        self, x: Float[np.ndarray, "n d"], truth: Bool[np.ndarray, " n"], split: ExampleSplit
    ) -> tuple[Any, float]:
        events, calibration_events = (int(truth[rows].sum()) for rows in (split.train, split.calibration))
        others = len(split.train) - events
        if min(events, calibration_events) < self.fewest:
            return None, float("inf")
        if others < self.fewest:
            return None, -1.0
        folds = StratifiedKFold(min(self.folds, events, others), shuffle=True, random_state=self.seed)
        search = GridSearchCV(
            make_pipeline(
                StandardScaler(),
                LogisticRegression(class_weight="balanced", max_iter=5000, random_state=self.seed),
            ),
            [
                {
                    "logisticregression__C": list(self.strengths),
                    "logisticregression__l1_ratio": [kind],
                    "logisticregression__solver": ["liblinear" if kind == LASSO else "lbfgs"],
                }
                for kind in self.kinds
            ],
            cv=folds,
            scoring="average_precision",
        ).fit(x[split.train], truth[split.train])
        score = _probability(search, x[split.calibration])
        return search, best_threshold(score, truth[split.calibration])


def _probability(model: Any, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
    return model.predict_proba(x)[:, 1]


def best_threshold(score: Float[np.ndarray, " n"], truth: Bool[np.ndarray, " n"]) -> float:
    """The threshold with the largest F1 (the highest if tied).

    It lies midway between the lowest score that counts as true and the next lower one, so that an event with
    a slightly lower score than all calibration events still counts.
    """
    levels = np.unique(score)[::-1]
    positive = score >= levels[:, None]
    f1 = 2 * (positive & truth).sum(1) / (positive.sum(1) + truth.sum())  # of integers: exact ties
    lowest, following = np.append(levels, levels[-1])[f1.argmax() :][:2]
    middle = (lowest + following) / 2
    return float(middle if middle > following else lowest)
