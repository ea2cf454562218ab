"""Computations on plain tensors: float64 on every device, products, log-probabilities, largest entries."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.errors import InputError, check_int, checked, short

WITHOUT_FLOAT64 = frozenset({"mps"})  # types of devices


def find_device(device: Any) -> torch.device:
    """The device of this name, once a tensor has been made on it.

    Raises
    ------
    ValueError
        There is no such device here, and the message is PyTorch's; whoever asked has words of its own.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(str(error)) from error
    return found


def has_float64(device: torch.device) -> bool:
    """Whether numbers on a device can be in float64."""
    return device.type not in WITHOUT_FLOAT64


def in_float64(x: Tensor) -> Tensor:
    """The same numbers in float64: on their device, or on the CPU where it has no float64.

    Combine other tensors with them as: ``other.to(in_float64(x).device)``.
    """
    return (x if has_float64(x.device) else x.cpu()).double()


def check_float64_device(device: Any) -> torch.device:
    """Read a device that is to compute in float64.

    Raises
    ------
    InputError
        There is no such device here, or it has no float64.
    """
    try:
        found = find_device(device)
    except ValueError as error:
        raise InputError(f"The device {short(device)} cannot be used here. Expected cpu or cuda.") from error
    if not has_float64(found):
        raise InputError(f"The device {found} has no float64, in which maps are fitted. Expected cpu, cuda.")
    return found


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


def log_softmax(logits: Float[Tensor, "*n d_vocab"]) -> Float[Tensor, "*n d_vocab"]:
    """``ln softmax(logits)`` over the last dimension.

    `torch.log_softmax` in float32 on the CPU adds the exponentials one after another: for 262,144 tokens all
    its values are too large by about 3e-5, always in the same direction. `torch.logsumexp` is exact to 1e-6.
    """
    return logits - logits.logsumexp(-1, keepdim=True)


def kl_divergence(
    log_p: Float[Tensor, "*n d_vocab"], log_q: Float[Tensor, "*n d_vocab"]
) -> Float[Tensor, " *n"]:
    """``KL(p || q)`` in nats, from the log-probabilities of both; tokens with ``p = 0`` add nothing."""
    p = log_p.exp()
    return torch.where(p == 0, torch.zeros_like(p), p * (log_p - log_q)).sum(-1)


_FEW = 16  # numbers in a group that are not worth it


def largest(scores: Float[Tensor, "n m"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The ``k`` largest numbers of each row and where they stand, the largest first, as by `torch.topk`.

    They are in the ``k`` groups whose largest numbers are largest, so only these are ordered. Of equal
    numbers any may be taken.
    """
    n, m = scores.shape
    # As many groups as there are numbers in k of them, or up to twice as many.
    n_groups = 2 ** math.ceil(math.log2(max(k * m, 1)) / 2)
    whole = m // n_groups * n_groups
    if whole < _FEW * n_groups or 4 * k > n_groups:
        top = scores.topk(k)
        return top.values, top.indices
    # A group has every n_groups-th number of a row.
    groups = scores[:, :whole].unflatten(1, (-1, n_groups)).amax(1).topk(k).indices
    steps = torch.arange(0, whole, n_groups, device=scores.device)
    rest = torch.arange(whole, m, device=scores.device).expand(n, -1)
    places = torch.cat([(groups[:, :, None] + steps).flatten(1), rest], 1)
    values, order = scores.gather(1, places).topk(k)
    return values, places.gather(1, order)


def give_back_freed() -> bool:
    """Return memory that was freed between what is in use to the system; False where the C library cannot.

    glibc keeps it for later allocations. Where large arrays of several sizes come and go, that is half of a
    process, and more with every round. It takes milliseconds.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc: musl, macOS, Windows
        return False
    trim(0)
    return True
