"""Float64 on every device: on the CPU for those that have none, as Apple's."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})  # types of devices


def has_float64(device: torch.device) -> bool:
    """Whether numbers on a device can be in float64."""
    return device.type not in WITHOUT_FLOAT64


def in_float64(x: Tensor) -> Tensor:
    """The same numbers in float64: on their device, or on the CPU where it has no float64.

    What is put beside them has to come after them: ``other.to(in_float64(x).device)``.
    """
    return (x if has_float64(x.device) else x.cpu()).double()
