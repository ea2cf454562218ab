"""Devices are tried before they are used, and float64 is found on each, also on one that refuses it."""

from __future__ import annotations

from typing import Any

import pretend
import pytest
import torch

from matlens.errors import InputError
from matlens.numerics import precision
from matlens.numerics.precision import check_float64_device, find_device, has_float64, in_float64


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_a_device_that_is_here_is_found(device: str | torch.device) -> None:
    assert find_device(device) == torch.device(device)


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "cpu:cpu", "", None, 1.5])
def test_a_device_that_is_not_here_is_no_device_to_any_who_ask(device: Any) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        find_device(device)
    assert not isinstance(refused.value, InputError)  # whoever asked has words of its own
    with pytest.raises(InputError, match="cannot be used here"):
        check_float64_device(device)


def test_a_device_to_compute_in_float64_on_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_float64_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", frozenset({"cpu"}))
    with pytest.raises(InputError, match="cpu has no float64"):
        check_float64_device("cpu")


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
