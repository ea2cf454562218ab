"""Agglomerative clustering of vectors by their cosine distances: in memory, on the disk, or by neighbours.

Exactly, two clusters lie as far apart as their vectors do on average, or as the two furthest of them do
(complete linkage); again and again the two nearest are merged. In memory that is scipy's. Where the distances
of all pairs have no room there, `merges_on_disk` keeps them in a file, a row for each vector, and follows
chains of nearest neighbours (Murtagh 1985; Müllner 2011), which need one row at a time. A merge writes only
the row of the cluster that it makes; every other row is brought up to date when it is read, as what a row
says of the parts of a cluster is all that its distance to the whole needs.

Where there is no room on the disk either, two clusters are merged only where one holds a near neighbour of
the other, and of these merges the one that adds least to the squared distances of the vectors from their
cluster's mean (Ward), which of unit vectors are cosine distances. Average linkage over the few distances
that a graph of neighbours has would chain thousands of vectors together.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.cluster import AgglomerativeClustering
from sklearn.neighbors import kneighbors_graph

from matlens.errors import InputError
from matlens.parallel import Bar

Linkage = Literal["average", "complete"]
EXACT, NEIGHBOURS = "exact", "neighbours"
_NEAR = 10  # neighbours of each vector in the graph
_BLOCK = 256  # rows whose distances are made at once
_COPIES = 2  # of the distances in memory, in float64: scipy works on one of its own
_GIB = 2**30


def gib_in_memory(n: int) -> float:
    """GiB that the distances of ``n`` vectors take while they are clustered in memory."""
    return _COPIES * 8 * (n * (n - 1) // 2) / _GIB


def gib_on_disk(n: int) -> float:
    """GiB that the distances of ``n`` vectors take while they are clustered on the disk."""
    return np.dtype(np.float32).itemsize * n * n / _GIB


def method_within(n: int, memory: float, disk: float = 0.0) -> str:
    """``exact`` if the distances of ``n`` vectors have room in so many GiB, else ``neighbours``."""
    return EXACT if gib_in_memory(n) <= memory or gib_on_disk(n) <= disk else NEIGHBOURS


def agglomerate(
    unit: Float[np.ndarray, "n d"], n_clusters: int, method: str, linkage: Linkage = "average",
    memory: float = math.inf, folder: Path | None = None, progress: bool = False,
) -> Int[np.ndarray, " n"]:  # fmt: skip
    """The cluster of each unit vector in float64, numbered by size, then by their first vector.

    ``method`` is ``exact`` or ``neighbours``. Exact clusters keep their distances in memory if that takes at
    most ``memory`` GiB, else in a file in ``folder``, by default where temporary files are.
    """
    if n_clusters == len(unit):
        return np.arange(len(unit))
    if method == NEIGHBOURS:
        return by_size(_of_neighbours(unit.astype(np.float32), n_clusters))
    if gib_in_memory(len(unit)) <= memory:
        return cut(merges_in_memory(unit, linkage), n_clusters)
    return cut(merges_on_disk(unit, linkage, folder, progress=progress), n_clusters)


def merges_in_memory(unit: Float[np.ndarray, "n d"], linkage: Linkage) -> Int[np.ndarray, "n_minus_1 2"]:
    """The merges of unit vectors in float64, nearest clusters first, each named by one of its vectors."""
    n = len(unit)
    children = scipy_linkage(_condensed_distances(unit), linkage)[:, :2].astype(int)
    vector_of = np.concatenate([np.arange(n), np.empty(n - 1, dtype=int)])
    for merge, (first, _) in enumerate(children, start=n):
        vector_of[merge] = vector_of[first]
    return vector_of[children]


def merges_on_disk(
    unit: Float[np.ndarray, "n d"], linkage: Linkage, folder: Path | None = None, *, progress: bool = True
) -> Int[np.ndarray, "n_minus_1 2"]:
    """The merges as by `merges_in_memory`, with the distances in a temporary file of `gib_on_disk`.

    Memory holds the vectors in float32 and a few rows of distances, which are in float32 too: of two merges
    that are equally near to seven digits, either may come first.
    """
    place = Path(tempfile.gettempdir()) if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free / _GIB
    if free < gib_on_disk(len(unit)):
        raise InputError(
            f"The distances of {len(unit):,} vectors take {gib_on_disk(len(unit)):.1f} GiB, and "
            f"{free:.1f} GiB are free in {place}. Expected a folder on a disk with more room."
        )
    with tempfile.TemporaryFile(dir=place) as file:
        if hasattr(os, "posix_fallocate"):  # a map on a disk that fills up later would kill the process
            os.posix_fallocate(file.fileno(), 0, np.dtype(np.float32).itemsize * len(unit) ** 2)
        rows = np.memmap(file, np.float32, "w+", shape=(len(unit), len(unit)))
        return _follow_chains(_Rows(rows, unit.astype(np.float32), linkage, progress), progress)


def cut(merges: Int[np.ndarray, "n_minus_1 2"], n_clusters: int) -> Int[np.ndarray, " n"]:
    """Labels after as many merges as leave exactly so many clusters; the largest cluster is 0.

    Clusters of one size are numbered by their first vector.
    """
    n = len(merges) + 1
    edges = merges[: n - n_clusters]
    graph = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(n, n))
    return by_size(connected_components(graph, directed=False)[1])


def by_size(labels: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The same clusters numbered by size, the largest first, and those of one size by their first vector."""
    _, first, label, size = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    number = np.empty_like(first)
    number[np.lexsort((first, -size))] = np.arange(len(first))
    return number[label]


def _condensed_distances(unit: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " pairs"]:
    """Cosine distances of all pairs, as scipy wants them: row by row above the diagonal."""
    n = len(unit)
    distances, start = np.empty(n * (n - 1) // 2), 0
    for first, block in _blocks_of_distances(unit):
        for row, to_all in enumerate(block, start=first):
            distances[start : start + n - 1 - row] = to_all[row + 1 :]
            start += n - 1 - row
    return distances


def _blocks_of_distances(
    unit: Float[np.ndarray, "n d"], *, progress: bool = False
) -> Iterator[tuple[int, Float[np.ndarray, "rows n"]]]:
    """Cosine distances of some rows to all, with the number of the first of these rows."""
    for first in Bar(range(0, len(unit), _BLOCK), desc="distances", leave=False, disable=not progress):
        yield first, 1 - unit[first : first + _BLOCK] @ unit.T


def _of_neighbours(unit: Float[np.ndarray, "n d"], n_clusters: int) -> Int[np.ndarray, " n"]:
    graph = kneighbors_graph(unit, min(_NEAR, len(unit) - 1), mode="connectivity", include_self=False)
    ward = AgglomerativeClustering(n_clusters=n_clusters, linkage="ward", connectivity=graph)
    with warnings.catch_warnings():
        # Where the graph falls into parts, scikit-learn joins them at their nearest vectors, which is right
        # for bundles without neighbours outside; its warning would tell users nothing that they can act on.
        warnings.filterwarnings("ignore", "the number of connected components", UserWarning)
        return ward.fit_predict(unit)


class _Rows:
    """Distances from each cluster to all others, a row each in a file; a cluster is called by a vector of it.

    For complete linkage a row holds the largest distance to the vectors of a cluster, for average linkage the
    sum of the distances between the vectors of both. Either of a whole cluster is that of its parts, taken
    together, so a row that was written before a merge still says all there is to know.
    """

    def __init__(
        self, rows: np.ndarray, unit: Float[np.ndarray, "n d"], linkage: Linkage, progress: bool
    ) -> None:
        self.n, self._rows, self._complete = len(unit), rows, linkage == "complete"
        self._nothing = -np.inf if self._complete else 0.0  # what a row says of itself and of what is merged
        self._cluster_of = np.arange(self.n)
        self._sizes = np.ones(self.n, dtype=np.int64)
        for first, block in _blocks_of_distances(unit, progress=progress):
            block[np.arange(len(block)), first + np.arange(len(block))] = self._nothing
            rows[first : first + len(block)] = block

    def first(self) -> int:
        """A cluster that is not part of another."""
        return int((self._sizes > 0).argmax())

    def distances(self, cluster: int) -> Float[np.ndarray, " n"]:
        """From a cluster to all others; infinite to itself and to what has become part of another."""
        row = self._read(cluster)
        others = self._sizes > 0
        others[cluster] = False
        distances = np.full(self.n, np.inf)
        sizes = 1 if self._complete else self._sizes[others] * self._sizes[cluster]
        distances[others] = row[others] / sizes
        return distances

    def merge(self, kept: int, gone: int) -> None:
        """Make one cluster of two."""
        rows = self._read(kept), self._read(gone)
        row = np.maximum(*rows) if self._complete else np.add(*rows)
        row[[kept, gone]] = self._nothing
        self._cluster_of[self._cluster_of == gone] = kept
        self._sizes[kept] += self._sizes[gone]
        self._sizes[gone] = 0
        self._rows[kept] = row

    def _read(self, cluster: int) -> Float[np.ndarray, " n"]:
        row = self._rows[cluster]
        if not self._complete:
            return np.bincount(self._cluster_of, row, minlength=self.n)
        latest = np.full(self.n, self._nothing, dtype=np.float32)
        np.maximum.at(latest, self._cluster_of, row)
        return latest


def _follow_chains(rows: _Rows, progress: bool) -> Int[np.ndarray, "n_minus_1 2"]:
    """All merges, the nearest first, found along chains of nearest neighbours.

    A chain goes on only where the next distance is truly smaller than the last. It comes back to one of its
    clusters only by rounding, where distances are equal, and then ends too. A merge is at least as far as
    those that it builds on, so it comes after them.
    """
    merges, heights = np.empty((rows.n - 1, 2), dtype=int), np.empty(rows.n - 1)
    height_of = np.zeros(rows.n)
    chain: list[int] = []
    links: list[float] = []  # how far each of the chain is from the one before
    for merge in Bar(range(rows.n - 1), desc="merging", leave=False, disable=not progress):
        if not chain:
            chain, links = [rows.first()], [np.inf]
        while True:
            distances = rows.distances(chain[-1])
            nearest = int(distances.argmin())
            if not distances[nearest] < links[-1] or nearest in chain:
                break
            chain.append(nearest)
            links.append(float(distances[nearest]))
        gone, kept = chain.pop(), chain.pop()
        height = max(links.pop(), height_of[kept], height_of[gone])
        links.pop()
        rows.merge(kept, gone)
        merges[merge], heights[merge], height_of[kept] = (kept, gone), height, height
    return merges[heights.argsort(kind="stable")]
