"""Products as exact as in float64 from multiplications in float32, for devices that are slow in float64.

Each factor is split into slices of eight bits, which are whole numbers after scaling. A product of two slices
over at most 256 rows is then a sum of whole numbers below ``2^24``, which float32 holds without rounding, in
any order of addition; the sums are added up in float64.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, check_int, checked
from matlens.numerics.precision import in_float64

_BITS = 8  # of a slice
_ROWS = 256  # 2^(24 - 2 * 8)
SLICES = 6  # 48 bits of each factor


@checked
def split_product(
    a: Float[Tensor, "n k"], b: Float[Tensor, "n m"], *, slices: int = SLICES
) -> Float[Tensor, "k m"]:
    """Give ``a.T @ b`` in float64, by ``slices (slices + 1) / 2`` products in float32.

    An entry is off by no more than ``n * slices * 2^(2 - 8 * slices)`` times the largest numbers of both
    columns.

    Parameters
    ----------
    a, b
        The factors, finite and on one device.
    slices
        Of how many slices each factor is made: six are 48 bits.

    Raises
    ------
    InputError
        The factors have different numbers of rows, or there is no slice.
    """
    slices = check_int(slices, "slices", min=1, max=SLICES)
    if len(a) != len(b):
        raise InputError(f"The factors have {len(a)} and {len(b)} rows. Expected as many in both.")
    scales = [_scale(x) for x in (a, b)]
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device=scales[0].device)
    for start in range(0, len(a), _ROWS):
        parts = [
            _slices(in_float64(x[start : start + _ROWS]) / scale, slices)
            for x, scale in zip((a, b), scales, strict=True)
        ]
        for order in reversed(range(slices)):  # the least first
            weight = 2.0 ** (-_BITS * (order + 2))
            for i in range(order + 1):
                total += weight * (parts[0][i].T @ parts[1][order - i]).double()
    return scales[0][0, :, None] * total * scales[1]


def _scale(x: Tensor) -> Tensor:
    """A power of two for each column that is no less than its numbers."""
    largest = in_float64(x.abs().amax(0, keepdim=True) if len(x) else x.new_ones(1, x.shape[1]))
    return torch.exp2(torch.where(largest > 0, largest, 1.0).log2().ceil())


def _slices(x: Tensor, n: int) -> list[Tensor]:
    """Whole numbers of at most ``2^8`` whose sum, each scaled by ``2^-8`` more, is ``x``."""
    made = []
    for _ in range(n):
        x = x * 2.0**_BITS
        made.append(x.round())
        x = x - made[-1]
    return [part.float() for part in made]
