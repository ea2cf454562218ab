"""Float64 is found on every device, also on one that refuses it."""

from __future__ import annotations

import pretend
import pytest
import torch

from matlens.numerics.precision import has_float64, in_float64


def test_a_device_without_float64_refuses_it_and_its_numbers_are_taken_to_the_cpu() -> None:
    with pretend.devices(without_float64=True):
        x = torch.tensor([0.1, 2.0], device=pretend.FIRST)
        for asked in (
            lambda: x.double(),
            lambda: x.to("cpu", torch.float64),
            lambda: torch.zeros(3, dtype=torch.float64).to(x.device),
            lambda: x.new_zeros(2, dtype=torch.float64),
            lambda: torch.zeros(2, dtype=torch.float64).copy_(x),
        ):
            with pytest.raises(TypeError, match="float64"):
                asked()
        wide = in_float64(x)
    assert wide.dtype == torch.float64
    assert wide.device == torch.device("cpu")
    assert wide.tolist() == torch.tensor([0.1, 2.0]).tolist()


def test_other_devices_keep_their_numbers() -> None:
    with pretend.devices():
        assert in_float64(torch.ones(2, device=pretend.SECOND)).device == pretend.SECOND
    assert has_float64(torch.device("cuda", 1))
    assert not has_float64(torch.device("mps"))
