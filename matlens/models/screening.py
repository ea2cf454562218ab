"""Exact top tokens and ranks without computing every logit in full precision.

All logits are computed once in a quick precision, with a bound on their error. What the bound does not
settle, a few tokens in fifty thousand, is computed in float64.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from matlens.numerics import has_float64, product_eps

_BLOCK = 1024  # tokens whose highest logit is looked at before each of theirs
_TOGETHER = 4096  # logits that are computed in float64 together
_SLACK = 1.02  # on bounds, for their own rounding
_ROWS, _TOKENS, _TRIES = 64, 4096, 3  # of the product that compares precisions
_LARGEST = 1e30  # products up to this size do not overflow


class Screen:
    """An unembedding, and a copy in the quicker precision; ``x -> E x + b`` for features ``x``."""

    def __init__(self, unembed: nn.Linear) -> None:
        self._weight = unembed.weight.detach()
        # TransformerLens gives a bias of zeros to a layer that has none.
        biased = unembed.bias is not None and bool(unembed.bias.any())
        self._bias = unembed.bias.detach() if biased else None
        on_cpu = self._weight.device.type == "cpu"
        halved = on_cpu and self._bias is None and _bfloat16_is_quicker(self._weight)
        self._quick = self._weight.bfloat16() if halved else self._weight
        self._longest = float(self._weight.norm(dim=1).max())
        self._rounded = 0.0  # by the quick precision, the row that it changes most
        if halved:
            parts = zip(self._weight.split(_TOGETHER), self._quick.split(_TOGETHER), strict=True)
            self._rounded = max(float((quick - full).norm(dim=1).max()) for full, quick in parts)
        # d products are added up, in any order, and the sum is rounded to bfloat16.
        self._summed = (self._weight.shape[1] + 2) * 2.0**-23
        self._relative = 2.0**-8 if halved else 2.0**-22

    @staticmethod
    def suits(module: nn.Module) -> bool:
        """Whether a module is a plain linear layer without hooks."""
        if type(module) is not nn.Linear or module.weight.dtype != torch.float32:
            return False
        hung = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        return not hung and not parametrize.is_parametrized(module)

    def fits(self, x: Float[Tensor, "n d"]) -> bool:
        """Whether no logit of these features can overflow."""
        return not len(x) or bool(x.norm(dim=1).max() * max(self._longest, 1) < _LARGEST)

    def top_and_rank(
        self, x: Float[Tensor, "n d"], ids: Int[Tensor, " n"] | None
    ) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"] | None]:
        """The first token with the highest logit of each row, and how many are above the given one."""
        logits, error = self._logits(x)
        top = self._top(x, logits, error)
        return top, None if ids is None else self._rank(x, logits, error, ids)

    def _top(self, x: Tensor, logits: Tensor, error: Tensor) -> Tensor:
        blocks = torch.stack([block.amax(1) for block in logits.split(_BLOCK, 1)], 1)
        highest = blocks.amax(1).float()
        lowest = _down(highest - 2 * _SLACK * (error + self._relative * highest.abs()), logits)[:, None]
        row, block = (blocks >= lowest).nonzero(as_tuple=True)
        token = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=x.device)
        token.clamp_(max=logits.shape[1] - 1)  # the last token several times does no harm
        near = logits[row[:, None], token] >= lowest[row]
        row, token = row[near.nonzero()[:, 0]], token[near]
        value = self._in_full(x, row, token)
        best = value.new_full((len(x),), -torch.inf).scatter_reduce(0, row, value, "amax")
        on_top = value == best[row]
        first = torch.full((len(x),), len(self._weight), device=x.device)
        return first.scatter_reduce(0, row[on_top], token[on_top], "amin")

    def _rank(self, x: Tensor, logits: Tensor, error: Tensor, ids: Tensor) -> Tensor:
        given = self._in_full(x, torch.arange(len(x), device=x.device), ids)
        reach = _SLACK * (error + self._relative * given.float().abs())
        lowest, highest = _down(given.float() - reach, logits), -_down(-(given.float() + reach), logits)
        surely = logits > highest[:, None]
        row, token = _places((logits >= lowest[:, None]) & ~surely)
        above = self._in_full(x, row, token) > given[row]
        # A token is not above itself, whatever the order of additions.
        above &= token != ids[row]
        return _count(surely).index_add_(0, row[above], torch.ones_like(row[above]))

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All logits, and a bound on the error for each row, in addition to ``relative`` of each logit."""
        quick = x.to(self._quick.dtype)
        logits = nn.functional.linear(quick, self._quick, self._bias)
        length, lost = quick.float().norm(dim=1), (quick.float() - x).norm(dim=1)
        largest = (self._longest + self._rounded) * length
        if self._bias is not None:
            largest = largest + self._bias.abs().max()
        # Both factors are rounded in TF32. Those in bfloat16 already are.
        reduced = product_eps(quick.dtype) if quick.dtype == torch.float32 else 0.0
        return logits, self._rounded * length + self._longest * lost + (self._summed + reduced) * largest

    def _in_full(self, x: Tensor, row: Tensor, token: Tensor) -> Tensor:
        """Logits of some tokens, in float64 where the device has it."""
        precision = torch.float64 if has_float64(x.device) else torch.float32
        values = [x.new_empty(0, dtype=precision)]
        for rows, tokens in zip(row.split(_TOGETHER), token.split(_TOGETHER), strict=True):
            product = (self._weight[tokens].to(precision) * x[rows].to(precision)).sum(1)
            values.append(product if self._bias is None else product + self._bias[tokens].to(precision))
        return torch.cat(values)


def _places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the true entries; NumPy finds them much faster than torch."""
    if mask.device.type != "cpu":
        rows, columns = mask.nonzero(as_tuple=True)
        return rows, columns
    places = torch.from_numpy(np.flatnonzero(mask.numpy()))
    return places // mask.shape[1], places % mask.shape[1]


def _count(mask: Tensor) -> Tensor:
    return mask.sum(1) if mask.device.type != "cpu" else torch.from_numpy(np.count_nonzero(mask.numpy(), 1))


def _down(bound: Tensor, like: Tensor) -> Tensor:
    """A bound in the precision of logits, rounded down."""
    return torch.nextafter(bound.to(like.dtype), torch.full_like(bound, -torch.inf).to(like.dtype))


def _bfloat16_is_quicker(weight: Tensor) -> bool:
    """Whether this CPU multiplies faster in bfloat16 than in float32; the result is the same."""
    times = []
    for dtype in (torch.bfloat16, torch.float32):
        e, x = weight[:_TOKENS].to(dtype), torch.ones(_ROWS, weight.shape[1], dtype=dtype)
        of_dtype = []
        for _ in range(1 + _TRIES):  # the first time some code is made
            start = time.perf_counter()
            x @ e.T
            of_dtype.append(time.perf_counter() - start)
        times.append(min(of_dtype[1:]))
    return times[0] < times[1]
