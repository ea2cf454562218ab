"""Folded matrices are those of NumPy on stacked rows, with penalties as further rows of data."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from matlens.pruning import Method, folding
from matlens.pruning.folding import Matrix, fold

N, D, D_MLP = 70, 5, 8


def setting(*, bias: bool) -> tuple[Matrix, torch.Tensor, torch.Tensor]:
    """A block's matrix, what it read, and what would be right: near what it writes, and not linear in it."""
    generator = torch.Generator().manual_seed(3)
    read = torch.randn(N, D_MLP, generator=generator) * torch.tensor([9.0, 3, 1, 1, 1, 0.5, 0.5, 0.1]) + 0.4
    matrix = Matrix(
        torch.randn(D, D_MLP, generator=generator), torch.randn(D, generator=generator) if bias else None
    )
    written = read @ matrix.weight.T + (0 if matrix.bias is None else matrix.bias)
    right = written.tanh() * 4 + 0.7 * torch.randn(N, D, generator=generator) + 1
    return matrix, read, right


def ridge_by_hand(
    x: np.ndarray, y: np.ndarray, towards: np.ndarray, ridge: float, *, intercept: bool
) -> tuple[np.ndarray, np.ndarray]:
    """``argmin |x w' + b - y|^2 + ridge |w - towards|^2``: the weight, and the bias, which is free."""
    design = np.hstack([x, np.ones((len(x), int(intercept)))])
    penalty = np.sqrt(ridge) * np.eye(x.shape[1], design.shape[1])
    target = np.sqrt(ridge) * towards.T
    solution = np.linalg.lstsq(np.vstack([design, penalty]), np.vstack([y, target]), rcond=None)[0]
    weight = solution[: x.shape[1]].T
    return weight, solution[-1] if intercept else np.zeros(len(weight))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("method", get_args(Method))
def test_a_fold_is_least_squares_held_near_what_was(method, penalty, bias, monkeypatch):
    monkeypatch.setattr(folding, "_ROWS", 16)
    matrix, read, right = setting(bias=bias)
    ours = fold(method, matrix, read, right, penalty=penalty)
    x, y, w = (each.double().numpy() for each in (read, right, matrix.weight))
    b = np.zeros(D) if matrix.bias is None else matrix.bias.double().numpy()
    written = x @ w.T + b
    if method == "out":
        weight, offset = w, b
    elif method == "magnitude":
        factor = np.abs(y).mean(0) / np.abs(written).mean(0)
        weight, offset = factor[:, None] * w, factor * b
    elif method == "replaceme":
        ridge = penalty * np.square(written).sum() / D
        turned, _ = ridge_by_hand(written, y, np.eye(D), ridge, intercept=False)
        weight, offset = turned @ w, turned @ b
    else:
        ridge = penalty * np.square(x).sum() / D_MLP
        weight, offset = ridge_by_hand(x, y, w, ridge, intercept=bias)
    np.testing.assert_allclose(ours.weight.double().numpy(), weight, rtol=1e-5, atol=1e-6)
    assert (ours.bias is None) == (not bias)
    if ours.bias is not None:
        np.testing.assert_allclose(ours.bias.double().numpy(), offset, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_that_reads_nothing_stays(bias):
    matrix, read, right = setting(bias=bias)
    ours = fold("refit", matrix, torch.zeros_like(read), right, penalty=0.3)
    np.testing.assert_allclose(ours.weight.numpy(), matrix.weight.numpy(), rtol=1e-6)
