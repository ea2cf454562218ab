"""Self-supervised early exit: dominant sub-updates tell that a prediction is made (section 6.2, A.5).

Saturation events of training examples say at which layers one could have left. The rule needs no more
training than that: it compares the clusters of an example's dominant sub-updates with those that were
seen at saturation events of a layer, and with those seen otherwise. Every way of leaving is judged alike: by
the share of examples for which the layer it leaves at gives the model's own prediction, and by the layers
that are saved on these. To leave at layer ``l`` is to read the prediction from the stream after its FFN, so
``n_layers - 1 - l`` layers are not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy.sparse import csr_array

from matlens.errors import InputError
from matlens.ffn.clusters import Clusters
from matlens.ffn.trace import Trace

Others = Literal["together", "by-layer"]
_FEWEST = 10  # examples that three parts can be made of


class ExampleSplit(NamedTuple):
    """Which examples are for what: to learn from, to calibrate on, and to judge by."""

    train: Int[np.ndarray, " n_train"]
    calibration: Int[np.ndarray, " n_calibration"]
    test: Int[np.ndarray, " n_test"]


def split_examples(n: int, *, seed: int = 0) -> ExampleSplit:
    """Split examples at random: 80%, 10%, 10%, as in the paper.

    Raises
    ------
    InputError
        There are fewer than 10 examples.
    """
    if n < _FEWEST:
        raise InputError(
            f"{n} examples cannot be split into training, calibration and test. Expected {_FEWEST} or more."
        )
    order, tenth = np.random.default_rng(seed).permutation(n), n // 10
    return ExampleSplit(order[2 * tenth :], order[tenth : 2 * tenth], order[:tenth])


def active_clusters(trace: Trace, clusters: Clusters) -> list[csr_array]:
    """For each layer ``[n, n_clusters]``: 1 where a dominant sub-update of the example is of the cluster.

    Raises
    ------
    InputError
        The clusters are of another model.
    """
    models = [one.provenance["model"]["fingerprint"] for one in (trace, clusters)]
    if models[0] != models[1]:
        raise InputError(
            f"The clusters are of the model {models[1]}, and the trace of {models[0]}. Cluster the value "
            "vectors of the model that is traced."
        )
    rows, shape = np.repeat(np.arange(len(trace)), trace.k), (len(trace), len(clusters))
    ones = np.ones(len(rows), dtype=np.float32)
    of_layer = clusters.labels.reshape(trace.n_layers, -1)
    own = [
        labels[index.flatten().numpy()]
        for labels, index in zip(of_layer, trace.index["dominant"].unbind(1), strict=True)
    ]
    # A set: several of one cluster, which add up here, are there once.
    return [csr_array((ones, (rows, columns)), shape=shape).sign() for columns in own]


class OverlapRule:
    """Leave where the clusters look like those of saturation events.

    At each layer the clusters of an example are compared with the sets of the training examples whose
    prediction was made there, and with the sets of the others. The signal is that both the mean and the
    maximal size of the intersection with the first exceed those with the second.

    Parameters
    ----------
    others
        ``together``: all others are one group. ``by-layer``: they are grouped by the layer that their own
        prediction was made at, and every group has to be exceeded (the paper's footnote 7).
    """

    def __init__(self, *, others: Others = "together") -> None:
        self.others = others

    def fit(
        self, active: Sequence[csr_array], made_at: Int[np.ndarray, " n"], rows: Int[np.ndarray, " m"]
    ) -> OverlapRule:
        """Keep the sets of the training examples.

        Parameters
        ----------
        active
            Of all examples, see `active_clusters`.
        made_at
            The layer that each example's prediction was made at; -1 where none counts.
        rows
            The training examples.
        """
        self.sets_, self.made_at_ = [each[rows] for each in active], made_at[rows]
        return self

    def signals(
        self, active: Sequence[csr_array], rows: Int[np.ndarray, " m"]
    ) -> Bool[np.ndarray, "m n_layers"]:
        """Whether each layer says that the prediction of an example is made.

        A layer at which no prediction of the training examples was made never says so; one at which all
        were always does.
        """
        found = np.zeros((len(rows), len(active)), dtype=bool)
        for layer, each in enumerate(active):
            inside = self.made_at_ == layer
            if inside.any():
                sizes = (each[rows] @ self.sets_[layer].T).toarray()
                found[:, layer] = np.all(
                    [_exceeds(sizes, inside, group) for group in self._groups(inside)], 0
                )
        return found

    def _groups(self, inside: Bool[np.ndarray, " n"]) -> Iterator[Bool[np.ndarray, " n"]]:
        if self.others == "together":
            yield ~inside
        else:
            yield from (self.made_at_ == layer for layer in np.unique(self.made_at_[~inside]))


def _exceeds(
    sizes: Float[np.ndarray, "m n"], inside: Bool[np.ndarray, " n"], outside: Bool[np.ndarray, " n"]
) -> Bool[np.ndarray, " m"]:
    if not outside.any():
        return np.ones(len(sizes), dtype=bool)
    own, other = sizes[:, inside], sizes[:, outside]
    more = own.mean(1, dtype=np.float64) > other.mean(1, dtype=np.float64)
    return more & (own.max(1) > other.max(1))


def first_exit(signals: Bool[np.ndarray, "n n_layers"]) -> Int[np.ndarray, " n"]:
    """First layer with a signal; the last one where there is none."""
    return np.where(signals.any(1), signals.argmax(1), signals.shape[1] - 1)


class JudgedExits(NamedTuple):
    """How a way of leaving does.

    Attributes
    ----------
    accuracy
        Share of examples for which the layer it leaves at gives the model's prediction.
    saved
        Mean number of layers that are not run, over these examples; NaN where there are none.
    left
        Share of examples, right or not, that leave before the last layer.
    chance
        The accuracy if the same layers are dealt out among the examples at random, on average over all ways
        to deal them. What is above it is owed to knowing which examples to let go.
    """

    accuracy: float
    saved: float
    left: float
    chance: float


def judge_exits(leaves: Int[np.ndarray, " n"], right: Bool[np.ndarray, "n n_layers"]) -> JudgedExits:
    """Judge the layers that examples leave at by which layers predict what the last one does."""
    n, n_layers = right.shape
    hits, saved = right[np.arange(n), leaves], n_layers - 1 - leaves
    mean = float(saved[hits].mean()) if hits.any() else float("nan")
    return JudgedExits(
        float(hits.mean()), mean, float((saved > 0).mean()), float(right.mean(0)[leaves].mean())
    )


def summarize_exits(found: Mapping[str, Sequence[JudgedExits]], n_layers: int) -> pd.DataFrame:
    """Accuracy and layers saved of each method over the seeds (Table 6), one row each.

    Columns are ``method, accuracy, accuracy_sd, saved, saved_sd, saved_share, left, chance, seeds``; ``sd``
    is the standard deviation over the seeds, NaN for one; ``saved_share`` is that of all layers. A seed
    without a right example has no layers saved and does not count for these.
    """
    rows = []
    for method, each in found.items():
        numbers = pd.DataFrame(each)
        mean, sd = numbers.mean(), numbers.std()
        told = (mean["accuracy"], sd["accuracy"], mean["saved"], sd["saved"], mean["saved"] / n_layers)
        rows.append((method, *told, mean["left"], mean["chance"], len(each)))
    means = ["accuracy", "accuracy_sd", "saved", "saved_sd", "saved_share", "left", "chance"]
    return pd.DataFrame(rows, columns=["method", *means, "seeds"])
