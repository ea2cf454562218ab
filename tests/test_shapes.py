"""A wrong shape or dtype in a call of a public function is an error while tests run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from matlens import InputError, metrics
from matlens.data import Examples
from matlens.linear import LinearMap
from matlens.numerics import split_product


def test_wrong_arrays_are_errors():
    """The package tells users where it can, and otherwise its annotations tell its tests."""
    tokens, offsets, positions = np.arange(6), np.array([0, 2, 6]), np.array([1, 3])
    assert len(Examples(tokens, offsets, positions)) == 2
    split_product(torch.rand(5, 3), torch.rand(5, 4))
    for wrong in (
        lambda: split_product(torch.rand(5, 3), torch.rand(6, 4)),
        lambda: LinearMap(torch.rand(4, 3), torch.rand(3), "h.0", "h.1"),
        lambda: Examples(tokens[None], offsets, positions),
        lambda: metrics.rank(torch.rand(10, 7), torch.rand(10)),
    ):
        with pytest.raises((InputError, TypeCheckError)):
            wrong()


@pytest.mark.refused
def test_shapes_are_not_checked_where_a_test_is_about_what_is_refused():
    with pytest.raises(InputError, match="must have the same shape"):
        metrics.r2(torch.rand(10, 3), torch.rand(10, 4))
