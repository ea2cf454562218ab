"""Self-supervised early exit: dominant sub-updates tell that a prediction is made (section 6.2, A.5).

Saturation events of training examples say at which layers one could have left. The rule needs no more
training than that: it compares the clusters of an example's dominant sub-updates with those that were
seen at saturation events of a layer, and with those seen otherwise. Beside it stand classifiers of the
stream and of the FFN's output, and the confidence exit of paper A. All are judged alike: by the share of
examples for which the layer they leave at gives the model's own prediction, and the layers saved on these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy.sparse import csr_array
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import precision_recall_curve
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from matlens.errors import InputError
from matlens.ffn.clusters import Clusters
from matlens.ffn.trace import Trace
from matlens.ffn.values import Values

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)  # inverse strengths that are tried
FOLDS = 8
_FEWEST = 8  # saturation events of a layer that a classifier of it can be trained on


class Parts(NamedTuple):
    """Which examples are for what: to learn from, to calibrate thresholds on, and to judge by."""

    train: Int[np.ndarray, " n_train"]
    calibration: Int[np.ndarray, " n_calibration"]
    test: Int[np.ndarray, " n_test"]


def parts(n: int, *, seed: int = 0) -> Parts:
    """Split examples at random: 80%, 10%, 10%, as in the paper.

    Raises
    ------
    InputError
        There are fewer than 10 examples.
    """
    if n < 10:
        raise InputError(f"{n} examples cannot be split into training, calibration and test. Expected 10.")
    order, tenth = np.random.default_rng(seed).permutation(n), n // 10
    return Parts(order[2 * tenth :], order[tenth : 2 * tenth], order[:tenth])


def leaving(signals: Bool[np.ndarray, "n n_layers"]) -> Int[np.ndarray, " n"]:
    """First layer with a signal; the last one where there is none."""
    return np.where(signals.any(1), signals.argmax(1), signals.shape[1] - 1)


def active_clusters(trace: Trace, values: Values, clusters: Clusters) -> list[csr_array]:
    """For each layer ``[n, n_clusters]``: 1 where a dominant sub-update of the example is of the cluster."""
    active = []
    for layer in range(trace.n_layers):
        own = clusters.labels[layer * values.d_mlp + trace.index["dominant"][:, layer].numpy()]
        rows = np.repeat(np.arange(len(own)), own.shape[1])
        ones = np.ones(own.size, dtype=np.float32)
        counted = csr_array((ones, (rows, own.ravel())), shape=(len(own), len(clusters)))
        counted.sum_duplicates()
        counted.data[:] = 1  # a set: several of one cluster are there once
        active.append(counted)
    return active


class OverlapRule:
    """Leave where the clusters look like those of saturation events.

    At each layer the clusters of the example are compared with the sets of all training examples whose
    prediction was made there, and with the sets of all others. The signal is that both the mean and the
    maximal size of the intersection with the first exceed those with the second.
    """

    def fit(
        self, active: Sequence[csr_array], made_at: Int[np.ndarray, " n"], rows: Int[np.ndarray, " m"]
    ) -> OverlapRule:
        """Keep the sets of the training examples.

        Parameters
        ----------
        active
            Of all examples, see `active_clusters`.
        made_at
            The layer whose FFN has made each example's prediction; -1 where none has.
        rows
            The training examples.
        """
        self.inside_ = [each[rows[made_at[rows] == layer]] for layer, each in enumerate(active)]
        self.outside_ = [each[rows[made_at[rows] != layer]] for layer, each in enumerate(active)]
        return self

    def signals(
        self, active: Sequence[csr_array], rows: Int[np.ndarray, " m"]
    ) -> Bool[np.ndarray, "m n_layers"]:
        """Whether each layer says that the prediction of an example is made."""
        found = np.zeros((len(rows), len(active)), dtype=bool)
        for layer, each in enumerate(active):
            inside, outside = self.inside_[layer], self.outside_[layer]
            if not inside.shape[0]:
                continue
            if not outside.shape[0]:
                found[:, layer] = True
                continue
            (mean_in, most_in), (mean_out, most_out) = (
                _overlap(each[rows], sets) for sets in (inside, outside)
            )
            found[:, layer] = (mean_in > mean_out) & (most_in > most_out)
        return found


def _overlap(own: csr_array, sets: csr_array) -> tuple[np.ndarray, np.ndarray]:
    sizes = (own @ sets.T).toarray()
    return sizes.mean(1, dtype=np.float64), sizes.max(1)


class Classifiers:
    """A logistic regression for each layer, of whether the prediction is made there.

    Features are standardised, classes weighed against their frequency; the penalty, lasso or ridge, and its
    strength are chosen by cross-validated average precision, and the threshold is the one with the largest
    F1 on the calibration examples. A layer with too few events to learn from never says so.

    Parameters
    ----------
    penalties
        Inverse strengths that are tried.
    kinds
        Of penalties that are tried: 0 for ridge, 1 for lasso.
    folds
        Of the cross-validation, fewer where there are fewer events.
    seed
        Of the folds.
    """

    def __init__(
        self,
        *,
        penalties: Sequence[float] = PENALTIES,
        kinds: Sequence[int] = (0, 1),
        folds: int = FOLDS,
        seed: int = 0,
    ) -> None:
        self.penalties, self.kinds, self.folds, self.seed = penalties, kinds, folds, seed

    def fit(
        self,
        features: Sequence[Float[np.ndarray, "n d"]],
        made_at: Int[np.ndarray, " n"],
        split: Parts,
    ) -> Classifiers:
        """Train a classifier for each layer and calibrate its threshold."""
        self.models_: list[Any] = []
        self.thresholds_: list[float] = []
        for layer, x in enumerate(features):
            truth = made_at == layer
            model, threshold = None, float("inf")
            if truth[split.train].sum() >= _FEWEST and truth[split.calibration].any():
                model = self._search(int(truth[split.train].sum()))
                model.fit(x[split.train], truth[split.train])
                score = model.predict_proba(x[split.calibration])[:, 1]
                threshold = best_threshold(score, truth[split.calibration])
            self.models_.append(model)
            self.thresholds_.append(threshold)
        return self

    def signals(
        self, features: Sequence[Float[np.ndarray, "n d"]], rows: Int[np.ndarray, " m"]
    ) -> Bool[np.ndarray, "m n_layers"]:
        """Whether each layer says that the prediction of an example is made."""
        found = np.zeros((len(rows), len(features)), dtype=bool)
        for layer, (x, model, threshold) in enumerate(
            zip(features, self.models_, self.thresholds_, strict=True)
        ):
            if model is not None:
                found[:, layer] = model.predict_proba(x[rows])[:, 1] >= threshold
        return found

    def _search(self, n_events: int) -> GridSearchCV:
        grid = [
            {
                "logisticregression__C": list(self.penalties),
                "logisticregression__l1_ratio": [kind],
                "logisticregression__solver": ["liblinear" if kind else "lbfgs"],
            }
            for kind in self.kinds
        ]
        model = LogisticRegression(class_weight="balanced", max_iter=2000, random_state=self.seed)
        folds = StratifiedKFold(min(self.folds, n_events), shuffle=True, random_state=self.seed)
        return GridSearchCV(
            make_pipeline(StandardScaler(), model), grid, cv=folds, scoring="average_precision"
        )


def best_threshold(score: Float[np.ndarray, " n"], truth: Bool[np.ndarray, " n"]) -> float:
    """The threshold, of the scores there are, with the largest F1; the highest of equals."""
    precision, recall, thresholds = precision_recall_curve(truth, score)
    both = precision[:-1] + recall[:-1]
    f1 = 2 * precision[:-1] * recall[:-1] / np.where(both > 0, both, 1)
    return float(thresholds[len(f1) - 1 - int(f1[::-1].argmax())])


class Judged(NamedTuple):
    """How an exit does.

    Attributes
    ----------
    accuracy
        Share of examples for which the layer it leaves at gives the model's prediction.
    saved
        Mean number of layers that are not run, over these examples; NaN where there are none.
    """

    accuracy: float
    saved: float


def judge(leaves: Int[np.ndarray, " n"], right: Bool[np.ndarray, "n n_layers"]) -> Judged:
    """Judge the layers that examples leave at by which layers predict what the last one does."""
    hits = right[np.arange(len(leaves)), leaves]
    saved = right.shape[1] - 1 - leaves[hits]
    return Judged(float(hits.mean()), float(saved.mean()) if len(saved) else float("nan"))


def summary(found: dict[str, list[Judged]], n_layers: int) -> pd.DataFrame:
    """Accuracy and layers saved of each method over the seeds (Table 6), one row each.

    Columns are ``method, accuracy, accuracy_sd, saved, saved_sd, saved_share, seeds``; ``sd`` is the standard
    deviation over the seeds, the share is that of all layers.
    """
    rows = []
    for method, each in found.items():
        accuracy, saved = (np.array([getattr(one, name) for one in each]) for name in Judged._fields)
        sd = [float(column.std(ddof=1)) if len(each) > 1 else float("nan") for column in (accuracy, saved)]
        mean = float(saved.mean())
        rows.append((method, float(accuracy.mean()), sd[0], mean, sd[1], mean / n_layers, len(each)))
    columns = ["method", "accuracy", "accuracy_sd", "saved", "saved_sd", "saved_share", "seeds"]
    return pd.DataFrame(rows, columns=columns)
