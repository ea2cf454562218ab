"""Bars of progress that move while a single step takes long."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

_QUIET = 1.0  # seconds before a bar is shown: what is done by then needs none
_TICK = 1.0  # seconds between two looks at the clock
_CLOCK = "{desc}: {elapsed}"
_silent = threading.Event()


def silence(quiet: bool) -> None:
    """Show no bars from now on, or show them again: of several processes one shows them."""
    _silent.set() if quiet else _silent.clear()


class Bar(tqdm):
    """A bar of tqdm that is shown after a second and whose clock goes on during a step, however long.

    It takes what `tqdm.tqdm` takes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._done = threading.Event()
        self._clock: threading.Thread | None = None
        shown = {"disable": True} if _silent.is_set() else {}
        super().__init__(*arguments, **{"delay": _QUIET, **options, **shown})
        if not self.disable:
            self._clock = threading.Thread(
                target=_tick, args=(weakref.ref(self), self._done, self.delay), name=f"clock of {self.desc}",
                daemon=True,
            )  # fmt: skip
            self._clock.start()

    def close(self) -> None:
        """Stop the clock and end the bar's line."""
        self._done.set()
        if self._clock is not None and self._clock is not threading.current_thread():
            self._clock.join()
            self._clock = None
        super().close()


def _tick(bar: weakref.ref[Bar], done: threading.Event, pause: float) -> None:
    """Draw a bar anew from another thread: the work has no time for it while a step lasts."""
    while not done.wait(pause):
        shown = bar()
        if shown is None:  # left behind unfinished
            return
        with shown.get_lock():
            shown.delay = 0.0  # it is on the screen from now on, so closing it ends its line
            shown.refresh(nolock=True)
        del shown
        pause = _TICK


@contextmanager
def waiting(desc: str, *, progress: bool = True) -> Iterator[None]:
    """Show a clock while one step is under way, such as the loading of a model; it goes when that is done."""
    with Bar(desc=desc, bar_format=_CLOCK, disable=not progress, leave=False):
        yield
