"""Rows that are kept as they are while data pass by: those that may be sinks, and those left out in turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from matlens import parallel


class KeptRows:
    """Some rows as they are.

    Attributes
    ----------
    vectors
        The rows of each layer, one under the other.
    keys
        A number for each row that looks drawn at random, see `row_keys`.
    index
        The place of each row among all that have passed by.
    weights
        How much each row counts, by default 1.
    """

    def __init__(
        self, vectors: Mapping[int, Tensor], keys: Tensor, index: Tensor, weights: Tensor | None = None
    ) -> None:
        self.vectors, self.keys, self.index = dict(vectors), keys, index
        self.weights = torch.ones(len(keys), dtype=torch.float64) if weights is None else weights

    def __len__(self) -> int:
        return len(self.keys)

    def of_layers(self, layers: Iterable[int]) -> KeptRows:
        """The same rows, of some layers alone."""
        vectors = {layer: self.vectors[layer] for layer in layers}
        return KeptRows(vectors, self.keys, self.index, self.weights)

    def chosen(self, rows: Tensor) -> KeptRows:
        """Some of them, by a mask or by their numbers."""
        vectors = {layer: values[rows] for layer, values in self.vectors.items()}
        return KeptRows(vectors, self.keys[rows], self.index[rows], self.weights[rows])

    def with_rows(self, other: KeptRows, offset: int = 0) -> KeptRows:
        """These and others, which come so many places after what they say."""
        vectors = {layer: torch.cat([values, other.vectors[layer]]) for layer, values in self.vectors.items()}
        index = torch.cat([self.index, other.index + offset])
        weights = torch.cat([self.weights, other.weights])
        return KeptRows(vectors, torch.cat([self.keys, other.keys]), index, weights)

    def of_all(self, offset: int) -> KeptRows:
        """These rows and those of all other processes, which come so many places after what they say."""
        own = {str(layer): values for layer, values in self.vectors.items()}
        beside = {"keys": self.keys, "index": self.index + offset, "weights": self.weights}
        rows = parallel.concatenate(own | beside, "rows that are kept")
        vectors = {layer: rows[str(layer)] for layer in self.vectors}
        return KeptRows(vectors, rows["keys"], rows["index"], rows["weights"])

    def first_keys(self, n: int) -> KeptRows:
        """The rows of the least keys, which are as good as drawn."""
        return self if len(self) <= n else self.chosen(self.keys.sort(stable=True).indices[:n])
