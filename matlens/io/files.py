"""Files written completely or not at all, their checksums, and the lock of a folder."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from matlens.errors import InputError, plain_number, printable

CHECKSUM = "digest"
"""The key under which a record holds the hash of everything else in it."""
LOCK = ".lock"

Content = str | bytes | memoryview | Mapping[str, Any] | Callable[[Path], object]


# Writing


def write_files(contents: Mapping[Path, Content]) -> None:
    """Write text, bytes or JSON to several files, or call functions that write them: all files, or none.

    Each file is written under another name, synced and renamed. Folders are created.
    """
    partial: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            if path.exists() and not path.is_file():  # renaming would replace /dev/stdout
                raise InputError(f"{path} must be a file, got a folder, a pipe or a device.")
            path.parent.mkdir(parents=True, exist_ok=True)
            partial[path] = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
            if isinstance(content, Mapping):
                content = json.dumps(content, indent=1, default=plain_number) + "\n"
            if callable(content):
                content(partial[path])
            else:
                partial[path].write_bytes(content.encode() if isinstance(content, str) else content)
            with partial[path].open("rb+") as file:
                os.fsync(file.fileno())
        for path, temporary in partial.items():
            temporary.replace(path)
    finally:
        for temporary in partial.values():
            temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Raise InputError early if a folder cannot be created or written to."""
    existing = nearest_existing(folder)
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise InputError(f"{folder} must be a folder that you may write to.")


def nearest_existing(folder: Path) -> Path:
    """The folder itself or, if it does not exist, its nearest parent that does."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created; wait, with a message, while another process holds it.

    A killed process holds no lock; its partial files are removed.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print_to_stderr(f"{folder} is in use by another process. Waiting until it ends.")
        lock.acquire()
    try:
        for pattern in (".*.partial", ".tmp??????"):  # safetensors has partial files of its own
            for path in folder.glob(pattern):
                path.unlink()
        yield
    finally:
        with suppress(OSError):  # Windows cannot remove an open file
            (folder / LOCK).unlink()
        lock.release()


def print_to_stderr(message: str) -> None:
    """Print to stderr."""
    print(printable(message, limit=500), file=sys.stderr, flush=True)


# Reading


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON; ``where`` names its source in errors, such as ``"line 3 of 'a.jsonl'"``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # of nesting, or of a number of thousands of digits
        raise InputError(f"{where} must be JSON ({str(error)[:200]}).") from error


def read_json(path: str | Path) -> Any:
    """Read a JSON file."""
    return parse_json(Path(path).read_bytes(), str(path))


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
    if not path.is_file():
        raise damaged(path, "is missing")
    if path.stat().st_size != record["bytes"]:
        raise damaged(path, f"must have {record['bytes']:,} bytes")


def check_file(path: Path, record: Mapping[str, Any]) -> None:
    """Raise InputError if a file is not what was written."""
    check_size(path, record)
    if describe_file(path)["sha256"] != record["sha256"]:
        raise damaged(path, "does not hold what was written")
