"""Lenses made by hand, of every kind of map."""

from __future__ import annotations

from typing import Any

import torch
from conftest import D_MODEL, N_LAYERS
from torch import Tensor

from matlens import Lens, LinearMap, Readout
from matlens.models.identity import ModelIdentity, Provenance


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(layer: int, weight: Tensor, bias: Tensor | None = None, right: Tensor | None = None) -> LinearMap:
    """A map from a layer to the last one."""
    return LinearMap(weight, bias, f"h.{layer}", f"h.{N_LAYERS}", right=right)


def make_lens(model: Any, **options: Any) -> Lens:
    """A lens of every kind of map: whole with a bias, narrow, and the identity with a scale."""
    maps = {
        0: linear(0, numbers(D_MODEL, D_MODEL), numbers(D_MODEL, seed=1)),
        1: linear(1, numbers(D_MODEL, 3, seed=2), right=numbers(3, D_MODEL, seed=3)),
        2: None,
    }
    provenance = Provenance(ModelIdentity.from_model(model))
    return Lens(maps, "by hand", provenance, scales={2: 0.5}, **options)


class Sharp(Readout):
    """Small models are sure of nothing; read out this way, of some tokens more than of others."""

    factor = 1.0

    def logits(self, h: Tensor) -> Tensor:
        return self.factor * super().logits(h)
