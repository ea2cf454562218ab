"""Memory use of a job in a forked process.

The peak of a process never decreases, so each job is forked. A thread polls glibc's allocator during the
job. The process' peak above the libraries and the memory in use is freed memory that the allocator keeps.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20
BEFORE, PEAK = "libraries and model, before the job", "peak"
EARLY = "peak after a tenth of the time"
IN_USE = "most allocated memory in use"
TAKEN, SECONDS = "most in use above the start", "CPU seconds"
_LOOKED_AT_EVERY = 0.05  # seconds; polling by the millisecond fragments what it measures
_M_MMAP_THRESHOLD, _M_ARENA_MAX, _LARGE_BLOCK = -3, -8, MIB  # of glibc's mallopt; bytes

Work = Callable[[], object]


def in_a_process(prepare: Callable[[Path], Work], *, gives_back: bool = False) -> dict[str, Any]:
    """MiB that a job takes, and seconds.

    Parameters
    ----------
    prepare
        Makes the job in that process, given an empty folder; not measured.
    gives_back
        Whether the allocator returns large blocks at once, as with ``MALLOC_MMAP_THRESHOLD_``.
    """
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        code = 1
        try:
            # While it is polled the allocator would open further arenas, each with free memory of its own.
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
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
        raise RuntimeError("The measured job failed.")
    return dict(json.loads(answer))


class _Malloc(ctypes.Structure):
    """glibc's mallinfo2: bytes of the heap, of large blocks, in use and free."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


def _watched(work: Work) -> dict[str, Any]:
    """Run a job while a thread polls the process."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Malloc

    def allocated() -> float:
        said = library.mallinfo2()
        return float(said.uordblks + said.hblkhd) / MIB

    gc.collect()
    before, at_first = resident(), allocated()
    in_use, over = at_first, threading.Event()
    peaks = [(time.process_time(), peak())]  # each with the time it was reached

    def look() -> None:
        nonlocal in_use
        while not over.is_set():
            if (highest := peak()) > peaks[-1][1]:
                peaks.append((time.process_time(), highest))
            in_use = max(in_use, allocated())
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
    early = [highest for at, highest in peaks if at <= start + seconds / 10]
    return {
        BEFORE: before, EARLY: early[-1], PEAK: peak(), IN_USE: in_use, TAKEN: in_use - at_first,
        SECONDS: seconds,
    }  # fmt: skip


def peak() -> float:
    """The largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident() -> float:
    """The resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB
