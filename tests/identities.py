"""Identities of models that are not there, for results that are made by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from matlens.activations import Activations
from matlens.data.examples import Examples
from matlens.models.identity import ModelIdentity, Provenance


def make_identity(
    name: str = "some/model",
    fingerprint: str = "f00d",
    *,
    n_layers: int = 3,
    d_model: int = 5,
    tokens: str | None = "cafe",
    token_policy: str = "nothing added",
    configuration: str = "c0de",
    dtype: str = "float32",
) -> ModelIdentity:
    return ModelIdentity(
        name=name, revision=None, fingerprint=fingerprint, configuration=configuration, tokens=tokens,
        token_policy=token_policy, dtype=dtype, n_layers=n_layers, d_model=d_model,
    )  # fmt: skip


def make_activations(vectors: Mapping[str, Tensor], provenance: Provenance) -> Activations:
    """Vectors as if they had been collected, each of a sentence of one token."""
    n = len(next(iter(vectors.values())))
    ones = np.arange(n)
    examples = Examples(np.zeros(n, int), np.arange(n + 1), np.zeros(n, int), {}, ones)
    return Activations(dict(vectors), examples, "sampled", provenance)
