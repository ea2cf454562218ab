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

from matlens.arguments import require_whole
from matlens.errors import InputError
from matlens.ffn.clusters import Clusters
from matlens.ffn.trace import Trace
from matlens.signatures import checked

Others = Literal["together", "by-layer"]
_FEWEST_EXAMPLES = 10  # that can be split into three parts


class ExampleSplit(NamedTuple):
    """Rows of the examples to train on, to calibrate on, and to test on."""

    train: Int[np.ndarray, " n_train"]
    calibration: Int[np.ndarray, " n_calibration"]
    test: Int[np.ndarray, " n_test"]


def split_examples(n: int, *, seed: int = 0) -> ExampleSplit:
    """Split ``n`` examples at random: 80%, 10% and 10%, as in the paper (section 6.2).

    Raises
    ------
    InputError
        There are fewer than 10 examples.
    """
    if n < _FEWEST_EXAMPLES:
        raise InputError(
            f"{n} examples cannot be split into training, calibration and test. Expected "
            f"{_FEWEST_EXAMPLES} or more."
        )
    order, tenth = np.random.default_rng(seed).permutation(n), n // 10
    return ExampleSplit(order[2 * tenth :], order[tenth : 2 * tenth], order[:tenth])


@checked
def active_clusters(trace: Trace, clusters: Clusters) -> list[csr_array]:
    """Which clusters the dominant sub-updates of each example are of, layer by layer (section 6.2).

    For each layer a matrix ``[n, n_clusters]``, 1 where a dominant sub-update of the example is of the
    cluster.

    Parameters
    ----------
    trace, clusters
        A trace, and clusters of the value vectors of the model that was traced.

    Raises
    ------
    InputError
        The clusters are of another model.
    """
    clusters.provenance.require_same(trace.provenance, ours="the clusters", theirs="the trace")
    rows, shape = np.repeat(np.arange(len(trace)), trace.k), (len(trace), len(clusters))
    ones = np.ones(len(rows), dtype=np.float32)
    of_layer = clusters.labels.reshape(trace.n_layers, -1)
    columns = [
        labels[index.flatten().numpy()]
        for labels, index in zip(of_layer, trace.index["dominant"].unbind(1), strict=True)
    ]
    # A set: several sub-updates of one cluster, which add up here, count once.
    return [csr_array((ones, (rows, clusters_of_layer)), shape=shape).sign() for clusters_of_layer in columns]


@checked
class OverlapRule:
    """The rule that leaves where active clusters look like those of saturation events (section 6.2).

    At each layer the clusters of an example are compared with the sets of the training examples whose
    prediction was made there, and with the sets of the others. The signal is that both the mean and the
    maximal size of the intersection with the first exceed those with the second.

    Parameters
    ----------
    others
        ``together``: all other training examples are one group. ``by-layer``: they are grouped by the layer
        that their prediction was made at, and every group has to be exceeded (the paper's footnote 7).
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
            The active clusters of all examples, see `active_clusters`.
        made_at
            The layer that each example's prediction was made at; -1 where none counts.
        rows
            Rows of the training examples.
        """
        if not len(active):
            raise InputError("There are no layers to learn from. Expected what active_clusters gives.")
        self.sets_, self.made_at_ = [sets[rows] for sets in active], made_at[rows]
        return self

    def signals(
        self, active: Sequence[csr_array], rows: Int[np.ndarray, " m"]
    ) -> Bool[np.ndarray, "m n_layers"]:
        """Whether each layer says that the prediction of an example is made.

        A layer at which no prediction of the training examples was made never says so; one at which all
        were always does.

        Parameters
        ----------
        active
            The active clusters of all examples, see `active_clusters`.
        rows
            Rows of the examples that are asked about.
        """
        signals = np.zeros((len(rows), len(active)), dtype=bool)
        for layer, sets in enumerate(active):
            inside = self.made_at_ == layer
            if inside.any():
                sizes = (sets[rows] @ self.sets_[layer].T).toarray()
                signals[:, layer] = np.all(
                    [_exceeds(sizes, inside, group) for group in self._groups(inside)], 0
                )
        return signals

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
    with_inside, with_outside = sizes[:, inside], sizes[:, outside]
    larger_mean = with_inside.mean(1, dtype=np.float64) > with_outside.mean(1, dtype=np.float64)
    return larger_mean & (with_inside.max(1) > with_outside.max(1))


def first_exit(signals: Bool[np.ndarray, "n n_layers"]) -> Int[np.ndarray, " n"]:
    """The first layer of each example with a signal; the last layer where there is no signal."""
    return np.where(signals.any(1), signals.argmax(1), signals.shape[1] - 1)


class JudgedExits(NamedTuple):
    """How well one way of leaving early does (section 6.2).

    Attributes
    ----------
    accuracy
        Share of examples for which the layer that they leave at gives the model's prediction.
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
    """Judge the layers that examples leave at.

    Parameters
    ----------
    leaves
        The layer that each example leaves at.
    right
        Which layers of each example predict what the last one does.
    """
    n, n_layers = right.shape
    hits, saved = right[np.arange(n), leaves], n_layers - 1 - leaves
    return JudgedExits(
        accuracy=float(hits.mean()),
        saved=float(saved[hits].mean()) if hits.any() else float("nan"),
        left=float((saved > 0).mean()),
        chance=float(right.mean(0)[leaves].mean()),
    )


@checked
def summarize_exits(judged: Mapping[str, Sequence[JudgedExits]], n_layers: int) -> pd.DataFrame:
    """Accuracy and layers saved of each method over the seeds (Table 6), one row each.

    Columns are ``method, accuracy, accuracy_sd, saved, saved_sd, saved_share, left, chance, seeds``; ``sd``
    is the standard deviation over the seeds, NaN for one; ``saved_share`` is that of all layers. A seed
    without a right example has no layers saved and does not count for these.

    Parameters
    ----------
    judged
        By method, what `judge_exits` gives for each seed, such as `ExitComparison.judged`.
    n_layers
        How many layers the model has.
    """
    require_whole(n_layers, "n_layers", least=1)
    empty = [method for method, of_seeds in judged.items() if not len(of_seeds)]
    if not judged or empty:
        raise InputError(f"{empty[0] if empty else 'Nothing'} was judged on no seed. Expected one or more.")
    rows = []
    for method, of_seeds in judged.items():
        numbers = pd.DataFrame(of_seeds)
        mean, sd = numbers.mean(), numbers.std()
        rows.append(
            {
                "method": method,
                "accuracy": mean["accuracy"],
                "accuracy_sd": sd["accuracy"],
                "saved": mean["saved"],
                "saved_sd": sd["saved"],
                "saved_share": mean["saved"] / n_layers,
                "left": mean["left"],
                "chance": mean["chance"],
                "seeds": len(of_seeds),
            }
        )
    return pd.DataFrame(rows)
