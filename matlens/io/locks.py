"""One writer: a folder at work is locked, and a second process waits for the first."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from matlens.errors import InputError, printable

LOCK = ".lock"
"""The file by which a folder is locked, there as long as somebody writes into the folder."""
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial")
_HOLDER = re.compile(r"([0-9]{1,10}) ([A-Za-z0-9._-]{1,64})\n")
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_SHORTEST_WAIT, _LONGEST_WAIT = 0.02, 0.5  # seconds between two attempts
_held: set[tuple[int, int, Path]] = set()  # process, thread and folder


@contextmanager
def locked(folder: Path) -> Iterator[list[Path]]:
    """Be the one that writes into a folder; wait, and say so, while somebody else does.

    The folder is made if it is not there; what is given is which folders that made, the innermost first. The
    lock goes with the process, however that ends. What is asked for again in the same thread is had already.
    Where a file system knows no locks, there is none.

    Raises
    ------
    InputError
        What stands at the place of the lock is no plain file.
    """
    key = os.getpid(), threading.get_ident(), Path(os.path.realpath(folder))
    if key in _held:
        yield []
        return
    made: list[Path] = []
    descriptor = _acquire(folder, made)
    _held.add(key)
    try:
        if descriptor is not None:
            _remove_partials(folder)
        yield made
    finally:
        _held.discard(key)
        if descriptor is not None:
            with suppress(OSError):  # removed while it is held, so that nobody locks a file that goes
                (folder / LOCK).unlink()
            os.close(descriptor)


def is_transient(name: str) -> bool:
    """Whether a file is the lock, or what a killed process has left of a file that it was writing."""
    return name == LOCK or bool(_PARTIAL.fullmatch(name))


def _acquire(folder: Path, made: list[Path]) -> int | None:
    path, wait, waiting = folder / LOCK, _SHORTEST_WAIT, False
    while True:
        absent = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        made += [place for place in absent if place not in made]
        try:
            descriptor = _open(path)
        except FileNotFoundError:  # another process, whose job has failed, has just removed the folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                _sign(descriptor, path)
                return descriptor
        except BlockingIOError:
            if not waiting:
                note = f"{_holder(descriptor)} is at work in {folder}. Waiting until that has ended."
                print(printable(note, most=500), file=sys.stderr, flush=True)
            waiting = True
            time.sleep(wait)
            wait = min(1.5 * wait, _LONGEST_WAIT)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _WITHOUT_LOCKS:
                raise
            with suppress(OSError):
                path.unlink()
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the file that is locked is still the one that others find."""
    try:
        there, ours = path.lstat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _sign(descriptor: int, path: Path) -> None:
    """Write who has the lock."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise InputError(f"{path} is no plain file of its own. Remove it: matlens locks the folder by it.")
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)


def _holder(descriptor: int) -> str:
    written = os.pread(descriptor, 128, 0).decode("ascii", "replace")
    signed = _HOLDER.fullmatch(written)
    return f"The process {signed[1]} on {signed[2]}" if signed else "Another process"


def _remove_partials(folder: Path) -> None:
    for entry in os.scandir(folder):
        if _PARTIAL.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
            with suppress(OSError):
                os.unlink(entry.path)
