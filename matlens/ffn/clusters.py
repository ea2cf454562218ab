"""Clusters of value vectors that point the same way (section 5.2).

Value vectors are clustered by agglomeration on their cosine distances: exactly while the distances of all
pairs fit a limit of memory, and past it by near neighbours, see `matlens.ffn.agglomeration`.
"""

from __future__ import annotations

import io
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

from matlens.errors import InputError
from matlens.ffn.agglomeration import EXACT, NEIGHBOURS, agglomerate, distances_gib, method_within
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueName, ValueVectors
from matlens.models.identity import Provenance
from matlens.models.vocabulary import token_texts, visible
from matlens.storage.folders import Workplace, command_line, read_config, software_versions, write_bytes

HOLDS, CLUSTERS, MEMORY = "clusters", 10_000, 4.0
_DOES = {EXACT: "exactly", NEIGHBOURS: "by near neighbours"}


class Clusters:
    """Which cluster each value vector of a model belongs to.

    Attributes
    ----------
    labels
        ``[n_layers * d_mlp]``, from 0, layer after layer as in `Values.at`. Clusters are numbered by their
        size, the largest first, and those of one size by their first vector.
    method
        ``exact`` or ``neighbours``.
    sizes
        ``[n_clusters]``, how many value vectors each cluster has.
    provenance
        The model and what was asked for.
    """

    def __init__(self, labels: Int[np.ndarray, " n"], provenance: Provenance) -> None:
        self.labels, self.provenance = labels, provenance
        self.method, self.sizes = str(provenance.details["method"]), np.bincount(labels)

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def _members(self) -> list[np.ndarray]:
        return np.split(np.argsort(self.labels, kind="stable"), np.cumsum(self.sizes)[:-1])

    @classmethod
    def fit(
        cls,
        values: ValueVectors,
        n_clusters: int = CLUSTERS,
        *,
        memory: float = MEMORY,
        folder: str | Path | None = None,
        progress: bool = True,
    ) -> Clusters:
        """Cluster all value vectors of a model.

        Before it begins, a line on the standard error says by which method, and why.

        Parameters
        ----------
        values
            Of the model.
        n_clusters
            The paper has 10,000 of 36,864 vectors of GPT-2.
        memory
            Most GiB that exact clusters may take for their distances, ``8 n (n - 1)`` bytes. The default is
            enough for 23,000 vectors; those of GPT-2 take 10.1 GiB, those of SmolLM2-135M 15.8.
        folder
            Where the answer is kept, and read from if it is there.
        progress
            Say so.

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
        method = method_within(n, memory)
        request = {
            "holds": HOLDS, "model": values.identity.to_json(),
            "n_clusters": n_clusters, "method": method,
        }  # fmt: skip

        def labels() -> Int[np.ndarray, " n"]:
            if progress:
                size = "more than" if method == NEIGHBOURS else "at most"
                tqdm.write(
                    f"Clustering {n:,} value vectors, {_DOES[method]}: the distances of exact clusters take "
                    f"{distances_gib(n):.1f} GiB, {size} the {memory:g} they may.",
                    file=sys.stderr,
                )
            return agglomerate(_units(values), n_clusters, method)

        if folder is None:
            return cls(labels(), Provenance.from_json(request))
        place = Workplace(folder, request)
        with place.working():
            if not place.finished:
                buffer = io.BytesIO()
                np.save(buffer, labels())
                write_bytes(place.folder / "labels.npy", buffer.getbuffer())
                place.finish(software=software_versions(), command=command_line())
        return cls.load(folder)

    @classmethod
    def load(cls, folder: str | Path) -> Clusters:
        """Open what `fit` has kept.

        Raises
        ------
        InputError
            The folder holds no clusters, or they are damaged.
        """
        config = read_config(folder, HOLDS)
        try:
            labels, expected = np.load(Path(folder) / "labels.npy"), config["request"]["n_clusters"]
            if labels.ndim != 1 or not np.array_equal(np.unique(labels), np.arange(expected)):
                raise ValueError(f"expected one row of labels from 0 to {expected - 1}")
        except (OSError, ValueError, EOFError) as error:
            raise InputError(
                f"The clusters in {folder} are damaged: {error}. Remove that folder and cluster again."
            ) from error
        return cls(labels, Provenance.from_json(config["request"]))

    def members(self, cluster: int) -> Int[np.ndarray, " m"]:
        """Rows of a cluster's value vectors, in their order.

        Raises
        ------
        InputError
            There is no such cluster.
        """
        if not 0 <= cluster < len(self):
            raise InputError(f"There is no cluster {cluster}: expected 0 to {len(self) - 1}.")
        return self._members[cluster]

    def holding(self, values: ValueVectors, names: Iterable[ValueName]) -> list[int]:
        """The clusters of value vectors, each once, in the order of the names.

        Raises
        ------
        InputError
            A name does not exist in this model, or the clusters are those of another.
        """
        self.provenance.require_same(values.identity, ours="the clusters")
        found = [values.resolve(name) for name in names]
        rows = [value.layer * values.d_mlp + value.index for value in found]
        return list(dict.fromkeys(int(label) for label in self.labels[rows]))

    def directions(self, values: ValueVectors, chosen: Iterable[int]) -> Float[Tensor, "m d_model"]:
        """Mean of the unit vectors of each cluster, which is what its vectors have in common.

        Raises
        ------
        InputError
            There is no such cluster, or the clusters are those of another model.
        """
        self.provenance.require_same(values.identity, ours="the clusters")
        means = []
        for cluster in chosen:
            vectors = values.vectors(map(values.at, self.members(cluster).tolist())).cpu().double()
            means.append((vectors / vectors.norm(dim=1, keepdim=True)).mean(0))
        return torch.stack(means).float()

    def cosines(
        self, directions: Float[Tensor, "m d_model"], chosen: Sequence[int]
    ) -> Float[np.ndarray, " m"]:
        """Mean cosine between two vectors of each cluster, from its direction; NaN where it has only one.

        1 where all point the same way, about 0 where they have nothing to do with each other.
        """
        size = self.sizes[list(chosen)].astype(float)
        squared = directions.double().square().sum(1).numpy()
        return (size * squared - 1) / np.where(size > 1, size - 1, np.nan)


def cluster_table(
    values: ValueVectors,
    projection: Projection,
    clusters: Clusters,
    chosen: Sequence[int],
    *,
    n_tokens: int = 10,
) -> pd.DataFrame:
    """What clusters are made of and promote, one row each.

    Columns are ``cluster, size, layers, first_layer, last_layer, cosine, members, tokens``: how many layers
    its vectors are from, the first and the last of these, the mean cosine between two of its vectors, the
    vectors' names, and the top tokens of its direction, as people see them.
    """
    directions = clusters.directions(values, chosen)
    top = projection.top(directions, n_tokens).ids.tolist()
    rows = []
    for cluster, cosine, ids in zip(chosen, clusters.cosines(directions, chosen), top, strict=True):
        members = [values.at(row) for row in clusters.members(cluster).tolist()]
        layers = sorted({value.layer for value in members})
        texts = ", ".join(map(visible, token_texts(projection.tokenizer, ids)))
        names = " ".join(map(str, members))
        told = (len(members), len(layers), layers[0], layers[-1], float(cosine), names, texts)
        rows.append((cluster, *told))
    columns = ["cluster", "size", "layers", "first_layer", "last_layer", "cosine", "members", "tokens"]
    return pd.DataFrame(rows, columns=columns)


def _units(values: ValueVectors) -> Float[np.ndarray, "n d_model"]:
    vectors = torch.cat([values.layer(layer).cpu() for layer in range(values.n_layers)]).double()
    lengths = vectors.norm(dim=1, keepdim=True)
    wrong = (~(lengths > 0) | lengths.isinf()).nonzero()
    if len(wrong):
        raise InputError(
            f"The value vector {values.at(int(wrong[0, 0]))} is zero or not finite, so it has no "
            f"direction to cluster by, nor do {len(wrong) - 1} more. Expected a model without such weights."
        )
    return vectors.div_(lengths).numpy()
