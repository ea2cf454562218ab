"""The map that stands in for blocks left out, folded into the matrix before them (definitions, section 11).

Blocks ``i .. i+n-1`` are left out. ``m`` is what the FFN of the block before them adds to the stream, ``y``
the stream without it, so ``h^i = y + m``; what would be right in the place of ``m`` is ``h^{i+n} - y``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from matlens.linear.least_squares import LeastSquares
from matlens.numerics.precision import in_float64
from matlens.parallel import Bar
from matlens.pruning.choices import Method
from matlens.pruning.spans import spans_of
from matlens.pruning.streams import Streams

REFITTED = (Method.refit, Method.chain)  # the matrix itself is fitted, not a map of what it writes
_ROWS = 8192  # of a part that moments take in


class Matrix(NamedTuple):
    """An FFN's output matrix and its bias."""

    weight: Float[Tensor, "d_model d_mlp"]
    bias: Float[Tensor, " d_model"] | None


def changed_by(method: Method, blocks: Sequence[int], n_layers: int) -> list[int]:
    """Blocks whose matrices a method changes: those before each span, and by ``chain`` all behind them."""
    before = [first - 1 for first, _ in spans_of(blocks)]
    if method == Method.out or not before:
        return []
    if method == Method.chain:
        return [index for index in range(before[0], n_layers) if index not in set(blocks)]
    return before


def fold_spans(
    streams: Streams, blocks: Sequence[int], method: Method, penalty: float, *, progress: bool = True
) -> dict[int, Matrix]:
    """The matrices of the blocks that a method changes, by number; see `changed_by`.

    They are fitted one after another, each on the stream that the changed model has before its block.
    """
    layout, matrices = streams.layout, dict[int, Matrix]()
    behind, changed = dict(spans_of(blocks)), changed_by(method, blocks, len(streams.layout.blocks))
    if not changed:
        return matrices
    stay = [index for index in range(changed[0], changed[-1] + 1) if index not in set(blocks)]
    h = streams.h[changed[0]]
    with Bar(total=len(changed), desc="folding", unit="block", disable=not progress) as bar:
        for index in stay:
            block = layout.blocks[index]
            if index in changed:
                right = streams.h[behind.get(index + 1, index + 1)]
                matrices[index] = fold_block(streams, index, block, h, right, method, penalty)
                block = copy.deepcopy(block)
                layout.write(block, matrices[index].weight, matrices[index].bias)
                bar.update(1)
            if index != stay[-1]:
                h = streams.after(index, block, h)
    return matrices


def fold_block(
    streams: Streams,
    index: int,
    block: nn.Module,
    h: Float[Tensor, "n length d_model"],
    right: Float[Tensor, "n length d_model"],
    method: Method,
    penalty: float,
) -> Matrix:
    """The matrix with which a block, run on the stream before it, best gives the right stream after it."""
    passed = streams.through(index, block, h)
    rest = passed.h.float() - passed.written.float()
    matrix, bias = streams.layout.weight_of(block), streams.layout.writer_of(block).bias
    own = Matrix(matrix.detach(), None if bias is None else bias.detach())
    return fold(method, own, passed.read.flatten(0, 1), (right.float() - rest).flatten(0, 1), penalty=penalty)


def fold(
    method: Method,
    matrix: Matrix,
    read: Float[Tensor, "n d_mlp"],
    right: Float[Tensor, "n d_model"],
    *,
    penalty: float = 0.0,
) -> Matrix:
    """The matrix by which a block writes, as nearly as the method can, what would be right.

    Parameters
    ----------
    method
        Which closed form.
    matrix
        The block's own.
    read, right
        What the matrix read on calibration text, and what should be written there, row by row.
    penalty
        How much the solution is held near the block's own: times the mean square of a coordinate that is
        mapped. ``replaceme`` is held near the identity, ``refit`` and ``chain`` near the matrix.
    """
    if method == Method.out:
        return matrix
    weight = in_float64(matrix.weight).to(read.device)
    bias = None if matrix.bias is None else in_float64(matrix.bias).to(read.device)
    if method == Method.magnitude:
        written = read.double() @ weight.T + (0 if bias is None else bias)
        factor = right.double().abs().mean(0) / written.abs().mean(0).clamp_min(
            torch.finfo(torch.float64).tiny
        )
        return Matrix(factor[:, None] * weight, None if bias is None else factor * bias)
    d_model, refit = len(weight), method in REFITTED
    width = weight.shape[1] if refit else d_model
    sums = LeastSquares(width, d_model, source="the FFN's matrix")
    total = 0.0
    for part, truth in zip(read.split(_ROWS), right.split(_ROWS), strict=True):
        written = part.double() @ weight.T + (0 if bias is None else bias)
        x = part.double() if refit else written
        sums.update(x, truth.double() - written)
        total += float(x.square().sum())
    change, shift = sums.solution(intercept=refit and bias is not None, ridge=penalty * total / width)
    if refit:
        return Matrix(weight + change, None if bias is None or shift is None else bias + shift)
    turned = change + torch.eye(d_model, dtype=torch.float64)
    return Matrix(turned @ weight, None if bias is None else turned @ bias)
