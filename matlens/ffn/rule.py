"""Self-supervised early exit: dominant sub-updates tell that a prediction is made (section 6.2, A.5).

Saturation events of training examples say at which layers one could have left. The rule needs no more
training than that: it compares the clusters of an example's dominant sub-updates with those that were
seen at saturation events of a layer, and with those that were seen there on the way to later events. What
exactly is compared can be read in more than one way, see `OverlapRule`, and `compare_readings` sets all
readings side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy.sparse import csr_array
from scipy.stats import norm

from matlens.errors import InputError, Seed, checked
from matlens.ffn.clusters import Clusters
from matlens.ffn.events import find_saturation
from matlens.ffn.outcomes import (
    FEWEST_EXAMPLES,
    JudgedExits,
    first_exit,
    judge_exits,
    share_of_left,
    split_examples,
)
from matlens.ffn.trace import Trace

Others = Literal["later", "by-layer", "together"]
Overlap = Literal["sets", "places"]
OTHERS: tuple[Others, ...] = ("later", "by-layer", "together")
OVERLAPS: tuple[Overlap, ...] = ("sets", "places")
BOTH, OF_FFNS = "FFN and attention", "FFN"
EXIT_CLUSTERS = 200
"""How many clusters the rule compares unless another number is given, as in the authors' notebook."""


@checked
def active_clusters(trace: Trace, clusters: Clusters) -> Int[np.ndarray, "n n_layers k"]:
    """The clusters of the dominant sub-updates of each example, layer by layer (section 6.2).

    The sub-update with the coefficient of largest size comes first, as in the authors' notebook.

    Parameters
    ----------
    trace, clusters
        A trace, and clusters of the value vectors of the model that was traced.

    Raises
    ------
    InputError
        The clusters are of another model.
    """
    clusters.provenance.check_same(trace.provenance, ours="the clusters", theirs="the trace")
    order = trace.coefficient["dominant"].abs().argsort(dim=-1, descending=True, stable=True)
    index = trace.index["dominant"].gather(-1, order).numpy()
    of_layer = clusters.labels.reshape(trace.n_layers, -1)
    return of_layer[np.arange(trace.n_layers)[:, None], index]


def check_fitted(rule: Any, attribute: str) -> None:
    """Refuse to ask what has not been fitted.

    Raises
    ------
    InputError
        It has not.
    """
    if not hasattr(rule, attribute):
        raise InputError(f"This {type(rule).__name__} is not fitted yet. Call its fit first.")


@checked
class OverlapRule:
    """The rule that leaves where active clusters look like those of saturation events (section 6.2).

    At each layer the clusters of an example are compared with those of the training examples whose
    prediction was made there, and with those of others. The signal is that both the mean and the maximal
    overlap with the first exceed those with the second.

    Parameters
    ----------
    others
        ``later``: the training examples whose prediction was made at a later layer, grouped by that layer;
        every group has to be exceeded (the paper's footnote 7, as the authors' notebook has it).
        ``by-layer``: the same with earlier layers too, and those whose prediction counts nowhere.
        ``together``: all other training examples are one group.
    overlap
        ``sets``: how many clusters two examples have in common, each counted once (the paper's text).
        ``places``: at how many places of the order of `active_clusters` they have the same cluster (the
        authors' notebook).
    """

    def __init__(self, *, others: Others = "later", overlap: Overlap = "sets") -> None:
        self.others, self.overlap = others, overlap

    def fit(
        self, active: Int[np.ndarray, "n n_layers k"], made_at: Int[np.ndarray, " n"],
        rows: Int[np.ndarray, " m"],
    ) -> OverlapRule:  # fmt: skip
        """Keep the clusters of the training examples.

        Parameters
        ----------
        active
            The active clusters of all examples, see `active_clusters`.
        made_at
            The layer that each example's prediction was made at; -1 where none counts.
        rows
            Rows of the training examples.
        """
        if not active.shape[1]:
            raise InputError("There are no layers to learn from. Expected what active_clusters gives.")
        self.active_, self.made_at_ = active[rows], made_at[rows]
        return self

    def signals(
        self, active: Int[np.ndarray, "n n_layers k"], rows: Int[np.ndarray, " m"]
    ) -> Bool[np.ndarray, "m n_layers"]:
        """Whether each layer says that the prediction of an example is made.

        A layer at which no prediction of the training examples was made never says so; one that has no
        others to exceed always does.

        Parameters
        ----------
        active
            The active clusters of all examples, see `active_clusters`.
        rows
            Rows of the examples that are asked about.

        Raises
        ------
        InputError
            Nothing has been fitted, or on other layers.
        """
        check_fitted(self, "active_")
        if active.shape[1:] != self.active_.shape[1:]:
            raise InputError(
                f"The active clusters have the shape {active.shape}, and those that were fitted on "
                f"{self.active_.shape}. Expected as many layers and clusters."
            )
        signals = np.zeros((len(rows), active.shape[1]), dtype=bool)
        for layer in range(active.shape[1]):
            inside = self.made_at_ == layer
            if inside.any():
                sizes = overlap_sizes(active[rows, layer], self.active_[:, layer], self.overlap)
                exceeded = [_exceeds(sizes, inside, group) for group in self._groups(layer)]
                signals[:, layer] = np.all(exceeded, 0)
        return signals

    def _groups(self, layer: int) -> Iterator[Bool[np.ndarray, " n"]]:
        if self.others == "together":
            yield self.made_at_ != layer
        else:
            least = layer + 1 if self.others == "later" else -1
            made_elsewhere = np.unique(self.made_at_[self.made_at_ != layer])
            yield from (self.made_at_ == other for other in made_elsewhere if other >= least)


def overlap_sizes(
    clusters: Int[np.ndarray, "m k"], known: Int[np.ndarray, "n k"], overlap: Overlap
) -> Float[np.ndarray, "m n"]:
    """How much each of ``m`` rows of clusters has in common with each of ``n``, see `OverlapRule`."""
    if overlap == "places":
        sizes = np.zeros((len(clusters), len(known)), dtype=np.float32)
        for place, of_known in zip(clusters.T, known.T, strict=True):
            sizes += place[:, None] == of_known
        return sizes
    n_clusters = int(max(clusters.max(initial=0), known.max(initial=0))) + 1
    return (_indicators(clusters, n_clusters) @ _indicators(known, n_clusters).T).toarray()


def _indicators(clusters: Int[np.ndarray, "n k"], n_clusters: int) -> csr_array:
    ones, rows = (
        np.ones(clusters.size, dtype=np.float32),
        np.repeat(np.arange(len(clusters)), clusters.shape[1]),
    )
    # A set: several sub-updates of one cluster, which add up here, count once.
    return csr_array((ones, (rows, clusters.ravel())), shape=(len(clusters), n_clusters)).sign()


def _exceeds(
    sizes: Float[np.ndarray, "m n"], inside: Bool[np.ndarray, " n"], outside: Bool[np.ndarray, " n"]
) -> Bool[np.ndarray, " m"]:
    if not outside.any():
        return np.ones(len(sizes), dtype=bool)
    with_inside, with_outside = sizes[:, inside], sizes[:, outside]
    larger_mean = with_inside.mean(1, dtype=np.float64) > with_outside.mean(1, dtype=np.float64)
    return larger_mean & (with_inside.max(1) > with_outside.max(1))


@checked
def compare_readings(trace: Trace, clusters: Sequence[Clusters], *, seed: Seed = 0) -> pd.DataFrame:
    """Judge the rule under every reading of section 6.2, each example once, and test it against chance.

    The examples are dealt into ten parts; each is tested with what the rule learns from the nine others, so
    that no example counts twice, as it does over random splits. One row for each reading; columns are
    ``clusters, overlap, others, events``, which say the reading; ``accuracy``; ``chance``, of the same layers
    dealt out within the parts; ``above``, the accuracy less chance; ``dealt_sd``, the standard deviation of
    the accuracy when the layers are dealt out; ``p``, two-sided, of a normal of that deviation; ``saved`` and
    ``saved_share``, over right examples; ``left``; ``left_right`` and ``left_chance``, see `summarize_exits`;
    and ``n``, the number of examples. ``p`` holds for one reading and for the exits as they are: the parts
    share what the rule learns from, and a table of many readings needs a correction for their number.

    Parameters
    ----------
    trace
        What FFNs do to the predictions of the examples.
    clusters
        Clusters of the model's value vectors, of one number or of several.
    seed
        Seed of the parts.

    Raises
    ------
    InputError
        There are fewer than 10 examples, no clusters, or those of another model.
    """
    if not len(clusters):
        raise InputError("There are no clusters to read the rule by. Expected at least one set of clusters.")
    split_examples(len(trace))
    saturation, right = find_saturation(trace), (trace.after == trace.final[:, None]).numpy()
    made_at = saturation.layer.numpy()
    events = {BOTH: made_at, OF_FFNS: np.where(saturation.by_ffn.numpy(), made_at, -1)}
    parts = np.array_split(np.random.default_rng(seed).permutation(len(trace)), FEWEST_EXAMPLES)
    rows = []
    for each in clusters:
        active = active_clusters(trace, each)
        for overlap, others, (counted, layers) in itertools.product(OVERLAPS, OTHERS, events.items()):
            rule, judged = OverlapRule(others=others, overlap=overlap), []
            for part in parts:
                training_rows = np.setdiff1d(np.arange(len(trace)), part)
                signals = rule.fit(active, layers, training_rows).signals(active, part)
                judged.append(judge_exits(first_exit(signals), right[part]))
            reading = {"clusters": len(each), "overlap": overlap, "others": others, "events": counted}
            rows.append(reading | _pooled(judged, np.array(list(map(len, parts))), trace.n_layers))
    return pd.DataFrame(rows)


def _pooled(
    judged: Sequence[JudgedExits], sizes: Int[np.ndarray, " parts"], n_layers: int
) -> dict[str, float]:
    """One judgement of the examples of all parts, in which layers are dealt out part by part."""
    numbers, weights = pd.DataFrame(judged), sizes / sizes.sum()
    accuracy, chance, left = (float(numbers[name] @ weights) for name in ("accuracy", "chance", "left"))
    dealt_sd = float(np.sqrt(np.square(numbers["chance_sd"] * weights).sum()))
    hits = numbers["accuracy"] * weights
    saved = float((numbers["saved"].fillna(0) * hits).sum() / hits.sum()) if hits.sum() else math.nan
    return {
        "accuracy": accuracy, "chance": chance, "above": accuracy - chance, "dealt_sd": dealt_sd,
        "p": float(2 * norm.sf(abs(accuracy - chance) / dealt_sd)) if dealt_sd else 1.0,
        "saved": saved, "saved_share": saved / n_layers, "left": left,
        "left_right": share_of_left(accuracy, left), "left_chance": share_of_left(chance, left),
        "n": int(sizes.sum()),
    }  # fmt: skip
