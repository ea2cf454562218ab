"""Clusters of value vectors that point the same way (section 5.2).

Value vectors are clustered by agglomeration on their cosine distances. While the matrix of all distances
fits a limit of memory that is exact: average linkage on the whole matrix. Past it two clusters are merged
only where one holds a near neighbour of the other, and the merge is the one that moves the unit vectors'
cosine distances to their cluster's mean least (Ward); average linkage over the few distances that such a
graph has would chain thousands of vectors together.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy.cluster.hierarchy import linkage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.cluster import AgglomerativeClustering
from sklearn.neighbors import kneighbors_graph
from torch import Tensor

from matlens.artifacts import Workplace, read_config, write_bytes
from matlens.errors import InputError
from matlens.ffn.projection import Projection
from matlens.ffn.values import Name, Values
from matlens.ffn.words import token_texts
from matlens.tokens import shown

HOLDS, CLUSTERS, MEMORY = "clusters", 10_000, 4.0
EXACT, NEIGHBOURS = "exact", "neighbours"
_BLOCK = 512  # rows whose distances are made at once
_NEAR = 10  # neighbours of each vector in the graph
_COPIES = 2  # of the distances, in float64, that scipy holds


class Clusters:
    """Which cluster each value vector of a model belongs to.

    Attributes
    ----------
    labels
        ``[n_layers * d_mlp]``, from 0, layer after layer as in `Values.at`. Clusters are numbered by their
        size, the largest first, and those of one size by their first vector.
    method
        ``exact`` or ``neighbours``.
    provenance
        The model and what was asked for.
    """

    def __init__(self, labels: Int[np.ndarray, " n"], provenance: dict[str, Any]) -> None:
        self.labels, self.provenance = labels, provenance
        self.method = str(provenance["method"])

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def sizes(self) -> Int[np.ndarray, " n_clusters"]:
        """How many value vectors each cluster has."""
        return np.bincount(self.labels)

    @classmethod
    def of(
        cls,
        values: Values,
        n_clusters: int = CLUSTERS,
        *,
        memory: float = MEMORY,
        folder: str | Path | None = None,
    ) -> Clusters:
        """Cluster all value vectors of a model.

        Parameters
        ----------
        values
            Of the model.
        n_clusters
            The paper has 10,000 of 36,864 vectors of GPT-2.
        memory
            Most GiB that distances may take. GPT-2's exact clusters take 11, past the default.
        folder
            Where the answer is kept, and read from if it is there.

        Raises
        ------
        InputError
            More clusters than vectors, a vector without a direction, or a folder of another job.
        """
        n = len(values)
        if not 1 <= n_clusters <= n:
            raise InputError(
                f"{n_clusters:,} clusters of {n:,} value vectors: expected 1 to {n:,}, the vectors there are."
            )
        needed = _COPIES * 8 * (n * (n - 1) // 2) / 2**30
        method = EXACT if needed <= memory else NEIGHBOURS
        request = {
            "holds": HOLDS, "model": {"name": values.model_name, "fingerprint": values.fingerprint},
            "n_clusters": n_clusters, "method": method,
        }  # fmt: skip
        if folder is None:
            return cls(_cluster(values, n_clusters, method), request)
        place = Workplace(folder, request)
        with place.working():
            if not place.finished:
                buffer = io.BytesIO()
                np.save(buffer, _cluster(values, n_clusters, method))
                write_bytes(place.folder / "labels.npy", buffer.getbuffer())
                place.finish()
        return cls.load(folder)

    @classmethod
    def load(cls, folder: str | Path) -> Clusters:
        """Open what `of` has kept.

        Raises
        ------
        InputError
            The folder holds no clusters.
        """
        config = read_config(folder, HOLDS)
        try:
            return cls(np.load(Path(folder) / "labels.npy"), config["request"])
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"The clusters in {folder} are damaged: {error}. Remove that folder.") from error

    def members(self, cluster: int) -> Int[np.ndarray, " m"]:
        """Rows of a cluster's value vectors.

        Raises
        ------
        InputError
            There is no such cluster.
        """
        if not 0 <= cluster < len(self):
            raise InputError(f"There is no cluster {cluster}: expected 0 to {len(self) - 1}.")
        return np.flatnonzero(self.labels == cluster)

    def holding(self, values: Values, names: Iterable[Name]) -> list[int]:
        """The clusters of value vectors, each once."""
        found = [values.resolve(name) for name in names]
        rows = [value.layer * values.d_mlp + value.index for value in found]
        return list(dict.fromkeys(int(label) for label in self.labels[rows]))

    def direction(self, values: Values, cluster: int) -> Float[Tensor, " d_model"]:
        """Mean of the cluster's unit vectors, which is what its vectors have in common."""
        vectors = values.vectors([values.at(int(row)) for row in self.members(cluster)])
        return (vectors / vectors.norm(dim=1, keepdim=True)).mean(0)


def cluster_table(
    values: Values, projection: Projection, clusters: Clusters, chosen: Sequence[int], *, n_tokens: int = 10
) -> pd.DataFrame:
    """What clusters are made of and promote, one row each.

    Columns are ``cluster, size, layers, first_layer, last_layer, cohesion, members, tokens``: how many
    layers its vectors are from, the first and the last of these, the length of the mean of its unit vectors
    (1 where all point the same way), the vectors' names, and the top tokens of that mean, as people see
    them.
    """
    rows = []
    for cluster in chosen:
        members = [values.at(int(row)) for row in clusters.members(cluster)]
        direction = clusters.direction(values, cluster)
        layers = sorted({value.layer for value in members})
        ids = projection.top(direction[None], n_tokens).ids[0]
        texts = ", ".join(map(shown, token_texts(projection.tokenizer, ids.tolist())))
        names = " ".join(map(str, members))
        told = (len(members), len(layers), layers[0], layers[-1], float(direction.norm()), names, texts)
        rows.append((cluster, *told))
    columns = ["cluster", "size", "layers", "first_layer", "last_layer", "cohesion", "members", "tokens"]
    return pd.DataFrame(rows, columns=columns)


def _cluster(values: Values, n_clusters: int, method: str) -> Int[np.ndarray, " n"]:
    vectors = torch.cat([values.layer(layer).cpu() for layer in range(values.n_layers)])
    lengths = vectors.norm(dim=1, keepdim=True)
    if not bool((lengths > 0).all()):
        row = int((lengths[:, 0] == 0).nonzero()[0])
        raise InputError(f"The value vector {values.at(row)} is zero, and has no direction to cluster by.")
    unit = (vectors / lengths).numpy()
    if n_clusters == len(unit):
        return np.arange(len(unit))
    if method == EXACT:
        return _by_size(_cut(linkage(_distances(unit), "average"), n_clusters))
    graph = kneighbors_graph(unit, min(_NEAR, len(unit) - 1), mode="connectivity", include_self=False)
    both = graph.maximum(graph.T)
    found = AgglomerativeClustering(n_clusters=n_clusters, linkage="ward", connectivity=both)
    return _by_size(found.fit_predict(unit))


def _distances(unit: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " pairs"]:
    """Cosine distances of all pairs, as scipy wants them: row by row above the diagonal, in float64."""
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
