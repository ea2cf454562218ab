"""Files written whole or not at all, files read within bounds, and the lock of a folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from matlens.errors import InputError, plain_number, printable
from matlens.io.bounds import JSON, Bound, parse_json

CHECKSUM = "digest"
"""The key under which a record holds the hash of everything else in it."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EROFS, errno.EPERM)
_REFUSED = (
    *_DENIED, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP,
    errno.ENXIO, errno.EMFILE, errno.ENFILE, errno.ENOTEMPTY, errno.EBUSY,
)  # fmt: skip
_OF_THE_SYSTEM = re.compile(r"\(os error (\d{1,5})\)")
_CHUNK = 4 * 2**20
LOCK = ".lock"
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial")

Content = str | bytes | memoryview | Mapping[str, Any]


@contextmanager
def system_errors(path: str | Path | None = None) -> Iterator[None]:
    """Convert errors of the file system to InputError."""
    try:
        yield
    except Exception as error:
        number = _number(error)
        path = path or getattr(error, "filename", None) or "the folder"
        if number in _FULL:
            raise InputError(
                f"The disk of {path} is full. Free some space, or choose another folder."
            ) from error
        if number in _REFUSED:
            raise InputError(
                f"{path} cannot be used: {os.strerror(number)}. Check the path and its permissions."
            ) from error
        raise


def is_unwritable(error: Exception) -> bool:
    """Whether an error was caused by a full disk or a missing permission."""
    return any(_number(each) in (*_FULL, *_DENIED) for each in (error, error.__cause__) if each is not None)


def _number(error: BaseException) -> int | None:
    in_library = _OF_THE_SYSTEM.search(str(error))  # safetensors, tokenizers
    return int(in_library[1]) if in_library else getattr(error, "errno", None)


# Writing


def write_files(contents: Mapping[Path, Content]) -> None:
    """Write text, bytes or JSON to several files: all of them complete, or none.

    Folders are created, a link is replaced and not followed. Of two processes that write the same files, all
    are from one.
    """
    partial: dict[Path, Path] = {}
    with system_errors(next(iter(contents))):
        try:
            for path, content in contents.items():
                _check_replaceable(path)  # else the files before it would be replaced, and it could not be
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = partial_path(path)
                with temporary.open("xb") as file:
                    partial[path] = temporary
                    file.write(_encoded(content))
                    file.flush()
                    os.fsync(file.fileno())
            with locked(next(iter(partial)).parent, clean=False) if len(partial) > 1 else nullcontext():
                for path, temporary in partial.items():
                    temporary.replace(path)
        finally:
            for temporary in partial.values():
                temporary.unlink(missing_ok=True)


def _encoded(content: Content) -> bytes | memoryview:
    if isinstance(content, Mapping):
        content = json.dumps(content, indent=1, default=plain_number) + "\n"
    return content.encode() if isinstance(content, str) else content


def partial_path(path: Path) -> Path:
    """Where a file is written before it is moved to its place."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def _check_replaceable(path: Path) -> None:
    if os.path.lexists(path) and not path.is_symlink() and not path.is_file():
        raise InputError(f"{path} must be a file, got a folder, a pipe or a device.")


def check_writable(folder: Path, files: Iterable[str] = ()) -> None:
    """Raise InputError early if a folder cannot be created or files not be written."""
    with system_errors(folder):
        trial = partial_path(nearest_existing(folder) / "trial")
        trial.touch(exist_ok=False)
        trial.unlink(missing_ok=True)  # another process that locks the folder removes such files too
    for name in files:
        _check_replaceable(folder / name)


def nearest_existing(folder: Path) -> Path:
    """The folder itself or, if it does not exist, its nearest parent that does."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))


# One job in a folder at a time


@contextmanager
def locked(
    folder: Path, owner: Callable[[], str] = lambda: "another process", *, clean: bool = True
) -> Iterator[None]:
    """Hold the lock of a folder, which is created; waits, with a message, while another process holds it.

    A killed process holds no lock. The partial files that it left are removed if ``clean``; where others
    write without the lock, partial files may be theirs.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, is_singleton=True)  # reentrant in a thread
    timeout = 0.0
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=timeout)
            break
        except Timeout:
            note = f"{folder} is in use by {owner()}. Waiting until it ends."
            print(printable(note, limit=500), file=sys.stderr, flush=True)
            timeout = -1
        except FileNotFoundError:  # the other job has failed and removed the folder
            continue
    try:
        if clean and lock.lock_counter == 1:
            for path in folder.glob(".*.partial"):
                if _PARTIAL.fullmatch(path.name):
                    path.unlink(missing_ok=True)
        yield
    finally:
        try:
            if lock.lock_counter == 1:  # while it is held: those that wait see that it is gone, and try again
                with suppress(OSError):  # Windows cannot remove an open file
                    (folder / LOCK).unlink()
        finally:
            lock.release()


def is_transient(name: str) -> bool:
    """Whether a file is a lock, or what a killed process has left of a file that it was writing."""
    return name == LOCK or bool(_PARTIAL.fullmatch(name))


# Reading


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file; raises InputError for a pipe or a device."""
    # Opening a pipe would wait for a writer; Windows has no pipes in folders, and opens text otherwise.
    descriptor = os.open(path, getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} must be a file, got a folder, a pipe or a device.")
    return os.fdopen(descriptor, "rb")


def read_bounded(path: str | Path, bound: Bound) -> bytes:
    """Read a file up to a size limit."""
    with open_regular(path) as file:
        bound.check(os.fstat(file.fileno()).st_size, str(path))
        content = file.read(bound.limit + 1)
    bound.check(len(content), str(path))
    return content


def read_json(path: str | Path) -> Any:
    """Read a JSON file; raises InputError if it is invalid or too large."""
    content = read_bounded(path, JSON)
    try:
        return parse_json(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be UTF-8, got another byte at {error.start}.") from error


# Checksums


def checksummed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the hash of its own content, as JSON gives it back."""
    content = json.loads(json.dumps(record, default=plain_number))
    content.pop(CHECKSUM, None)
    return {**content, CHECKSUM: content_hash(content)}


def verified(record: Any, path: Path) -> dict[str, Any]:
    """A record as `checksummed` made it; raises InputError if it was changed since."""
    if not isinstance(record, dict) or record.get(CHECKSUM) != content_hash(
        {key: value for key, value in record.items() if key != CHECKSUM}
    ):
        raise damaged(path, "does not hold what matlens wrote")
    return record


def damaged(path: Path, cause: str) -> InputError:
    """The error for a file of a folder that is not as it was written."""
    return InputError(
        f"{path} {cause}: the file was changed or damaged. Remove the folder {path.parent} and rerun the "
        "command."
    )


def hash_file(file: BinaryIO) -> tuple[str, int]:
    """The SHA-256 of an open file from here on, and how many bytes that is."""
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def content_hash(content: Mapping[str, Any]) -> str:
    """The SHA-256 of a record, independent of the order of its keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
