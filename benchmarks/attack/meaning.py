"""What a result or an artifact means, down to the bits of its numbers: equal where nothing is other."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

_OF_THE_RUN = ("software", "command")


def meaning(value: Any) -> str:
    """A digest that two values share only if they hold the same."""
    digest = hashlib.sha256()
    _add(digest, value, 0)
    return digest.hexdigest()


def _add(digest: Any, value: Any, depth: int) -> None:
    if depth > 12:
        return
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        digest.update(f"array {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes() if array.dtype != object else repr(array.tolist()).encode())
    elif isinstance(value, pd.DataFrame):
        digest.update(f"table {value.to_csv(index=True)}".encode())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            if key not in _OF_THE_RUN:
                digest.update(f"key {key!r}".encode())
                _add(digest, value[key], depth + 1)
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)}".encode())
        for item in value:
            _add(digest, item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            digest.update(item.name.encode())
            _add(digest, getattr(value, item.name), depth + 1)
    elif value is None or isinstance(value, str | int | float | bool | bytes | complex):
        digest.update(f"{type(value).__name__} {value!r}".encode())
    elif hasattr(value, "__dict__"):
        digest.update(type(value).__name__.encode())
        for name in sorted(vars(value)):
            if not name.startswith("_") or name in ("_vectors", "_maps"):
                _add(digest, vars(value)[name], depth + 1)
    else:
        digest.update(repr(value).encode())


def has_no_number(value: Any) -> bool:
    """Whether some number in a result is NaN or infinite, so that nobody takes it for one."""
    return any(not np.isfinite(part).all() for part in _numbers(value, 0))


def is_nothing(value: Any) -> bool:
    """Whether a result is empty, or holds no number but NaN."""
    if value is None or (hasattr(value, "__len__") and len(value) == 0):
        return True
    numbers = list(_numbers(value, 0))
    return numbers != [] and all(not np.isfinite(part).any() for part in numbers)


def _numbers(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().to(torch.float64).numpy()
    if isinstance(value, float) or (isinstance(value, np.ndarray) and value.dtype.kind == "f"):
        yield value
    elif isinstance(value, pd.DataFrame):
        yield value.select_dtypes(include=["float64", "float32"]).to_numpy(float)
    elif isinstance(value, list | tuple | Mapping) and depth < 4:
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(part, depth + 1)
    elif dataclasses.is_dataclass(value) and depth < 4:
        yield from _numbers(vars(value), depth + 1)
