"""Memory that was freed and that the C library keeps, which counts as this process's all the same."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back_freed() -> bool:
    """Give the system what was freed and lies between what is in use; says whether the C library can.

    glibc keeps it for what is allocated next. Where large arrays of several sizes come and go, that is half
    of a process, and more with every round. It takes milliseconds: a thing to do after seconds of work.
    """
    trim = _trim()
    if trim is None:
        return False
    trim(0)
    return True


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc: musl, macOS, Windows
        return None
