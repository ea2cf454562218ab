"""What memory a work takes, in a process of its own: how much is in use at most, and where the work is then.

A peak never goes back, so each work has a process that is forked off for it and begins with what is there. A
thread looks at glibc's allocator while the work is done. What the peak of the process is above what is in
use and the libraries, the allocator has kept of what was freed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

MIB = 2**20
BEFORE, PEAK = "libraries and model, before it begins", "peak"
EARLY = "peak when a tenth of its time had gone"
IN_USE, PLACE = "most that is in use of what was allocated", "where the work is then"
TAKEN, SECONDS = "in use above what is in use before", "seconds of the processor"
_LOOKED_AT_EVERY = 0.002  # seconds
_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, MIB  # of glibc's mallopt; bytes

Work = Callable[[], object]


def in_a_process(prepare: Callable[[Path], Work], *, gives_back: bool = False) -> dict[str, Any]:
    """MiB that a work takes, with the place where most is in use, and seconds.

    Parameters
    ----------
    prepare
        Makes the work in that process, and is not looked at; it is given an empty folder.
    gives_back
        Whether the allocator gives large blocks back at once, as ``MALLOC_MMAP_THRESHOLD_`` in the
        environment has it do.

    Raises
    ------
    RuntimeError
        The work has failed.
    """
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        code = 1
        try:
            if gives_back:
                ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
            with tempfile.TemporaryDirectory() as folder:
                os.write(writes, json.dumps(_watched(prepare(Path(folder)))).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writes)
    with open(reads) as said:
        answer = said.read()
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("The work whose memory is measured has failed.")
    return dict(json.loads(answer))


class _Malloc(ctypes.Structure):
    """What glibc's allocator says of itself: bytes of its heap, of large blocks, in use and free."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


def _watched(work: Work) -> dict[str, Any]:
    """Do a work while a thread looks at the process."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Malloc

    def allocated() -> float:
        said = library.mallinfo2()
        return float(said.uordblks + said.hblkhd) / MIB

    gc.collect()
    resident, at_first, place = _resident(), allocated(), ""
    in_use, over, main = at_first, threading.Event(), threading.main_thread().ident
    peaks = [(time.process_time(), _peak())]  # each with the seconds at which it was reached

    def look() -> None:
        nonlocal in_use, place
        while not over.is_set():
            if (peak := _peak()) > peaks[-1][1]:
                peaks.append((time.process_time(), peak))
            if (now := allocated()) > in_use:
                in_use, place = now, _place(sys._current_frames()[main or 0])
            time.sleep(_LOOKED_AT_EVERY)

    watcher = threading.Thread(target=look)
    watcher.start()
    start = time.process_time()
    try:
        work()
        seconds = time.process_time() - start
    finally:
        over.set()
        watcher.join()
    early = [peak for at, peak in peaks if at <= start + seconds / 10]
    return {
        BEFORE: resident, EARLY: early[-1], PEAK: _peak(), IN_USE: in_use, PLACE: place,
        TAKEN: in_use - at_first, SECONDS: seconds,
    }  # fmt: skip


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def _place(frame: FrameType | None) -> str:
    """The innermost function of this library that is under way."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "matlens" in path.parts:
            return f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
