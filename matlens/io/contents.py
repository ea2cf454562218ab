"""Hashes of the content of files, remembered for as long as a file is not touched.

A file is the same as before where its path, device, inode, size and both of its times are. The time of its
last change of status cannot be set by hand, so a file that was written over and given its old time is
noticed too. A file that was touched a moment before it was read is read again the next time: within the
grain of the clock it could have changed since.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from matlens.errors import InputError, checked
from matlens.io.entries import HASHES, Cache
from matlens.io.files import check_seal, hash_file, open_regular, read_json, sealed, write_json

_GRAIN = 2.0  # seconds within which some file systems see no change


@checked
def hash_contents(cache: Cache, paths: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by its name.

    Parameters
    ----------
    cache
        Where they are remembered.
    paths
        The files.

    Raises
    ------
    InputError
        One is no plain file, changes while it is read, or cannot be read.
    """
    hashes = {}
    for path in map(Path, paths):
        try:
            hashes[path.name] = _hash(cache, path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    return hashes


def _hash(cache: Cache, path: Path) -> str:
    where = str(path.absolute())
    note = cache.root / HASHES / f"{hashlib.sha256(os.fsencode(where)).hexdigest()[:32]}.json"
    before = _state(path)
    known = _remembered(note)
    if known is not None and known.get("path") == where and known.get("state") == before:
        return str(known["sha256"])
    with open_regular(path) as file:
        digest, _ = hash_file(file)
    if _state(path) != before:
        raise InputError(f"The file {path} changes while it is read. Expected one that is whole.")
    if time.time() - max(before["modified"], before["changed"]) / 1e9 > _GRAIN:
        with suppress(OSError, InputError):  # it is read again the next time
            note.parent.mkdir(parents=True, exist_ok=True)
            write_json(note, sealed({"path": where, "state": before, "sha256": digest}))
    return digest


def _state(path: Path) -> dict[str, int]:
    status = os.stat(path)
    return {
        "device": status.st_dev, "inode": status.st_ino, "bytes": status.st_size,
        "modified": status.st_mtime_ns, "changed": status.st_ctime_ns,
    }  # fmt: skip


def _remembered(note: Path) -> dict[str, Any] | None:
    try:
        return check_seal(read_json(note), note)
    except (OSError, InputError):
        return None
