"""Cosines of matrices, with the ceiling that two halves set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL

from matlens import InputError, Lens
from matlens.lens.cosines import cosine_table, matrix_cosine
from matlens.lens.maps import LayerMap, Standardisation

Models = Callable[[str], Any]


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(seed))


def test_the_cosine_is_that_of_all_numbers() -> None:
    a, b = numbers(0), numbers(0) + numbers(1)
    assert matrix_cosine(a, b) == pytest.approx(float(np.corrcoef(a.flatten(), b.flatten())[0, 1]), abs=0.01)
    assert matrix_cosine(a, -3 * a) == pytest.approx(-1)
    assert np.isnan(matrix_cosine(a, 0 * a))


def test_the_ceiling_is_what_noise_of_that_size_leaves(small_model: Models) -> None:
    identity = Lens.identity(small_model("llama"))
    truth = numbers(0)

    def noisy(seed: int, size: float) -> Lens:
        maps = {layer: LayerMap(truth + size * numbers(100 * layer + seed)) for layer in (1, 2)}
        return replace(identity, maps=maps)

    def mean(halves: tuple[Lens, Lens]) -> Lens:
        held = [half.maps for half in halves]
        maps = {n: LayerMap((held[0][n].matrix(1) + held[1][n].matrix(1)) / 2) for n in (1, 2)}
        return replace(identity, maps=maps)

    halves = {"mat": (noisy(1, 0.5), noisy(2, 0.5)), "jacobian": (noisy(3, 1.0), noisy(4, 1.0))}
    table = cosine_table({name: mean(pair) for name, pair in halves.items()}, halves)
    values = table.set_index(["method", "layer"])["value"]
    for layer in (1, 2):
        assert values["halves of jacobian", layer] == pytest.approx(0.5, abs=0.05)
        # Both are the same matrix and noise, so the cosine is as high as noise lets it be.
        ceiling = values["ceiling of mat and jacobian", layer]
        assert values["mat and jacobian", layer] == pytest.approx(ceiling, abs=0.03)
        assert ceiling == pytest.approx((1 / 1.125 / 1.5) ** 0.5, abs=0.03)
    apart = cosine_table({"a": noisy(1, 0), "b": replace(identity, maps={1: LayerMap(numbers(9))})})
    assert set(apart["method"]) == {"a and b"}
    assert abs(apart["value"].item()) < 0.1


@pytest.mark.refused
def test_matrices_of_another_unit_are_refused(small_model: Models) -> None:
    lens = Lens.identity(small_model("llama"))
    with pytest.raises(InputError, match="two lenses or more"):
        cosine_table({"a": lens})
    with pytest.raises(InputError, match="norm before"):
        cosine_table({"a": lens, "b": replace(lens, norm=Standardisation("rms"))})
    with pytest.raises(InputError, match="shapes"):
        matrix_cosine(torch.zeros(2, 2), torch.zeros(2, 3))
    with pytest.raises(InputError, match="no layer in common"):
        cosine_table({"a": replace(lens, maps={0: LayerMap()}), "b": replace(lens, maps={1: LayerMap()})})
