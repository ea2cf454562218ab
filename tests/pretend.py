"""Devices that are not there: tensors that say they lie on one, and are refused what it would refuse.

Their numbers lie on the CPU. What PyTorch refuses is refused: two devices in one operation, a tensor of
another device as numpy, and float64, where the devices are to lack it as Apple's `mps` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from matlens import numerics

FIRST, SECOND = torch.device("lazy", 0), torch.device("lazy", 1)  # a type that needs no set-up
_NO_FLOAT64 = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
_narrow: set[torch.device] = set()  # devices without float64
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)
_MOVING = (_aten._to_copy.default, _aten.copy_.default, _aten.copy.default)


class Placed(Tensor):
    """A tensor that says it lies on another device."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device) -> Placed:
        made: Any = Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=device, requires_grad=False,
        )  # fmt: skip
        made.numbers = numbers
        return made

    def tolist(self) -> Any:
        """The numbers, as from any device."""
        return self.numbers.tolist()

    def data_ptr(self) -> int:
        """Where the numbers are, by which tied weights are known."""
        return self.numbers.data_ptr()

    def __repr__(self) -> str:
        return f"Placed({self.numbers!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Devices(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    asked = kwargs.get("device")
    if asked is None and not any(isinstance(tensor, Placed) for tensor in given):
        return func(*args, **kwargs)
    device = _device(func, args, kwargs, given)
    wide = kwargs.get("dtype") == torch.float64 or any(tensor.dtype == torch.float64 for tensor in given)
    if wide and any(tensor.device in _narrow for tensor in given):
        raise TypeError(_NO_FLOAT64)
    args, kwargs = pytree.tree_map_only(Placed, lambda tensor: tensor.numbers, (args, dict(kwargs)))
    if asked is not None:
        kwargs["device"] = _CPU
    results = func(*args, **kwargs)
    if func._schema.is_mutable:
        changed = {id(_numbers(tensor)): tensor for tensor in given}
        return pytree.tree_map_only(Tensor, lambda result: changed.get(id(result), result), results)
    if device == _CPU:
        return results
    return pytree.tree_map_only(Tensor, lambda result: _placed(result, device), results)


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.numbers if isinstance(tensor, Placed) else tensor


def _placed(numbers: Tensor, device: torch.device) -> Placed:
    if device in _narrow and numbers.dtype == torch.float64:
        raise TypeError(_NO_FLOAT64)
    return Placed(numbers, device)


def _device(func: Any, args: Any, kwargs: Mapping[str, Any], given: list[Tensor]) -> torch.device:
    """Where the result lies; as strict as PyTorch is."""
    if func in _MOVING:
        return torch.device(kwargs.get("device") or given[0].device)
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    if func in _INDEXING:  # indices may lie on the CPU
        given = [
            args[0],
            *(index for index in args[1] if index is not None and index.device != _CPU),
            *args[2:3],
        ]
    places = {tensor.device for tensor in given if tensor.ndim or tensor.device != _CPU}
    if len(places) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {sorted(map(str, places))} in {func}."
        )
    return places.pop() if places else _CPU


class _NoGradients:
    """What `torch.inference_mode` becomes, which knows no tensors without numbers of their own."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)

    def __exit__(self, *failure: Any) -> None:
        torch.set_grad_enabled(self._before)


@contextmanager
def devices(*, without_float64: bool = False) -> Iterator[None]:
    """For as long as the context lasts there are both devices."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is made here, and then moved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.inference_mode, "__enter__", _NoGradients.__enter__)
        patch.setattr(torch.inference_mode, "__exit__", _NoGradients.__exit__)
        if without_float64:
            _narrow.update((FIRST, SECOND))
            patch.setattr(numerics, "WITHOUT_FLOAT64", frozenset({FIRST.type}))
        try:
            with _Devices():
                yield
        finally:
            _narrow.clear()
            torch._C._set_only_lift_cpu_tensors(before)


def place(module: nn.Module, device: torch.device) -> None:
    """Put a module's weights on a device, in place."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(Placed(weight.detach(), device), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Placed(buffer, device)
