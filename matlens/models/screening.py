"""Exact top tokens and ranks without computing every logit in full precision.

All logits are computed once in a precision that is quick, with a bound on their error. What the bound does
not settle, a few tokens in fifty thousand, is computed in float64.
"""

from __future__ import annotations

import time

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from matlens.numerics import has_float64

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
        self._state = _state(unembed)
        exact = self._weight.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
        self._halved = exact and self._bias is None and _bfloat16_is_quicker(self._weight)
        self._quick = self._weight.bfloat16() if self._halved else self._weight
        self._longest = float(self._weight.norm(dim=1).max())
        # Whether the product rounds its inputs to fewer digits.
        self._rounded = 0.0 if exact else 2.0**-7 * self._longest
        if self._halved:
            parts = zip(self._weight.split(_TOGETHER), self._quick.split(_TOGETHER), strict=True)
            self._rounded = max(float((quick - full).norm(dim=1).max()) for full, quick in parts)
        # d products are added up, in any order, and the sum is rounded to bfloat16.
        self._summed = (self._weight.shape[1] + 2) * 2.0**-23
        self._relative = 2.0**-8 if self._halved else 2.0**-22

    @staticmethod
    def suits(module: nn.Module) -> bool:
        """Whether a module is a plain linear layer without hooks."""
        if type(module) is not nn.Linear or module.weight.dtype != torch.float32:
            return False
        hung = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        return not hung and not parametrize.is_parametrized(module)

    def holds(self, unembed: nn.Linear) -> bool:
        """Whether weights and bias are those that the copy was made of."""
        return self._state == _state(unembed)

    def takes(self, x: Float[Tensor, "n d"]) -> bool:
        """Whether no logit of these features can overflow."""
        return not len(x) or bool(x.norm(dim=1).max() * max(self._longest, 1) < _LARGEST)

    def top(self, x: Float[Tensor, "n d"]) -> Int[Tensor, " n"]:
        """The token with the highest logit for each row, the first of equals."""
        return self._top(x, *self._logits(x))

    def top_and_rank(
        self, x: Float[Tensor, "n d"], ids: Int[Tensor, " n"]
    ) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """The top token of each row, and how many tokens have a higher logit than the given one."""
        logits, highest, error = self._logits(x)
        rows = torch.arange(len(x), device=x.device)
        given = self._in_full(x, rows, ids).float()
        reach = _SLACK * (error + self._relative * given.abs())
        row, token, value = self._reaching(logits, highest, given - reach)
        above = value > (given + reach)[row]
        rank = torch.zeros_like(ids).index_add_(0, row[above], torch.ones_like(row[above]))
        row, token = row[~above], token[~above]
        value = self._in_full(x, row, token)
        exact = value.new_zeros(len(x)).index_put_((row[targets := token == ids[row]],), value[targets])
        above = value > exact[row]
        rank.index_add_(0, row[above], torch.ones_like(row[above]))
        return self._top(x, logits, highest, error), rank

    def _top(self, x: Tensor, logits: Tensor, highest: Tensor, error: Tensor) -> Tensor:
        most = highest.amax(1)
        reach = 2 * _SLACK * (error + self._relative * most.abs())
        row, token, _ = self._reaching(logits, highest, most - reach)
        # The first of equals: candidates come in the order of tokens.
        count = torch.bincount(row, minlength=len(x))
        top = torch.zeros_like(count).index_put_((row,), token)
        several = count[row] > 1
        row, token = row[several], token[several]
        value = self._in_full(x, row, token)
        best = value.new_full((len(x),), -torch.inf).scatter_reduce(0, row, value, "amax")
        on_top = value == best[row]
        first = torch.full_like(top, len(self._weight)).scatter_reduce(0, row[on_top], token[on_top], "amin")
        return torch.where(count > 1, first, top)

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All logits quickly, the highest of each block of tokens, and a bound on the error for each row.

        Besides the bound, a logit may be off by ``relative`` of itself.
        """
        quick = x.to(self._quick.dtype)
        logits = (
            quick @ self._quick.T if self._bias is None else nn.functional.linear(x, self._quick, self._bias)
        )
        whole = logits.shape[1] // _BLOCK * _BLOCK
        blocks = logits[:, :whole].unflatten(1, (-1, _BLOCK)).amax(2)
        rest = logits[:, whole:]
        highest = torch.cat([blocks, rest.amax(1, keepdim=True)], 1) if rest.shape[1] else blocks
        length, lost = quick.float().norm(dim=1), (quick.float() - x).norm(dim=1)
        longest = self._longest + self._rounded
        largest = longest * length + (0.0 if self._bias is None else float(self._bias.abs().max()))
        error = self._rounded * length + self._longest * lost + self._summed * largest
        return logits, highest.float(), error

    def _reaching(self, logits: Tensor, highest: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, tokens and approximate logits of entries of at least ``least`` of the row."""
        row, block = (highest >= least[:, None]).nonzero(as_tuple=True)
        n_whole = logits.shape[1] // _BLOCK
        blocks, in_rest = logits[:, : n_whole * _BLOCK].unflatten(1, (n_whole, _BLOCK)), block == n_whole
        parts = [
            (rows, of_rows, blocks[rows, of_rows])
            for rows, of_rows in zip(
                row[~in_rest].split(_TOGETHER), block[~in_rest].split(_TOGETHER), strict=True
            )
        ]
        parts.append((row[in_rest], block[in_rest], logits[row[in_rest], n_whole * _BLOCK :]))
        reaching = []
        for rows, of_rows, values in parts:
            values = values.float()
            which, within = (values >= least[rows, None]).nonzero(as_tuple=True)
            reaching.append((rows[which], of_rows[which] * _BLOCK + within, values[which, within]))
        rows, tokens, of_tokens = zip(*reaching, strict=True)
        return torch.cat(rows), torch.cat(tokens), torch.cat(of_tokens)

    def _in_full(self, x: Tensor, row: Tensor, token: Tensor) -> Tensor:
        """Logits of some tokens, in float64 where the device has it."""
        precision = torch.float64 if has_float64(x.device) else torch.float32
        values = [x.new_empty(0, dtype=precision)]
        for rows, tokens in zip(row.split(_TOGETHER), token.split(_TOGETHER), strict=True):
            product = (self._weight[tokens].to(precision) * x[rows].to(precision)).sum(1)
            values.append(product if self._bias is None else product + self._bias[tokens].to(precision))
        return torch.cat(values)


def _state(unembed: nn.Linear) -> tuple[tuple[int, int], ...]:
    parts = [unembed.weight] if unembed.bias is None else [unembed.weight, unembed.bias]
    return tuple((part.data_ptr(), part._version) for part in parts)


def _bfloat16_is_quicker(weight: Tensor) -> bool:
    """Whether this CPU multiplies faster in bfloat16 than in float32.

    The result is the same either way, so timing only affects speed.
    """
    some, x = weight[:_TOKENS], torch.ones(_ROWS, weight.shape[1])
    times = []
    for dtype in (torch.bfloat16, torch.float32):
        e, of_dtype = some.to(dtype), x.to(dtype)
        of_dtype @ e.T  # the first time some code is made
        seconds = []
        for _ in range(_TRIES):
            start = time.perf_counter()
            of_dtype @ e.T
            seconds.append(time.perf_counter() - start)
        times.append(min(seconds))
    return times[0] < times[1]
