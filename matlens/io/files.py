"""Files written completely or not at all, files read within bounds, and the lock of a folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from matlens.errors import InputError, plain_number, printable
from matlens.io.bounds import JSON, Bound, parse_json

CHECKSUM = "digest"
"""The key under which a record holds the hash of everything else in it."""
LOCK = ".lock"
# Of ours, and of safetensors, which renames a temporary file of its own.
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial|\.tmp\w{6}")

Content = str | bytes | memoryview | Mapping[str, Any] | Callable[[Path], object]


# Writing


def write_files(contents: Mapping[Path, Content]) -> None:
    """Write text, bytes or JSON to several files, or by functions: all of them complete, or none.

    Folders are created, a link is replaced and not followed.
    """
    partial: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            _check_replaceable(path)  # else the files before it would be replaced, and it could not be
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = _partial_path(path)
            temporary.touch(exist_ok=False)  # not through a link that somebody has put there
            partial[path] = temporary
            if isinstance(content, Mapping):
                content = json.dumps(content, indent=1, default=plain_number) + "\n"
            if callable(content):
                content(temporary)
            else:
                temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        # Of two processes that write the same files, all are from one.
        with locked(next(iter(partial)).parent, clean=False) if len(partial) > 1 else nullcontext():
            for path, temporary in partial.items():
                temporary.replace(path)
    finally:
        for temporary in partial.values():
            temporary.unlink(missing_ok=True)


def _partial_path(path: Path) -> Path:
    """Where a file is written before it is moved to its place."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def _check_replaceable(path: Path) -> None:
    if os.path.lexists(path) and not path.is_symlink() and not path.is_file():
        raise InputError(f"{path} must be a file, got a folder, a pipe or a device.")


def check_writable(folder: Path, files: Iterable[str] = ()) -> None:
    """Raise an error early if a folder cannot be created or files not be written."""
    trial = _partial_path(nearest_existing(folder) / "trial")
    try:
        trial.touch(exist_ok=False)
    except OSError as error:
        raise InputError(f"{folder} must be writable, got: {error.strerror}.") from error
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

    A killed process holds no lock. The partial files that it left are removed, if the folder is cleaned.
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
            print_to_stderr(f"{folder} is in use by {owner()}. Waiting until it ends.")
            timeout = -1
        except FileNotFoundError:  # the other job has failed and removed the folder
            continue
    try:
        if clean and lock.lock_counter == 1:
            for path in folder.glob(".*"):
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


def print_to_stderr(message: str) -> None:
    """Print to stderr."""
    print(printable(message, limit=500), file=sys.stderr, flush=True)


def is_transient(name: str) -> bool:
    """Whether a file is a lock, or a partial file that a killed process has left."""
    return name == LOCK or bool(_PARTIAL.fullmatch(name))


# Reading


def read_bounded(path: str | Path, bound: Bound) -> bytes:
    """Read a file up to a size limit."""
    with open(path, "rb") as file:
        content = file.read(bound.limit + 1)
    bound.check(len(content), str(path))
    return content


def read_json(path: str | Path) -> Any:
    """Read a JSON file; raises InputError if it is invalid or too large."""
    return parse_json(read_bounded(path, JSON), str(path))


# Checksums


def checksummed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the hash of its own content, as JSON returns it."""
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


@contextmanager
def open_tensors(path: Path, error: Callable[[str], InputError]) -> Iterator[Any]:
    """A safetensors file, mapped from the disk; raises ``error`` of the reason if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as cause:
        reason = printable(str(cause).partition("\n")[0], limit=200)
        raise error(f"cannot be read as safetensors ({reason})") from cause


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder; raises InputError if its name or a link leads out of the folder."""
    root, path = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    # In the cache of the Hugging Face hub, files are links to the blobs next to all snapshots.
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    if not any(path.is_relative_to(allowed) for allowed in (root, *blobs)):
        raise InputError(f"{folder / name} must be a file in {folder}, got one elsewhere: {path}.")
    return folder / name


def content_hash(content: Mapping[str, Any]) -> str:
    """The SHA-256 of a record, independent of the order of its keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """The checksum and the size of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def check_size(path: Path, record: Mapping[str, Any]) -> None:
    """Raise InputError if a file is missing or has another size than was written."""
    size = path.stat().st_size if path.is_file() else None
    if size != record["bytes"]:
        found = "is missing" if size is None else f"has {size:,} bytes instead of {record['bytes']:,}"
        raise damaged(path, found)


def check_file(path: Path, record: Mapping[str, Any]) -> None:
    """Raise InputError if a file is not what was written."""
    check_size(path, record)
    if describe_file(path)["sha256"] != record["sha256"]:
        raise damaged(path, "does not hold what was written")
