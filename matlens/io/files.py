"""Single files, written whole or not at all and read with bounds; and the lock of a folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from matlens.errors import InputError, plain_number, printable
from matlens.io.bounds import JSON, Bound, parse_json

SEAL = "digest"
"""The key under which a record says the hash of everything else in it."""
PAGE_SUFFIXES = (".html", ".htm")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (
    errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG,
    errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EMFILE, errno.ENFILE, errno.ENOTEMPTY, errno.EBUSY,
)  # fmt: skip
_OF_THE_SYSTEM = re.compile(r"\(os error (\d{1,5})\)")
_CHUNK = 4 * 2**20
LOCK = ".lock"
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial")


@contextmanager
def system_errors(path: str | Path) -> Iterator[None]:
    """Turn what the file system refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        # numpy reports a short write without an error number.
        if error.errno in _FULL or "requested and" in str(error):
            raise InputError(
                f"There is no room on the disk of {path}. Free some, or write elsewhere."
            ) from error
        if error.errno in _REFUSED:
            raise InputError(
                f"{path} cannot be written: {error.strerror}. Expected a folder that you may write to."
            ) from error
        raise


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn what safetensors and tokenizers say of the system, in errors of their own, into the system's."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = _OF_THE_SYSTEM.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


# Writing


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, to_json(content))


def to_json(content: Mapping[str, Any]) -> str:
    """Spell out JSON as it is written everywhere."""
    return json.dumps(content, indent=1, default=plain_number) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all."""
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes | memoryview]) -> None:
    """Write several files whole or none of them, as the only one that writes into their folders.

    A link is replaced and not followed.

    Raises
    ------
    InputError
        A pipe, a socket or a device stands where a file is to be.
    OSError
        A folder does, or the system refuses the file.
    """
    partial: dict[Path, Path] = {}
    with ExitStack() as locks:
        for folder in sorted({path.parent for path in contents}):  # in one order, or two could wait for ever
            locks.enter_context(locked(folder))
        try:
            for path, content in contents.items():
                _check_replaceable(path)  # else the files before it would be replaced, and it could not be
                temporary = partial_path(path)
                with os.fdopen(create(temporary), "wb") as file:
                    partial[path] = temporary
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            for path, temporary in partial.items():
                temporary.replace(path)
        finally:
            for temporary in partial.values():
                with suppress(OSError):
                    temporary.unlink()


def partial_path(path: Path) -> Path:
    """Where a file is written before it is moved to its place; a later job removes what a kill leaves."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def _check_replaceable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file()):
        raise InputError(f"{path} is a pipe, a socket or a device. Expected the name of a file.")


def check_writable(folder: Path, files: Iterable[str] = ()) -> None:
    """Refuse, before any work, a folder that could not be made or written into.

    Parameters
    ----------
    folder
        The folder.
    files
        Names of files that are to be written there.

    Raises
    ------
    InputError
        The system refuses a file there, or where the folder would be made; or a folder has the name of one.
    """
    with system_errors(folder):
        trial = nearest_existing(folder) / f".trial.{secrets.token_hex(8)}.partial"
        os.close(create(trial))
        trial.unlink(missing_ok=True)  # who locks the folder removes such files too
    for name in files:
        if (folder / name).is_dir():
            raise InputError(f"{folder / name} is a folder, and a file is to be written there. Remove it.")


def check_file_name(path: Path, *, suffixes: Sequence[str] = ()) -> None:
    """Refuse, before any work, a file that could not be written, or a name without one of the suffixes.

    Raises
    ------
    InputError
        A folder stands there, the name ends otherwise, or the system refuses a file in its place.
    """
    with system_errors(path):
        if path.is_dir():
            raise InputError(f"{path} is a folder. Expected the name of a file, such as {path / 'name'}.")
        if not path.name:
            raise InputError(f"{str(path)!r} is no name of a file.")
        if suffixes and path.suffix.lower() not in suffixes:
            raise InputError(f"The file's name must end in {' or '.join(suffixes)}, got {path.name}.")
        _check_replaceable(path)
    check_writable(path.parent)


def nearest_existing(folder: Path) -> Path:
    """The folder itself or, where it is not there yet, the nearest one above it that is."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))


def create(path: Path) -> int:
    """Make a file where there is none, not even a link; gives its descriptor, to read and write."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


# One job in a folder at a time


@contextmanager
def locked(folder: Path, owner: Callable[[], str] = lambda: "another process") -> Iterator[None]:
    """Be the only one that works in a folder; wait, and say for whom, while another job does.

    The folder is made where it does not exist. A killed process holds no lock.
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
            print(printable(note, most=500), file=sys.stderr, flush=True)
            timeout = -1
        except FileNotFoundError:  # the other job has failed and removed the folder
            continue
    try:
        if lock.lock_counter == 1:
            for path in folder.glob(".*.partial"):
                if _PARTIAL.fullmatch(path.name) and not path.is_dir():
                    path.unlink(missing_ok=True)
        yield
    finally:
        if lock.lock_counter == 1:
            with suppress(OSError):  # while it is held: those that wait see that it is gone, and try again
                (folder / LOCK).unlink()
        lock.release()


def is_transient(name: str) -> bool:
    """Whether a file is a lock, or what a killed process has left of a file that it was writing."""
    return name == LOCK or bool(_PARTIAL.fullmatch(name))


# Reading


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file to read; what only looks like one, and could keep the reader waiting, is refused.

    Raises
    ------
    InputError
        It is a folder, a FIFO, a socket or a device.
    OSError
        It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is a folder, a pipe or a device. Expected a plain file.")
    return os.fdopen(descriptor, "rb")


def read_bounded(path: str | Path, bound: Bound) -> bytes:
    """Read a file that may be no larger than a bound.

    Raises
    ------
    InputError
        It is larger, or no plain file.
    OSError
        It cannot be read.
    """
    with open_regular(path) as file:
        bound.check(os.fstat(file.fileno()).st_size, str(path))
        content = file.read(bound.limit + 1)
    bound.check(len(content), str(path))
    return content


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises
    ------
    InputError
        It is no JSON, larger or more deeply nested than is read, or no plain file.
    OSError
        It cannot be opened.
    """
    content = read_bounded(path, JSON)
    try:
        return parse_json(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"There is no JSON in {path} (it is no UTF-8 at byte {error.start}).") from error


# Records that know themselves


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the hash of its own content, as JSON gives it back."""
    content = json.loads(json.dumps(record, default=plain_number))
    content.pop(SEAL, None)
    return {**content, SEAL: content_hash(content)}


def check_seal(record: Any, path: Path) -> dict[str, Any]:
    """Refuse a record whose content is not what was written.

    Raises
    ------
    InputError
        It has been changed, or was never sealed.
    """
    if not isinstance(record, dict) or record.get(SEAL) != content_hash(
        {key: value for key, value in record.items() if key != SEAL}
    ):
        raise damaged(path, "does not hold what matlens has written into it")
    return record


def damaged(path: Path, cause: str) -> InputError:
    """What is raised where a file of a folder is not what was written."""
    return InputError(
        f"{path} {cause}: the file has been changed or damaged. Remove the folder {path.parent} and rerun "
        "the command."
    )


def hash_file(file: BinaryIO) -> tuple[str, int]:
    """The SHA-256 of an open file from here on, and how many bytes that is."""
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def content_hash(content: Mapping[str, Any], *, before: str = "") -> str:
    """The SHA-256 of a record, whatever the order of its keys; ``before`` is the hash of what it follows."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{before}{canonical}".encode()).hexdigest()
