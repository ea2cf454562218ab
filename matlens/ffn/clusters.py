"""Clusters of value vectors that point the same way (paper B, section 5.2)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from matlens import parallel
from matlens.errors import InputError, NonNegative, check_int, checked
from matlens.ffn.agglomeration import EXACT, NEIGHBORS, Linkage, agglomerate, gib_in_memory, method_within
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueName, ValueVectors
from matlens.io.artifact import Artifact, make_config
from matlens.io.files import damaged
from matlens.models.identity import Provenance
from matlens.models.tokens import token_texts, visible
from matlens.parallel import waiting

CLUSTERS, _LABELS = "clusters", "labels"
WARD = "ward"  # linkage of clusters by nearest neighbors


@checked
class Clusters:
    """Clusters of the value vectors of a model (paper B, section 5.2).

    Attributes
    ----------
    labels
        ``[n_layers * d_mlp]``, from 0, layer after layer as in `ValueVectors.at`. Clusters are numbered by
        their size, the largest first, and those of one size by their first vector.
    method, linkage
        ``exact`` by ``average`` or ``complete`` linkage, or ``neighbors`` by ``ward``.
    sizes
        ``[n_clusters]``, number of value vectors in each cluster.
    provenance
        Where the clusters come from: the model, their number and the method.
    """

    def __init__(self, labels: Int[np.ndarray, " n"], provenance: Provenance) -> None:
        self.labels, self.provenance = labels, provenance
        self.method, self.linkage = str(provenance.details["method"]), str(provenance.details["linkage"])
        self.sizes = np.bincount(labels)

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def _members(self) -> list[np.ndarray]:
        return np.split(np.argsort(self.labels, kind="stable"), np.cumsum(self.sizes)[:-1])

    @classmethod
    def fit(
        cls,
        values: ValueVectors,
        n_clusters: int = 10_000,
        *,
        linkage: Linkage = "average",
        memory: NonNegative = 4.0,
        folder: str | Path | None = None,
        progress: bool = True,
    ) -> Clusters:
        """Cluster all value vectors of a model; prints the method to standard error.

        Parameters
        ----------
        n_clusters
            The paper makes 10,000 clusters of the 36,864 vectors of GPT-2.
        linkage
            The distance of two clusters: that of their vectors on ``average``, or of the two furthest of them
            (``complete``), which the paper's authors use. Clusters by near neighbors have none.
        memory
            Maximum GiB for the distances of exact clusters, ``8 n (n - 1)`` bytes: 10.1 for GPT-2, 15.8 for
            SmolLM2-135M. Where they need more, value vectors are clustered by near neighbors.
        folder
            Where the clusters are stored, and read from if they exist.
        """
        n = len(values)
        check_int(n_clusters, "n_clusters", min=1, max=n)
        method = method_within(n, memory)
        needed = f"exact clusters of {n:,} value vectors need {gib_in_memory(n):.1f} GiB of memory"
        if (method, linkage) == (NEIGHBORS, "complete"):
            raise InputError(f"Complete linkage: {needed}, and memory is {memory:g}. Raise it.")
        made = {"method": method, "linkage": linkage if method == EXACT else WARD}
        provenance = Provenance(values.identity, details={"n_clusters": n_clusters, **made})
        request = {"provenance": provenance.to_json()}

        def cluster() -> np.ndarray:
            if progress:
                how = f"exactly, by {linkage} linkage" if method == EXACT else "by near neighbors"
                tqdm.write(f"Clustering {how}: {needed}, and memory is {memory:g}.", file=sys.stderr)
            with waiting("clustering", progress=progress):
                return agglomerate(unit_vectors(values), n_clusters, method, linkage)

        if folder is None:
            return cls(cluster(), Provenance.from_config(make_config(CLUSTERS, request)))
        with Artifact.writing(folder, CLUSTERS, request) as artifact:
            if not artifact.finished:
                if parallel.is_main():
                    with parallel.alone():
                        artifact.write(_LABELS, {_LABELS: torch.from_numpy(cluster())})
                artifact.finish()
        return cls._from_artifact(artifact)

    @classmethod
    def load(cls, folder: str | Path) -> Clusters:
        """Open clusters that `fit` has stored in a folder."""
        return cls._from_artifact(Artifact.open(folder, CLUSTERS))

    @classmethod
    def _from_artifact(cls, artifact: Artifact) -> Clusters:
        provenance = Provenance.from_config(artifact.config)
        labels = artifact.read(_LABELS, _LABELS).numpy()
        if not np.array_equal(np.unique(labels), np.arange(provenance.details["n_clusters"])):
            raise damaged(artifact.folder / _LABELS, "does not number the clusters from 0")
        return cls(labels, provenance)

    def members(self, cluster: int) -> Int[np.ndarray, " m"]:
        """Rows of a cluster's value vectors, in their order."""
        return self._members[check_int(cluster, "cluster", min=0, max=len(self) - 1)]

    def containing(self, values: ValueVectors, names: Iterable[ValueName]) -> list[int]:
        """The clusters of value vectors, each once, in the order of the names."""
        self.provenance.check_same(values.identity, ours="the clusters")
        vectors = [values.resolve(name) for name in names]
        rows = [vector.layer * values.d_mlp + values.column(vector) for vector in vectors]
        return list(dict.fromkeys(int(label) for label in self.labels[rows]))

    def directions(self, values: ValueVectors, indices: Iterable[int]) -> Float[Tensor, "m d_model"]:
        """Mean of the unit vectors of each cluster."""
        self.provenance.check_same(values.identity, ours="the clusters")
        means = [torch.empty(0, values.d_model, dtype=torch.float32)]
        for cluster in indices:
            vectors = values.vectors(map(values.at, self.members(cluster).tolist())).cpu().double()
            means.append((vectors / vectors.norm(dim=1, keepdim=True)).mean(0, keepdim=True).float())
        return torch.cat(means)

    def cosines(
        self, directions: Float[Tensor, "m d_model"], indices: Sequence[int]
    ) -> Float[np.ndarray, " m"]:
        """Mean cosine of two vectors of each cluster, from its direction; NaN for a single vector."""
        if len(directions) != len(indices):
            raise InputError(
                f"directions must be one for each of {len(indices)} clusters, got {len(directions)}."
            )
        size = self.sizes[list(indices)].astype(float)
        squared = directions.cpu().double().square().sum(1).numpy()
        return (size * squared - 1) / np.where(size > 1, size - 1, np.nan)

    def table(
        self, values: ValueVectors, projection: Projection, indices: Sequence[int], *, n_tokens: int = 10
    ) -> pd.DataFrame:
        """Members and promoted tokens of clusters, one row per cluster.

        Columns are ``cluster, size, layers, first_layer, last_layer, cosine, members, tokens``: the number of
        different layers of its vectors, the first and the last of them, the mean cosine of two vectors, their
        names, and the top tokens of the cluster's direction.
        """
        projection.check_same(values.identity)
        directions = self.directions(values, indices)
        top = projection.top(directions, n_tokens).ids.tolist()
        rows = []
        for cluster, cosine, ids in zip(indices, self.cosines(directions, indices), top, strict=True):
            members = [values.at(row) for row in self.members(cluster).tolist()]
            layers = sorted({value.layer for value in members})
            rows.append(
                {
                    "cluster": cluster, "size": len(members), "layers": len(layers),
                    "first_layer": layers[0], "last_layer": layers[-1], "cosine": float(cosine),
                    "members": " ".join(map(str, members)),
                    "tokens": ", ".join(map(visible, token_texts(projection.tokenizer, ids))),
                }
            )  # fmt: skip
        return pd.DataFrame(rows)


def unit_vectors(values: ValueVectors) -> Float[np.ndarray, "n d_model"]:
    """Normalized value vectors in float64; raises InputError for zero vectors."""
    vectors = torch.cat([values.layer_view(layer).cpu() for layer in range(values.n_layers)]).double()
    lengths = vectors.norm(dim=1, keepdim=True)
    without_direction = (~(lengths > 0) | lengths.isinf()).nonzero()[:, 0].tolist()
    if without_direction:
        raise InputError(
            f"The value vector {values.at(without_direction[0])} is zero or not finite, so it has no "
            f"direction to cluster by, nor do {len(without_direction) - 1} more. Expected a model without "
            "such weights."
        )
    return vectors.div_(lengths).numpy()
