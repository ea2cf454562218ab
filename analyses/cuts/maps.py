"""Models without blocks whose residual stream passes a linear map at each cut.

No weight of a plain model can hold such a map of the whole stream, so they are run but not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import circulant
from torch import Tensor, nn

from matlens import InputError
from matlens.linear import LeastSquares
from matlens.pruning import Calibration

RIDGE = 1e-6  # on the diagonal, as published


class Cut(StrEnum):
    """What the stream passes at the cut.

    Attributes
    ----------
    linearpatch
        A factor per dimension: the ratio of the mean absolute values after and before the span.
    rotated
        The same in the basis of a Hadamard matrix (LinearPatch as published).
    jump
        The least-squares map of the stream before the span to that after it: `mat` (Ghosted Layers).
    jump_chain
        ``jump``, and the method ``chain`` from there: every later FFN is refitted.
    chain_from_jump
        Nothing. The method ``chain``, but the first matrix is refitted with its penalty towards ``W`` times
        the matrix, where ``W`` is the map of ``jump``: the part of it that can be folded.
    """

    linearpatch = "linearpatch"
    rotated = "linearpatch, rotated"
    jump = "jump"
    jump_chain = "jump, chain"
    chain_from_jump = "chain from jump"


def without_blocks(calibration: Calibration, blocks: Sequence[int], cut: Cut) -> Any:
    """A plain model without blocks, changed at each cut; all is fitted on the model changed so far."""
    streams, n_layers, first = calibration.streams, len(calibration.layout.blocks), min(blocks) - 1
    layout = replace(calibration.layout, model=calibration.without(blocks, "out", progress=False))
    kept = [index for index in range(n_layers) if index not in blocks]
    chained, h = cut in (Cut.jump_chain, Cut.chain_from_jump), streams.h[first]

    def refit(index: int, block: nn.Module, h: Tensor, target: Tensor) -> Tensor:
        layout.write(block, *calibration.fold_block(index, block, h, target, "chain"))
        return streams.after(index, block, h)

    for place in range(first, len(kept)):
        index, end = kept[place], [*kept, n_layers][place + 1]  # the next block that stays
        block, is_cut = layout.blocks[place], end > index + 1
        if cut == Cut.chain_from_jump:
            if is_cut:
                _multiply(layout, block, fit_map(Cut.jump, streams.after(index, block, h), streams.h[end]))
            h = refit(index, block, h, streams.h[end])
        elif cut == Cut.jump_chain and place > first:
            h = refit(index, block, h, streams.h[index + 1])
        else:
            h = streams.after(index, block, h)
        if is_cut and cut != Cut.chain_from_jump:
            weight = fit_map(cut, h, streams.h[end])
            insert_map(layout, block, weight)
            h = (h.double() @ weight.T).to(h.dtype)
        if end > max(blocks) and not chained:
            break
    return layout.model


def fit_map(
    cut: Cut, before: Float[Tensor, "n length d_model"], after: Float[Tensor, "n length d_model"]
) -> Float[Tensor, "d_model d_model"]:
    """The map of the stream before a span to that after it."""
    x, y = before.flatten(0, 1).double(), after.flatten(0, 1).double()
    d_model = x.shape[1]
    if cut not in (Cut.linearpatch, Cut.rotated):
        return LeastSquares(d_model, d_model).update(x, y).solution(intercept=False, ridge=RIDGE)[0]
    basis = hadamard(d_model) if cut == Cut.rotated else torch.eye(d_model).double()
    ratio = (y @ basis).abs().mean(0) / (x @ basis).abs().mean(0)
    return basis @ ratio.diag() @ basis.T


def hadamard(order: int) -> Float[Tensor, "order order"]:
    """A Hadamard matrix over the root of its order, which must be a product of 2s and 12s."""
    signs = np.full(11, -1)  # by Paley: which numbers are squares modulo 11
    signs[np.arange(11) ** 2 % 11] = 1
    paley = np.ones((12, 12))
    paley[1:, 0], paley[1:, 1:] = -1, circulant(signs)
    matrix, left = np.ones((1, 1)), order
    for size, factor in ((12, paley), (2, np.array([[1, 1], [1, -1]]))):
        while left % size == 0:
            matrix, left = np.kron(matrix, factor), left // size
    if left > 1:
        raise InputError(f"d_model must be a product of 2s and 12s for rotated, got {order}.")
    return torch.from_numpy(matrix / np.sqrt(order))


def insert_map(layout: Any, block: nn.Module, weight: Float[Tensor, "d_model d_model"]) -> None:
    """Pass the stream after a block through a map.

    It becomes a part of the output module of the block's FFN, so that healing trains both.
    """
    width, model = len(weight), layout.model
    linear = nn.Linear(width, width, bias=False, device=model.device, dtype=model.dtype)
    linear.weight = nn.Parameter(weight.to(linear.weight))
    layout.writer_of(block).add_module("jump", linear)

    def mapped(_: nn.Module, __: Any, output: Any) -> Any:
        return linear(output) if isinstance(output, Tensor) else (linear(output[0]), *output[1:])

    block.register_forward_hook(mapped)


def _multiply(layout: Any, block: nn.Module, weight: Tensor) -> None:
    """Multiply the output of a block's FFN by a matrix."""
    bias = layout.writer_of(block).bias
    bias = None if bias is None else weight @ bias.detach().double()
    layout.write(block, weight @ layout.weight_of(block).detach().double(), bias)
