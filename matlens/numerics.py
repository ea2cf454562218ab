"""Numerics on tensors: float64 on every device, precision of products, log-probabilities, top-k."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.errors import InputError, checked, short

WITHOUT_FLOAT64 = frozenset({"mps"})  # types of devices
_AUTOCAST = ("cpu", "cuda", "mps", "xpu")
_EXACT = ("ieee", "none")  # settings of float32 products


def find_device(device: Any) -> torch.device:
    """The device of this name; raises InputError if no tensor can be made on it."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"device must be available on this machine, got {short(device)}: {error}") from error
    return found


def has_float64(device: torch.device) -> bool:
    """Whether tensors on a device can be in float64."""
    return device.type not in WITHOUT_FLOAT64


def in_float64(x: Tensor) -> Tensor:
    """The same values in float64: on their device, or on the CPU where it has no float64.

    Combine other tensors with them as: ``other.to(in_float64(x).device)``.
    """
    return (x if has_float64(x.device) else x.cpu()).double()


def check_float64_device(device: Any) -> torch.device:
    """Parse a device for float64 computation; raises InputError if there is none."""
    found = find_device(device)
    if not has_float64(found):
        raise InputError(f"device must support float64 for fits, got {found}. Use cpu or cuda.")
    return found


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute float32 in float32, also inside `torch.autocast`; a context or a decorator."""
    with ExitStack() as stack:
        for device in _AUTOCAST:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def product_eps(dtype: torch.dtype) -> float:
    """The rounding of factors in a matmul: that of their dtype, or more if torch may reduce float32.

    TF32 is a setting of the user (``torch.set_float32_matmul_precision``), which matlens does not change.
    """
    if dtype == torch.float32 and _reduces_float32():
        dtype = torch.bfloat16
    return torch.finfo(dtype).eps


def _reduces_float32() -> bool:
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):  # before torch 2.9
        return torch.get_float32_matmul_precision() != "highest"
    return any(each.matmul.fp32_precision not in _EXACT for each in (backends.mkldnn, backends.cuda))


def all_finite(x: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # A sum is not finite if a term is not, and is quicker than looking at each. It may overflow itself.
    x = x.to(torch.bfloat16) if x.is_floating_point() and x.element_size() == 1 else x  # FP8 has no sums
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def check_finite(vectors: Tensor, place: str) -> None:
    """Raise InputError for vectors that a model has overflowed to."""
    if not all_finite(vectors):
        raise InputError(
            f"The vectors at {place} are not finite. In float16 activations overflow past 65504: run the "
            "model in bfloat16 or float32."
        )


_BITS = 8  # of a slice
_ROWS = 256  # 2^(24 - 2 * 8)
_SLICES = 6  # 48 bits of each factor


@checked
@without_autocast()
def split_product(a: Float[Tensor, "n k"], b: Float[Tensor, "n m"]) -> Float[Tensor, "k m"]:
    """``a.T @ b`` in float64, by products in float32 of slices of 8 bits, which are exact, also in TF32.

    An entry is off by no more than ``n * 6 * 2^-46`` times the largest values of both columns.
    """
    scales = [_scale(x) for x in (a, b)]
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device=scales[0].device)
    for start in range(0, len(a), _ROWS):
        parts = [
            _slices(in_float64(x[start : start + _ROWS]) / scale)
            for x, scale in zip((a, b), scales, strict=True)
        ]
        for order in reversed(range(_SLICES)):  # the smallest first
            weight = 2.0 ** (-_BITS * (order + 2))
            for i in range(order + 1):
                total += weight * (parts[0][i].T @ parts[1][order - i]).double()
    return scales[0][0, :, None] * total * scales[1]


def _scale(x: Tensor) -> Tensor:
    """For each column, a power of two that bounds its values."""
    largest = in_float64(x.abs().amax(0, keepdim=True) if len(x) else x.new_ones(1, x.shape[1]))
    return torch.exp2(torch.where(largest > 0, largest, 1.0).log2().ceil())


def _slices(x: Tensor) -> list[Tensor]:
    """Integers of at most ``2^8`` whose sum, each scaled by ``2^-8`` more, is ``x``."""
    made = []
    for _ in range(_SLICES):
        x = x * 2.0**_BITS
        made.append(x.round())
        x = x - made[-1]
    return [part.float() for part in made]


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Record gradients, also inside `torch.no_grad` or `torch.inference_mode`.

    Tensors made inside can be trained; those that come from inference mode must be copied first.
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield


def log_softmax(logits: Float[Tensor, "*n d_vocab"]) -> Float[Tensor, "*n d_vocab"]:
    """``ln softmax(logits)`` over the last dimension, in float32 for logits in half precision.

    `torch.log_softmax` in float32 on the CPU adds the exponentials one after another: for 262,144 tokens all
    its values are too large by about 3e-5, always in the same direction. `torch.logsumexp` is exact to 1e-6.
    """
    logits = _at_least_float32(logits)
    logits = logits - logits.amax(-1, keepdim=True).detach()  # else large logits are rounded off
    return logits - logits.logsumexp(-1, keepdim=True)


def kl_divergence(
    log_p: Float[Tensor, "*n d_vocab"], log_q: Float[Tensor, "*n d_vocab"]
) -> Float[Tensor, " *n"]:
    """``KL(p || q)`` in nats, from log-probabilities; at least in float32."""
    log_p, log_q = _at_least_float32(log_p), _at_least_float32(log_q)
    p = log_p.exp()
    return torch.where(p == 0, torch.zeros_like(p), p * (log_p - log_q)).sum(-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


_FEW = 16  # values in a group, below which topk is quicker


def largest(scores: Float[Tensor, "n m"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The ``k`` largest values of each row and their indices, as `torch.topk`.

    They are in the ``k`` groups whose largest values are largest, so only these are sorted. Of equal values
    any may be taken.
    """
    n, m = scores.shape
    # As many groups as there are values in k of them, or up to twice as many.
    n_groups = 2 ** math.ceil(math.log2(max(k * m, 1)) / 2)
    whole = m // n_groups * n_groups
    if whole < _FEW * n_groups or 4 * k > n_groups:
        top = scores.topk(k)
        return top.values, top.indices
    # A group has every n_groups-th value of a row.
    groups = scores[:, :whole].unflatten(1, (-1, n_groups)).amax(1).topk(k).indices
    steps = torch.arange(0, whole, n_groups, device=scores.device)
    rest = torch.arange(whole, m, device=scores.device).expand(n, -1)
    places = torch.cat([(groups[:, :, None] + steps).flatten(1), rest], 1)
    values, order = scores.gather(1, places).topk(k)
    return values, places.gather(1, order)


def return_freed_memory() -> bool:
    """Return memory that was freed to the system; False where the C library cannot.

    glibc keeps it for later allocations: half of a process where large arrays of several sizes come and go.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc: musl, macOS, Windows
        return False
    trim(0)
    return True
