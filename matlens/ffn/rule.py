"""Early exit by dominant sub-updates, without training (paper B, section 6.2, A.5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.sparse import csr_array

from matlens.errors import InputError, checked
from matlens.ffn.clusters import Clusters
from matlens.ffn.trace import Trace

Others = Literal["later", "by-layer", "together"]
Overlap = Literal["sets", "places"]
OTHERS: tuple[Others, ...] = ("later", "by-layer", "together")
OVERLAPS: tuple[Overlap, ...] = ("sets", "places")


@checked
def active_clusters(trace: Trace, clusters: Clusters) -> Int[np.ndarray, "n n_layers k"]:
    """Clusters of the dominant sub-updates of each example, layer by layer (paper B, section 6.2).

    In the order of the sizes of coefficients, the largest first, as in the authors' notebook.
    """
    clusters.provenance.check_same(trace.provenance, ours="the clusters", theirs="the trace")
    order = trace.coefficient["dominant"].abs().argsort(dim=-1, descending=True, stable=True)
    index = trace.index["dominant"].gather(-1, order).numpy()
    of_layer = clusters.labels.reshape(trace.n_layers, -1)
    return of_layer[np.arange(trace.n_layers)[:, None], index]


@checked
class ExitRule:
    """Exit where active clusters match those of predictions made at a layer (paper B, section 6.2).

    At each layer the clusters of an example are compared with those of the training examples whose
    prediction was made there, and with those of others. The signal is that both the mean and the maximal
    overlap with the first exceed those with the second.

    Parameters
    ----------
    others
        ``later``: training examples whose prediction was made at a later layer, grouped by that layer; every
        group has to be exceeded (the paper's footnote 7, and the authors' notebook). ``by-layer``: earlier
        layers too, and examples whose prediction counts nowhere. ``together``: all others are one group.
    overlap
        ``sets``: the number of common clusters, each counted once (the paper's text). ``places``: the number
        of ranks with the same cluster (the authors' notebook).
    """

    def __init__(self, *, others: Others = "later", overlap: Overlap = "sets") -> None:
        self.others, self.overlap = others, overlap

    def fit(
        self, active: Int[np.ndarray, "n n_layers k"], made_at: Int[np.ndarray, " n"],
        rows: Int[np.ndarray, " m"],
    ) -> ExitRule:  # fmt: skip
        """Store the `active_clusters` of training ``rows``.

        ``made_at`` is the layer at which each example's prediction is made; -1 if none counts.
        """
        if len(active) != len(made_at):
            raise InputError(f"made_at must be one for each of {len(active)} examples, got {len(made_at)}.")
        self.active_, self.made_at_ = active[rows], made_at[rows]
        return self

    def signals(
        self, active: Int[np.ndarray, "n n_layers k"], rows: Int[np.ndarray, " m"]
    ) -> Bool[np.ndarray, "m n_layers"]:
        """Whether the rule exits, for each row and layer.

        Layers without training predictions never exit; layers without competitors always do.
        """
        if active.shape[1:] != self.active_.shape[1:]:
            raise InputError(
                f"active must have the layers and clusters of the fit, {self.active_.shape[1:]}, got "
                f"{active.shape[1:]}."
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
            first = layer + 1 if self.others == "later" else -1
            made_elsewhere = np.unique(self.made_at_[self.made_at_ != layer])
            yield from (self.made_at_ == other for other in made_elsewhere if other >= first)


def overlap_sizes(
    clusters: Int[np.ndarray, "m k"], known: Int[np.ndarray, "n k"], overlap: Overlap
) -> Float[np.ndarray, "m n"]:
    """The overlap of each of ``m`` rows of clusters with each of ``n``, see `ExitRule`."""
    if overlap == "places":
        sizes = np.zeros((len(clusters), len(known)), dtype=np.float32)
        for place, of_known in zip(clusters.T, known.T, strict=True):
            sizes += place[:, None] == of_known
        return sizes
    n_clusters = int(max(clusters.max(initial=0), known.max(initial=0))) + 1
    return (_indicators(clusters, n_clusters) @ _indicators(known, n_clusters).T).toarray()


def _indicators(clusters: Int[np.ndarray, "n k"], n_clusters: int) -> csr_array:
    ones = np.ones(clusters.size, dtype=np.float32)
    rows = np.repeat(np.arange(len(clusters)), clusters.shape[1])
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
