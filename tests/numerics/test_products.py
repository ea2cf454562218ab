"""Products of slices in float32 are those of float64, on streams with much larger coordinates too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from matlens import InputError
from matlens.linear import LeastSquares
from matlens.numerics.products import split_product


def stream(n: int, width: int, seed: int) -> Tensor:
    """Vectors of which one coordinate is a thousand times larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator) @ torch.randn(width, width, generator=generator)
    x[:, 2] *= 1000
    x[0] *= 300  # a sink
    return x


@pytest.mark.parametrize("n", [1, 256, 257, 1500])
def test_a_product_is_as_exact_as_in_float64(n: int) -> None:
    a, b = stream(n, 20, 0).double() / 3, stream(n, 30, 1)
    product = split_product(a, b)
    assert product.dtype == torch.float64
    bound = n * 6 * 2.0**-46 * a.abs().amax(0)[:, None] * b.double().abs().amax(0)
    error = (product - a.T @ b.double()).abs()
    assert bool((error <= bound + 1e-15 * (a.abs().T @ b.double().abs())).all())
    single = (a.float().T @ b).double() - a.T @ b.double()
    if n > 1:
        assert float(single.abs().max()) > 1e4 * float(error.max()), "float32 alone would do as well"


def test_more_slices_are_more_exact_and_whole_numbers_are_exact() -> None:
    a, b = stream(300, 8, 2), stream(300, 8, 3)
    errors = [
        float((split_product(a, b, slices=n) - a.double().T @ b.double()).abs().max()) for n in (1, 2, 3, 6)
    ]
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] > 50 * errors[3]
    whole = torch.randint(-255, 256, (700, 9), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(split_product(whole, whole), whole.double().T @ whole.double())
    assert torch.equal(split_product(torch.zeros(5, 2), torch.zeros(5, 3)), torch.zeros(2, 3).double())


@pytest.mark.parametrize("batch", [70, 2000])
def test_maps_are_those_of_float64(batch: int) -> None:
    x, y = stream(2000, 24, 4), stream(2000, 40, 5)
    y += x @ torch.randn(24, 40, generator=torch.Generator().manual_seed(6))
    solutions = []
    for split in (False, True):
        moments = LeastSquares(24, 40, split=split)
        for start in range(0, 2000, batch):
            moments.update(x[start : start + batch], y[start : start + batch])
        solutions.append(moments.solution(intercept=True, ridge=0.0))
    (weight, bias), (ours, our_bias) = solutions
    assert bias is not None
    assert our_bias is not None
    predicted, expected = x.double() @ ours.T + our_bias, x.double() @ weight.T + bias
    assert float((predicted - expected).norm() / expected.norm()) < 1e-12


def test_factors_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(InputError, match="slices"):
        split_product(torch.ones(3, 2), torch.ones(3, 2), slices=0)
