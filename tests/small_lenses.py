"""Lenses made by hand, of every kind of map."""

from __future__ import annotations

from typing import Any

import torch
from conftest import D_MODEL
from torch import Tensor

from matlens import Lens
from matlens.lens.maps import LayerMap
from matlens.models.identity import ModelIdentity, Provenance


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_lens(model: Any, **options: Any) -> Lens:
    """A lens of every kind of map: whole with a bias, narrow, and the identity with a scale."""
    maps = {
        0: LayerMap(numbers(D_MODEL, D_MODEL), bias=numbers(D_MODEL, seed=1)),
        1: LayerMap(numbers(D_MODEL, 3, seed=2), numbers(3, D_MODEL, seed=3)),
        2: LayerMap(scale=0.5),
    }
    return Lens(maps, "by hand", Provenance(ModelIdentity.from_model(model)), **options)
