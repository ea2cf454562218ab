"""Devices that are here, and float64 on every one: on the CPU for those that have none, as Apple's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from matlens.errors import InputError, short

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

    What is put beside them has to come after them: ``other.to(in_float64(x).device)``.
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
