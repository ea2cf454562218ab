"""Agglomerative clustering by cosine distance, exact or by nearest neighbors.

Exact clustering needs the distances of all pairs. With nearest neighbors, clusters are merged only along
a graph of neighbors, by Ward's criterion (the smallest increase of squared distances to cluster means,
which are cosine distances for unit vectors). Average linkage on the few distances of such a graph would
chain thousands of vectors together.
"""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.cluster import AgglomerativeClustering
from sklearn.neighbors import kneighbors_graph

from matlens.errors import checked

Linkage = Literal["average", "complete"]
EXACT, NEIGHBORS = "exact", "neighbors"
_NEAR = 10  # neighbors of each vector in the graph
_BLOCK = 256  # rows whose distances are computed together
_COPIES = 2  # copies of the float64 distances in memory: scipy makes one


def gib_in_memory(n: int) -> float:
    """GiB that the distances of ``n`` vectors take while they are clustered exactly."""
    return _COPIES * 8 * (n * (n - 1) // 2) / 2**30


def method_within(n: int, memory: float) -> str:
    """``exact`` if the distances of ``n`` vectors fit into memory, else ``neighbors``."""
    return EXACT if gib_in_memory(n) <= memory else NEIGHBORS


@checked
def agglomerate(
    unit: Float[np.ndarray, "n d"], n_clusters: int, method: str, linkage: Linkage = "average"
) -> Int[np.ndarray, " n"]:
    """The cluster of each unit vector in float64, numbered by size, then by their first vector."""
    if n_clusters == len(unit):
        return np.arange(len(unit))
    labels = _of_neighbors(unit, n_clusters) if method == NEIGHBORS else _exact(unit, n_clusters, linkage)
    _, first, label, size = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    number = np.empty_like(first)
    number[np.lexsort((first, -size))] = np.arange(len(first))
    return number[label]


def _exact(unit: Float[np.ndarray, "n d"], n_clusters: int, linkage: Linkage) -> Int[np.ndarray, " n"]:
    n = len(unit)
    merged = scipy_linkage(_condensed_distances(unit), linkage)[: n - n_clusters, :2].astype(int)
    # Merge i makes node n + i. The first n - n_clusters merges leave exactly n_clusters parts, ties or not.
    made = np.repeat(np.arange(n, n + len(merged)), 2)
    graph = coo_array((np.ones(len(made)), (merged.ravel(), made)), shape=(2 * n, 2 * n))
    return connected_components(graph, directed=False)[1][:n]


def _condensed_distances(unit: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " pairs"]:
    """Cosine distances of all pairs, row by row above the diagonal; faster than scipy's pdist."""
    n = len(unit)
    distances, start = np.empty(n * (n - 1) // 2), 0
    for first in range(0, n, _BLOCK):
        for row, to_all in enumerate(1 - unit[first : first + _BLOCK] @ unit.T, start=first):
            distances[start : start + n - 1 - row] = to_all[row + 1 :]
            start += n - 1 - row
    return distances


def _of_neighbors(unit: Float[np.ndarray, "n d"], n_clusters: int) -> Int[np.ndarray, " n"]:
    unit = unit.astype(np.float32)
    graph = kneighbors_graph(unit, min(_NEAR, len(unit) - 1), mode="connectivity", include_self=False)
    ward = AgglomerativeClustering(n_clusters=n_clusters, linkage="ward", connectivity=graph)
    with warnings.catch_warnings():
        # scikit-learn joins several components of the graph at their nearest vectors, as it should.
        warnings.filterwarnings("ignore", "the number of connected components", UserWarning)
        return ward.fit_predict(unit)
