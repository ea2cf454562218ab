"""Matrix products in the precision of their factors, regardless of torch's settings.

``torch.autocast`` and torch's settings for float32 products let a float32 model compute in half precision
without a trace in its weights. matlens' own computations ignore them: to run in half precision, load the
model in it. Passes that the user runs are not affected.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_DEVICES = ("cpu", "cuda", "mps", "xpu")
_EXACT = ("ieee", "none")
_LOCK = threading.Lock()
_inside = threading.local()
_holders = 0  # threads that are inside; the settings are those of all
_before: list[tuple[Any, str]] = []  # settings that were changed, and their values


def is_reduced() -> bool:
    """Whether products would be of less precision than their factors, but for `own_precision`."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "backends") or getattr(_inside, "depth", False):
        return False
    return bool(_autocast(torch)) or _holders > 0 or any(_value(s) not in _EXACT for s in _switches(torch))


@contextmanager
def own_precision() -> Iterator[None]:
    """Compute in the precision of the factors inside the context."""
    if not is_reduced():
        yield
        return
    torch = sys.modules["torch"]
    with ExitStack() as stack:
        for device in _autocast(torch):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_exact_products(torch))
        _inside.depth = True
        try:
            yield
        finally:
            _inside.depth = False


@contextmanager
def _exact_products(torch: Any) -> Iterator[None]:
    """Change the settings, which are those of the whole process, until the last thread has left."""
    global _holders
    with _LOCK:
        _holders += 1
        if _holders == 1:
            for switch in _switches(torch):  # the one that the others follow comes first
                if _value(switch) not in _EXACT:
                    _before.append((switch, _value(switch)))
                    _turn(switch, "ieee")
    try:
        yield
    finally:
        with _LOCK:
            _holders -= 1
            while not _holders and _before:
                _turn(*_before.pop())


def _autocast(torch: Any) -> list[str]:
    return [device for device in _DEVICES if torch.is_autocast_enabled(device)]


def _switches(torch: Any) -> tuple[Any, ...]:
    backends = torch.backends
    if not hasattr(backends, "fp32_precision"):  # before torch 2.9
        return (torch,)
    return (backends, backends.mkldnn.matmul, backends.cuda.matmul)


def _value(switch: Any) -> str:
    if hasattr(switch, "get_float32_matmul_precision"):
        precision = str(switch.get_float32_matmul_precision())
        return "ieee" if precision == "highest" else precision
    return str(switch.fp32_precision)


def _turn(switch: Any, value: str) -> None:
    if hasattr(switch, "get_float32_matmul_precision"):
        switch.set_float32_matmul_precision("highest" if value == "ieee" else value)
    else:
        switch.fp32_precision = value
