"""Bars of progress that move while a single step takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm.auto import tqdm

_QUIET = 1.0  # seconds before a bar is shown
_TICK = 1.0  # seconds between two looks at the clock
_CLOCK = "{desc}: {elapsed}"
Item = TypeVar("Item")


def moving(
    steps: Iterable[Item], *, desc: str, total: int | None = None, unit: str = "it", progress: bool = True
) -> Iterator[Item]:
    """Yield the steps of some work under a bar whose clock goes on during a step, however long it takes.

    Parameters
    ----------
    steps
        The work, step by step.
    desc
        What the work is called.
    total
        How many steps there are, where they do not tell.
    unit
        What one step is called.
    progress
        Whether to show anything. Work of less than a second shows nothing anyway.
    """
    known = len(steps) if total is None and hasattr(steps, "__len__") else total
    with _ticking(tqdm(total=known, desc=desc, unit=unit, disable=not progress, delay=_QUIET)) as bar:
        for step in steps:
            yield step
            bar.update()


@contextmanager
def waiting(desc: str, *, progress: bool = True) -> Iterator[None]:
    """Show a clock while one step is under way, such as the loading of a model; it goes when that is done."""
    bar = tqdm(desc=desc, bar_format=_CLOCK, disable=not progress, delay=_QUIET, leave=False)
    with _ticking(bar):
        yield


@contextmanager
def _ticking(bar: Any) -> Iterator[Any]:
    """Draw a bar anew every second from another thread; the work itself has no time for it."""
    if bar.disable:
        yield bar
        return
    done = threading.Event()

    def tick() -> None:
        pause = _QUIET
        while not done.wait(pause):
            pause = _TICK
            with bar.get_lock():
                bar.delay = 0.0  # it is shown from now on, so closing it ends its line
                bar.refresh(nolock=True)

    clock = threading.Thread(target=tick, name=f"clock of {bar.desc}", daemon=True)
    clock.start()
    try:
        yield bar
    finally:
        done.set()
        clock.join()
        bar.close()
