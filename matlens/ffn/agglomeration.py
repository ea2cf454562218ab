"""Agglomerative clustering of unit vectors by their cosine distances, at two costs in memory.

``exact`` is average linkage over all pairs. ``neighbours`` merges two clusters only where one holds a near
neighbour of the other, and of these merges the one that adds least to the squared distances of the vectors
from their cluster's mean (Ward), which of unit vectors are cosine distances. Average linkage over the few
distances that a graph of neighbours has would chain thousands of vectors together.
"""

from __future__ import annotations

import warnings

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.hierarchy import linkage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.cluster import AgglomerativeClustering
from sklearn.neighbors import kneighbors_graph

EXACT, NEIGHBOURS = "exact", "neighbours"
NEAR = 10  # neighbours of each vector in the graph
_BLOCK = 256  # rows whose distances are made at once
_COPIES = 2  # of the distances, in float64: scipy works on one of its own


def distances_gib(n: int) -> float:
    """GiB that the distances of ``n`` vectors take while they are clustered exactly."""
    return _COPIES * 8 * (n * (n - 1) // 2) / 2**30


def method_within(n: int, memory: float) -> str:
    """``exact`` if the distances of ``n`` vectors take no more than ``memory`` GiB, else ``neighbours``."""
    return EXACT if distances_gib(n) <= memory else NEIGHBOURS


def agglomerate(unit: Float[np.ndarray, "n d"], n_clusters: int, method: str) -> Int[np.ndarray, " n"]:
    """Which cluster each vector is in, clusters numbered by size and those of one size by their first vector.

    Parameters
    ----------
    unit
        Vectors of length 1, in float64.
    n_clusters
        From 1 to as many as there are vectors.
    method
        ``exact`` or ``neighbours``.
    """
    if n_clusters == len(unit):
        return np.arange(len(unit))
    if method == EXACT:
        return _by_size(_cut(linkage(_distances(unit), "average"), n_clusters))
    return _by_size(_of_neighbours(unit.astype(np.float32), n_clusters))


def _of_neighbours(unit: Float[np.ndarray, "n d"], n_clusters: int) -> Int[np.ndarray, " n"]:
    graph = kneighbors_graph(unit, min(NEAR, len(unit) - 1), mode="connectivity", include_self=False)
    ward = AgglomerativeClustering(n_clusters=n_clusters, linkage="ward", connectivity=graph)
    with warnings.catch_warnings():
        # Where the graph falls into parts, scikit-learn joins them at their nearest vectors, which is what
        # one wants of bundles that have no neighbours outside; who reads of it could do nothing about it.
        warnings.filterwarnings("ignore", "the number of connected components", UserWarning)
        return ward.fit_predict(unit)


def _distances(unit: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " pairs"]:
    """Cosine distances of all pairs, as scipy wants them: row by row above the diagonal."""
    n = len(unit)
    distances, start = np.empty(n * (n - 1) // 2), 0
    for first in range(0, n, _BLOCK):
        block = 1 - unit[first : first + _BLOCK] @ unit.T
        for row, own in enumerate(block, start=first):
            distances[start : start + n - 1 - row] = own[row + 1 :]
            start += n - 1 - row
    return distances


def _cut(merges: Float[np.ndarray, "n_minus_1 4"], n_clusters: int) -> Int[np.ndarray, " n"]:
    """Clusters that are left when exactly so many are."""
    n = len(merges) + 1
    done = merges[: n - n_clusters, :2].astype(int)
    made = np.repeat(np.arange(n, n + len(done)), 2)
    edges = coo_array((np.ones(done.size), (done.ravel(), made)), shape=(2 * n, 2 * n))
    return connected_components(edges, directed=False)[1][:n]


def _by_size(labels: np.ndarray) -> Int[np.ndarray, " n"]:
    _, first, own, size = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    number = np.empty_like(first)
    number[np.lexsort((first, -size))] = np.arange(len(first))
    return number[own]
