"""A wrong shape in a call of a public function is an error while tests run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from matlens import InputError, metrics
from matlens.activations.sinks import outlying_rows
from matlens.data import Examples
from matlens.lens.early_exit import exit_layers
from matlens.linear import LeastSquares, LinearMap
from matlens.numerics import split_product
from matlens.pruning.choosing import angles

# What says so: the package to every user where it can, and otherwise the annotations to its tests.
WRONG = (InputError, TypeCheckError)

# A public function, and the shapes of what it is given: those it is for, and those that do not fit.
CALLS: dict[str, tuple[Callable[..., object], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "metrics.r2": (metrics.r2, [(10, 3), (10, 3)], [(10, 3), (10, 4)]),
    "linear.LeastSquares.update": (
        lambda x, y: LeastSquares(3, 2).update(x, y),
        [(9, 3), (9, 2)],
        [(9, 3), (8, 2)],
    ),
    "linear.LinearMap": (lambda w, b: LinearMap(w, b, "h.0", "h.1"), [(4, 3), (4,)], [(4, 3), (3,)]),
    "activations.outlying_rows": (outlying_rows, [(10, 3)], [(10,)]),
    "numerics.split_product": (split_product, [(5, 3), (5, 4)], [(5, 3), (6, 4)]),
    "lens.exit_layers": (exit_layers, [(10, 4), (10,)], [(10, 4), (11,)]),
    "pruning.angles": (angles, [(4, 3), (4, 3)], [(4, 3), (2, 3)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_shape_is_an_error(name: str) -> None:
    call, right, wrong = CALLS[name]
    call(*map(torch.rand, right))
    with pytest.raises(WRONG):
        call(*map(torch.rand, wrong))


def test_a_wrong_shape_is_an_error_in_arrays_of_numpy() -> None:
    tokens, offsets, positions = np.arange(6), np.array([0, 2, 6]), np.array([1, 3])
    assert len(Examples(tokens, offsets, positions)) == 2
    with pytest.raises(WRONG, match="tokens"):
        Examples(tokens[None], offsets, positions)


def test_a_wrong_dtype_is_an_error() -> None:
    with pytest.raises(WRONG, match="token"):
        metrics.rank(torch.rand(10, 7), torch.rand(10))


@pytest.mark.refused
def test_shapes_are_not_checked_where_a_test_is_about_what_is_refused() -> None:
    with pytest.raises(InputError, match="must have the same shape"):
        metrics.r2(torch.rand(10, 3), torch.rand(10, 4))
