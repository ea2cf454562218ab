"""What was freed goes back to the system, where the C library keeps it."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from matlens.numerics import freed
from matlens.numerics.freed import give_back_freed


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    freed._trim.cache_clear()
    yield
    freed._trim.cache_clear()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_what_lies_between_what_is_in_use_is_given_back() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        assert not give_back_freed()
        return
    size, n = 50_000, 800  # small enough for the heap, 40 MB in all
    kept = [bytes(size) if i % 2 else bytearray(b"x" * size) for i in range(n)]
    kept[::2] = [b""] * (n // 2)
    before = resident()
    assert give_back_freed()
    assert before - resident() > 0.5 * size * n / 2
    assert sum(map(len, kept)) == size * n // 2


def test_another_c_library_has_nothing_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not give_back_freed()
