"""How long a command is going to take on this machine, said before the work."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from matlens import parallel

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_SIDE = 1024  # of the square matrices whose product is timed
_SHARE = 0.6  # of the speed of such products that whole models reach, as measured on SmolLM2-135M
_WORTH_SAYING = 30  # seconds


def print_expected(model: TransformerBridge, operations: float, thorough: str = "") -> None:
    """Print on stderr about how long so many floating-point operations take where the model is.

    ``thorough`` is what less or more of it is asked for by.
    """
    seconds = operations / (_SHARE * _operations_per_second(model))
    if parallel.is_main() and seconds > _WORTH_SAYING:
        more = f" ({thorough})" if thorough else ""
        print(f"This takes about {duration(seconds)} on this machine{more}.", file=sys.stderr)


def duration(seconds: float) -> str:
    """A time in words, to one digit or two."""
    for unit, length in (("hour", 3600), ("minute", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}s"
    return "a minute" if seconds > 45 else f"{seconds:.0f} seconds"


def _operations_per_second(model: TransformerBridge) -> float:
    """The best of ten products of matrices in the precision of the model."""
    import torch

    weight = next(model.parameters())
    side = torch.rand(_SIDE, _SIDE, device=weight.device, dtype=weight.dtype)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        float((side @ side)[0, 0])  # which waits for a GPU
        best = min(best, time.perf_counter() - began)
    return float(2 * _SIDE**3 / best)
