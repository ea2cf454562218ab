"""Clusters of value vectors that point the same way (section 5.2).

Value vectors are clustered by agglomeration on their cosine distances (`matlens.ffn.agglomeration`):
``exact`` while the distances of all pairs have room in memory or on the disk, else by ``neighbours``.
"""

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
from matlens.errors import InputError, NonNegative, check_int, checked, short
from matlens.ffn.agglomeration import (
    EXACT,
    NEIGHBOURS,
    Linkage,
    agglomerate,
    gib_in_memory,
    gib_on_disk,
    method_within,
)
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueName, ValueVectors
from matlens.io.artifact import Artifact, make_config
from matlens.io.files import damaged
from matlens.models.identity import Provenance
from matlens.models.tokens import token_texts, visible
from matlens.parallel import waiting

CLUSTERS, _LABELS = "clusters", "labels"
N_CLUSTERS = 10_000
"""How many clusters there are unless another number is given, as in the paper."""
MEMORY_GIB = 4.0
"""Memory in GiB that exact clusters may take unless another limit is given."""
WARD = "ward"  # what clusters by near neighbours are linked by
_IN_WORDS = {EXACT: "exactly", NEIGHBOURS: "by near neighbours"}


@checked
class Clusters:
    """Which cluster each value vector of a model belongs to (section 5.2).

    Attributes
    ----------
    labels
        ``[n_layers * d_mlp]``, from 0, layer after layer as in `ValueVectors.at`. Clusters are numbered by
        their size, the largest first, and those of one size by their first vector.
    method, linkage
        ``exact`` by ``average`` or ``complete`` linkage, or ``neighbours`` by ``ward``.
    sizes
        ``[n_clusters]``, how many value vectors each cluster has.
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
        n_clusters: int = N_CLUSTERS,
        *,
        linkage: Linkage = "average",
        memory: NonNegative = MEMORY_GIB,
        disk: NonNegative = 0.0,
        folder: str | Path | None = None,
        progress: bool = True,
    ) -> Clusters:
        """Cluster all value vectors of a model.

        Before it begins, a line on the standard error says by which method, and why.

        Parameters
        ----------
        values
            Value vectors of the model.
        n_clusters
            How many clusters to make; the paper makes 10,000 of the 36,864 vectors of GPT-2.
        linkage
            How far apart two clusters are: as their vectors on ``average``, or as the two furthest of them
            (``complete``), by which the paper's authors cluster. Clusters by near neighbours have none.
        memory
            Most GiB that exact clusters may take for their distances, ``8 n (n - 1)`` bytes. The default is
            enough for 23,000 vectors; those of GPT-2 take 10.1 GiB, those of SmolLM2-135M 15.8.
        disk
            Most GiB that the distances may take on the disk, ``4 n n`` bytes, where memory has no room for
            them: 7.9 for SmolLM2-135M, 36 for gpt2-medium. They are kept next to ``folder`` while the work
            lasts; without a folder where temporary files are.
        folder
            Where the clusters are kept, and read from if they are there.
        progress
            Whether to print the line, and to show bars.

        Raises
        ------
        InputError
            More clusters than vectors, a vector without a direction, complete linkage without room for the
            distances, or a folder of another job.
        """
        n = len(values)
        check_int(n_clusters, "n_clusters", min=1, max=n)
        method = method_within(n, memory, disk)
        if (method, linkage) == (NEIGHBOURS, "complete"):
            raise InputError(
                f"Complete linkage needs the distances of all pairs of {n:,} vectors: {gib_in_memory(n):.1f} "
                f"GiB of memory or {gib_on_disk(n):.1f} GiB on the disk. Raise memory ({memory:g}) or disk "
                f"({disk:g}), or use average linkage, which needs no distances of all pairs."
            )
        made = {"method": method, "linkage": linkage if method == EXACT else WARD}
        provenance = Provenance(values.identity, details={"n_clusters": n_clusters, **made})
        beside = None if folder is None else Path(folder).absolute().parent

        request = {"provenance": provenance.to_json()}

        def cluster() -> np.ndarray:
            if progress:
                tqdm.write(_reason(n, method, memory, disk), file=sys.stderr)
            with waiting("clustering", progress=progress):
                return agglomerate(
                    unit_vectors(values), n_clusters, method, linkage, memory, beside, progress
                )

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
        """Open clusters that `fit` has stored in a folder.

        Raises
        ------
        InputError
            The folder holds no clusters, or they are damaged.
        """
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

    def holding(self, values: ValueVectors, names: Iterable[ValueName]) -> list[int]:
        """The clusters of value vectors, each once, in the order of the names."""
        self.provenance.check_same(values.identity, ours="the clusters")
        vectors = [values.resolve(name) for name in names]
        rows = [vector.layer * values.d_mlp + values.column(vector) for vector in vectors]
        return list(dict.fromkeys(int(label) for label in self.labels[rows]))

    def directions(self, values: ValueVectors, numbers: Iterable[int]) -> Float[Tensor, "m d_model"]:
        """Mean of the unit vectors of each cluster, which is what its vectors have in common."""
        self.provenance.check_same(values.identity, ours="the clusters")
        means = [torch.empty(0, values.d_model)]
        for cluster in numbers:
            vectors = values.vectors(map(values.at, self.members(cluster).tolist())).cpu().double()
            means.append((vectors / vectors.norm(dim=1, keepdim=True)).mean(0, keepdim=True).float())
        return torch.cat(means)

    def cosines(
        self, directions: Float[Tensor, "m d_model"], numbers: Sequence[int]
    ) -> Float[np.ndarray, " m"]:
        """Mean cosine between two vectors of each cluster; NaN where a cluster has only one.

        1 where all vectors point the same way, about 0 where they have nothing to do with each other.

        They follow from the lengths of the clusters' `directions`.
        """
        if len(directions) != len(numbers) or not directions.shape[1]:
            raise InputError(
                f"directions must be a vector for each of {len(numbers)} clusters, got {short(directions)}."
            )
        size = self.sizes[list(numbers)].astype(float)
        squared = directions.cpu().double().square().sum(1).numpy()
        return (size * squared - 1) / np.where(size > 1, size - 1, np.nan)


@checked
def cluster_table(
    values: ValueVectors,
    projection: Projection,
    clusters: Clusters,
    numbers: Sequence[int],
    *,
    n_tokens: int = 10,
) -> pd.DataFrame:
    """What clusters are made of and promote, one row each.

    Columns are ``cluster, size, layers, first_layer, last_layer, cosine, members, tokens``: how many layers
    its vectors are from, the first and the last of these, the mean cosine between two of its vectors, the
    vectors' names, and the top tokens of its direction, as people see them.

    Parameters
    ----------
    values, projection, clusters
        Value vectors of the model, how they are read, and their clusters.
    numbers
        Numbers of the clusters to list, such as `Clusters.holding` gives.
    n_tokens
        How many tokens of each cluster.
    """
    projection.check_same(values.identity)
    directions = clusters.directions(values, numbers)
    top = projection.top(directions, n_tokens).ids.tolist()
    rows = []
    for cluster, cosine, ids in zip(numbers, clusters.cosines(directions, numbers), top, strict=True):
        members = [values.at(row) for row in clusters.members(cluster).tolist()]
        layers = sorted({value.layer for value in members})
        texts = ", ".join(map(visible, token_texts(projection.tokenizer, ids)))
        names = " ".join(map(str, members))
        rows.append((cluster, len(members), len(layers), layers[0], layers[-1], float(cosine), names, texts))
    columns = ["cluster", "size", "layers", "first_layer", "last_layer", "cosine", "members", "tokens"]
    return pd.DataFrame(rows, columns=columns)


def _reason(n: int, method: str, memory: float, disk: float) -> str:
    """By which method vectors are clustered, and why."""
    needed, relation = gib_in_memory(n), "within" if gib_in_memory(n) <= memory else "over"
    text = (
        f"Clustering {n:,} value vectors, {_IN_WORDS[method]}: the distances of exact clusters take "
        f"{needed:.1f} GiB, {relation} the limit of {memory:g} GiB"
    )
    if method == EXACT and needed > memory:
        text += f", but {gib_on_disk(n):.1f} GiB on the disk, within the limit of {disk:g} GiB there"
    return f"{text}."


def unit_vectors(values: ValueVectors) -> Float[np.ndarray, "n d_model"]:
    """All value vectors at unit length, in float64; raises InputError if one has no direction."""
    vectors = torch.cat([values.layer(layer).cpu() for layer in range(values.n_layers)]).double()
    lengths = vectors.norm(dim=1, keepdim=True)
    without_direction = (~(lengths > 0) | lengths.isinf()).nonzero()[:, 0].tolist()
    if without_direction:
        raise InputError(
            f"The value vector {values.at(without_direction[0])} is zero or not finite, so it has no "
            f"direction to cluster by, nor do {len(without_direction) - 1} more. Expected a model without "
            "such weights."
        )
    return vectors.div_(lengths).numpy()
