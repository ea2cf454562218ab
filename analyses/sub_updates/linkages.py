"""How far clusters of value vectors depend on the clustering method (section 5.2)."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from sklearn.metrics import adjusted_rand_score

from matlens.ffn import ValueVectors, agglomerate


def compare_linkages(
    values: ValueVectors, n_clusters: int = 10_000, *, n_vectors: int = 12_000, seed: int = 0
) -> pd.DataFrame:
    """Compare ``average``, ``complete`` and ``neighbors`` clusters pairwise on a sample.

    The ``n_vectors`` are sampled at random and grouped into proportionally many clusters; their distances
    take ``8 n (n - 1)`` bytes. Columns are ``method, other, rand``, the adjusted Rand index of their
    clusters; ``cosine`` and ``other_cosine``, the mean cosine of a vector with the mean of its cluster;
    ``vectors`` and ``clusters``, their numbers.
    """
    vectors = torch.cat([values.layer(layer).cpu() for layer in range(values.n_layers)]).double()
    unit = (vectors / vectors.norm(dim=1, keepdim=True)).numpy()
    sampled = np.random.default_rng(seed).permutation(len(unit))[:n_vectors]
    unit = unit[np.sort(sampled)]
    n = min(len(unit), max(1, round(n_clusters * len(unit) / len(values))))
    labels = {
        "average": agglomerate(unit, n, "exact", "average"),
        "complete": agglomerate(unit, n, "exact", "complete"),
        "neighbors": agglomerate(unit, n, "neighbors"),
    }
    tight = {name: _tightness(unit, each) for name, each in labels.items()}
    rows = [
        (name, other, adjusted_rand_score(labels[name], labels[other]), tight[name], tight[other])
        for name, other in itertools.combinations(labels, 2)
    ]
    table = pd.DataFrame(rows, columns=["method", "other", "rand", "cosine", "other_cosine"])
    return table.assign(vectors=len(unit), clusters=n)


def _tightness(unit: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]) -> float:
    """The mean cosine of a vector with the mean of its cluster."""
    sums = np.zeros((labels.max() + 1, unit.shape[1]))
    np.add.at(sums, labels, unit)
    return float(np.linalg.norm(sums, axis=1).sum() / len(unit))
