"""Traces and clusters with given numbers, for what is read off them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from identities import make_identity
from torch import Tensor

from matlens.data.examples import Examples
from matlens.ffn.clusters import Clusters
from matlens.ffn.trace import GROUPS, REFERENCES, Trace
from matlens.ffn.values import ValueVectors
from matlens.models.identity import ModelIdentity, Provenance

N, K = 14, 4  # examples and sub-updates of each update, where a test does not say


def assemble_trace(rows: dict[str, Tensor], examples: Examples, identity: ModelIdentity, k: int) -> Trace:
    return Trace(rows, examples, Provenance(identity, examples.provenance, details={"k": k}))


def make_trace(
    before: Tensor, after: Tensor, rank: Tensor, *, k: int = 2, seed: int = 0, norm: Tensor | None = None
) -> Trace:
    """A trace of given candidates and ranks, ``[n, n_layers]``, with random scores."""
    n, n_layers = before.shape
    generator = torch.Generator().manual_seed(seed)

    def random() -> Tensor:
        return torch.randn(n, n_layers * k, generator=generator)

    rows = {"before": before.float(), "after": after.float(), "rank": rank.float()}
    rows |= {"norm": torch.ones(n, n_layers) if norm is None else norm, "scale": torch.ones(n, n_layers)}
    for group in GROUPS:
        rows |= {f"index.{group}": random().abs().floor(), f"coefficient.{group}": random()}
        rows |= {f"score.{group}.{reference}": random() for reference in REFERENCES}
    examples = Examples(np.arange(2 * n), 2 * np.arange(n + 1), np.ones(n, int), {"corpus": "words", "n": n})
    return assemble_trace(rows, examples, make_identity(fingerprint="none", n_layers=n_layers), k)


def make_trace_of_model(
    values: ValueVectors, *, n: int = N, k: int = K, n_sinks: int = 2, seed: int = 0
) -> Trace:
    """A trace of a small model with random numbers; its first examples are at sinks."""
    generator = torch.Generator().manual_seed(seed)
    shape = n, values.n_layers

    def random() -> Tensor:
        return torch.randn(*shape, k, generator=generator)

    norm = torch.ones(shape)
    norm[:n_sinks, 1] = 1000
    rank = torch.randint(0, 2, shape, generator=generator).float()
    rows = {"before": torch.zeros(shape), "after": torch.zeros(shape), "rank": rank, "norm": norm}
    rows["scale"] = torch.ones(shape)
    for group in GROUPS:
        index = torch.rand(*shape, values.d_mlp, generator=generator).topk(k).indices
        rows |= {f"index.{group}": index.flatten(1).float(), f"coefficient.{group}": random().flatten(1)}
        rows |= {f"score.{group}.{reference}": random().flatten(1) for reference in REFERENCES}
    examples = Examples(np.arange(3 * n), 3 * np.arange(n + 1), np.arange(n) % 3, {"corpus": "words", "n": n})
    return assemble_trace(rows, examples, replace(values.identity, name="some/model"), k)


def make_trace_of_dominant(dominant: np.ndarray, fingerprint: str) -> Trace:
    """A trace with these dominant sub-updates, ``[n, n_layers, k]``, and nothing else to see."""
    n, n_layers, k = dominant.shape
    rows = {name: torch.zeros(n, n_layers) for name in ("before", "after", "rank", "norm", "scale")}
    for group in GROUPS:
        rows |= {f"{name}.{group}": torch.zeros(n, n_layers * k) for name in ("index", "coefficient")}
        rows |= {f"score.{group}.{reference}": torch.zeros(n, n_layers * k) for reference in REFERENCES}
    rows["index.dominant"] = torch.from_numpy(dominant).float().reshape(n, -1)
    examples = Examples(np.zeros(n, dtype=int), np.arange(n + 1), np.zeros(n, dtype=int), {})
    return assemble_trace(rows, examples, make_identity("none", fingerprint, n_layers=n_layers), k)


def make_clusters(labels: Sequence[int] | np.ndarray, identity: ModelIdentity) -> Clusters:
    details = {"method": "exact", "linkage": "average", "n_clusters": int(max(labels)) + 1}
    return Clusters(np.array(labels), Provenance(identity, details=details))
