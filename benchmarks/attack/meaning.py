"""Content of a result or an artifact, down to the bits of its numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

_OF_THE_RUN = ("software", "command")
_DEEPEST = 12


def meaning(value: Any) -> str:
    """A digest that two values share only if they have the same content."""
    digest = hashlib.sha256()
    for leaf in _leaves(value):
        array = isinstance(leaf, np.ndarray)
        digest.update(f"{leaf.dtype} {leaf.shape}".encode() if array else leaf.encode())
        digest.update(leaf.tobytes() if array else b"")
    return digest.hexdigest()


def has_no_number(value: Any) -> bool:
    """Whether some number in a result is NaN or infinite, so that nobody takes it for one."""
    return any(not np.isfinite(part).all() for part in _floats(value))


def is_nothing(value: Any) -> bool:
    """Whether a result is empty, or has no number but NaN."""
    if value is None or (hasattr(value, "__len__") and len(value) == 0):
        return True
    numbers = list(_floats(value))
    return numbers != [] and all(not np.isfinite(part).any() for part in numbers)


def _floats(value: Any) -> Iterator[Any]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f")


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Arrays of numbers, and all else as text, in an order of their own."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    elif isinstance(value, pd.DataFrame):
        value = value.to_dict("list")
    elif isinstance(value, int | float):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        yield np.ascontiguousarray(value)
    elif isinstance(value, Mapping):
        for key in sorted({*value} - {*_OF_THE_RUN}, key=repr):
            yield repr(key)
            yield from _deeper(value[key], depth)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} items"
        for item in value:
            yield from _deeper(item, depth)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        names = [field.name for field in fields(value)] if is_dataclass(value) else sorted(vars(value))
        yield type(value).__name__
        for name in names:
            if not name.startswith("_") or name in ("_vectors", "_maps"):
                yield from _deeper(getattr(value, name), depth)
    else:
        yield repr(value)


def _deeper(value: Any, depth: int) -> Iterator[Any]:
    if depth < _DEEPEST:
        yield from _leaves(value, depth + 1)
