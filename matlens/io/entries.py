"""Entries of the cache: folders that are whole or absent, known by a key, checked when they are used.

An entry is a folder of files beside a sealed record of their hashes. It is filled in a place of its own, as
the only one that fills it, and moved to its name at once when it is done: what a killed process leaves is
no entry, and is swept up later. Nothing in the cache is needed: where an entry is damaged, gone or cannot be
written, what it held is worked out anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matlens.errors import InputError, checked, printable, short
from matlens.io.files import (
    check_seal,
    hash_file,
    library_errors,
    open_regular,
    read_json,
    sealed,
    to_json,
)
from matlens.io.locks import LOCK, locked

VARIABLE, SIZE_VARIABLE = "MATLENS_CACHE", "MATLENS_CACHE_GIB"
DEFAULT_GIB = 20.0
_OFF = ("0", "off", "no", "none", "false")
_GIB = 2**30
_LAYOUT = 1  # of entries; others are not found, since it is part of every key
_RECORD = "entry.json"
HASHES = "hashes"  # the folder in which the hashes of the user's files are remembered
_ENTRIES, _UNFINISHED, _LOCKS = "entries", "unfinished", "locks"
_GONE = ".gone-"  # what folders are called that are being removed
_KIND, _ENTRY = re.compile(r"[a-z]+"), re.compile(r"[a-z]+-[0-9a-f]{32}")
_ABANDONED = 24 * 3600.0  # seconds after which what nobody fills any more is swept up


@checked
@dataclass(frozen=True, eq=False)
class Entry:
    """An entry of the cache.

    Attributes
    ----------
    folder
        Where its files are.
    kind
        What sort of thing it holds, such as ``"model"``.
    about
        What it was made from, in words and numbers that people read.
    files
        The hash and the size of each file, by its name.
    n_bytes
        The size of all files.
    used
        When it was last used, in seconds since 1970.
    """

    folder: Path
    kind: str
    about: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    used: float

    @property
    def n_bytes(self) -> int:
        """The size of all files."""
        return sum(int(record["bytes"]) for record in self.files.values())

    def damage(self) -> str | None:
        """Say what is wrong with the files, every byte of which is read; ``None`` where nothing is."""
        for name, record in self.files.items():
            try:
                with open_regular(self.folder / name) as file:
                    digest, size = hash_file(file)
            except (OSError, InputError) as error:
                return f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
            if (digest, size) != (record["sha256"], record["bytes"]):
                return f"{name} does not hold what was written"
        return None


@checked
class Cache:
    """A folder of entries, none of which is ever needed.

    Parameters
    ----------
    root
        The folder; it is made when the first entry is.
    limit
        How many bytes all entries may have together: past it those go that were used longest ago.
    """

    def __init__(self, root: Path, limit: int = int(DEFAULT_GIB * _GIB)) -> None:
        self.root, self.limit = Path(root), limit

    def find(self, kind: str, key: Mapping[str, Any], *, whole: bool = True) -> Entry | None:
        """The entry of a key, ``None`` where there is none; one that is damaged is removed, with a word.

        Parameters
        ----------
        kind, key
            What sort of thing it is, and all that it was made from.
        whole
            Whether every byte is looked at first. Without, the reader of a file has to check it.
        """
        return self._find(_name(kind, key), whole)

    def _find(self, name: str, whole: bool) -> Entry | None:
        folder = self.root / _ENTRIES / name
        if not os.path.lexists(folder):
            return None
        entry, damage = self._read(folder)
        if entry is not None and whole:
            damage = entry.damage()
        if entry is None or damage is not None:
            if not os.path.lexists(folder):  # it was cleared meanwhile
                return None
            self.discard(folder, damage or "it cannot be read")
            return None
        with suppress(OSError):  # a cache that is only read
            os.utime(folder / _RECORD)
        return entry

    def keep(
        self,
        kind: str,
        key: Mapping[str, Any],
        fill: Callable[[Path], None],
        *,
        about: Mapping[str, Any] | None = None,
    ) -> Entry | None:
        """The entry of a key, which is filled where it is not there.

        Where two processes ask for it, one fills it and the other waits.

        Parameters
        ----------
        kind, key
            What sort of thing it is, and all that it is made from.
        fill
            Writes the entry's files into the folder that it is given; an ``OSError``, or what a library says
            in an error of its own of the system, says that they cannot be written.
        about
            What people are shown of it.

        Returns
        -------
        Entry or None
            ``None`` where it is larger than the cache, or cannot be written.
        """
        name = _name(kind, key)
        try:
            with self._alone(name), library_errors():
                return self._find(name, False) or self._fill(name, kind, fill, about or {})
        except OSError as error:
            tell(f"Nothing is kept in the cache {self.root}: {error.strerror or error}.")
            return None

    def _fill(
        self, name: str, kind: str, fill: Callable[[Path], None], about: Mapping[str, Any]
    ) -> Entry | None:
        work, folder = self.root / _UNFINISHED / name, self.root / _ENTRIES / name
        _remove(work)  # what a killed process has left
        work.mkdir(parents=True)
        try:
            fill(work)
            files: dict[str, dict[str, Any]] = {}
            for path in sorted(path for path in work.rglob("*") if path.is_file()):
                with open_regular(path) as file:
                    digest, size = hash_file(file)
                    os.fsync(file.fileno())
                files[path.relative_to(work).as_posix()] = {"sha256": digest, "bytes": size}
            if sum(int(record["bytes"]) for record in files.values()) > self.limit:
                return None
            content = {"layout": _LAYOUT, "kind": kind, "about": dict(about), "files": files}
            (work / _RECORD).write_text(to_json(sealed(content)))
            folder.parent.mkdir(parents=True, exist_ok=True)
            work.rename(folder)
        finally:
            _remove(work)
        self._make_room(kept=folder)
        return self._read(folder)[0]

    def entries(self) -> list[Entry]:
        """All entries that can be read, those used last first."""
        folders = [folder for folder in self._folders(_ENTRIES) if not folder.name.startswith(_GONE)]
        read = [self._read(folder)[0] for folder in folders]
        return sorted((entry for entry in read if entry is not None), key=lambda entry: -entry.used)

    def discard(self, folder: Path, damage: str) -> None:
        """Remove an entry that is not what was written, and say so.

        Raises
        ------
        InputError
            The folder is none of this cache's entries.
        """
        folder = Path(folder)
        if folder.parent != self.root / _ENTRIES or not _ENTRY.fullmatch(folder.name):
            raise InputError(f"{folder} is no entry of the cache {self.root}. Expected the folder of one.")
        tell(f"An entry of the cache is damaged and made anew: {folder.name}, {damage}.")
        with suppress(OSError):
            _remove(folder)

    def clear(self) -> int:
        """Remove everything that nobody is at work on; gives the number of bytes that were freed.

        Raises
        ------
        OSError
            Something cannot be removed.
        """
        freed = 0
        for part in (_ENTRIES, _UNFINISHED, _LOCKS, HASHES):
            for folder in self._folders(part):
                if part in (_UNFINISHED, _LOCKS) and self._is_filled(folder.name):
                    continue
                freed += _size(folder)
                _remove(folder)
            with suppress(OSError):  # not empty, or not there
                (self.root / part).rmdir()
        with suppress(OSError):
            self.root.rmdir()
        return freed

    def _make_room(self, kept: Path) -> None:
        """Remove what was used longest ago until the limit holds, and what killed processes have left."""
        entries = self.entries()
        total = sum(entry.n_bytes for entry in entries)
        for entry in reversed(entries):
            if total <= self.limit:
                break
            if entry.folder != kept:
                _remove(entry.folder)
                total -= entry.n_bytes
        for folder in self._folders(_ENTRIES):
            if folder.name.startswith(_GONE):  # whoever removed it was killed
                shutil.rmtree(folder, ignore_errors=True)
        for folder in self._folders(_UNFINISHED):
            if time.time() - folder.stat().st_mtime > _ABANDONED and not self._is_filled(folder.name):
                _remove(folder)

    def _read(self, folder: Path) -> tuple[Entry | None, str | None]:
        """An entry by its record, the sizes of its files looked at; or what is wrong with it."""
        path = folder / _RECORD
        try:
            used = path.stat().st_mtime
            record = check_seal(read_json(path), path)
            entry = Entry(folder, record["kind"], record["about"], record["files"], used)
            for name, written in entry.files.items():
                if (folder / name).stat().st_size != written["bytes"]:
                    return None, f"{name} is longer or shorter than what was written"
        except FileNotFoundError as error:
            return None, f"{Path(error.filename or folder).name} is not there"
        except (OSError, InputError, KeyError, TypeError, AttributeError) as error:
            return None, f"its record cannot be read ({printable(str(error), most=120)})"
        return entry, None

    def _folders(self, part: str) -> list[Path]:
        try:
            return sorted(path for path in (self.root / part).iterdir() if path.name != LOCK)
        except OSError:
            return []

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        place = self.root / _LOCKS / name
        try:
            with locked(place):
                yield
        finally:
            with suppress(OSError):  # somebody waits for it
                place.rmdir()

    def _is_filled(self, name: str) -> bool:
        """Whether some process may be filling an entry."""
        return (self.root / _LOCKS / name / LOCK).exists() and _is_locked(self.root / _LOCKS / name / LOCK)


def tell(message: str) -> None:
    """Say what the cache does, beside what a command prints."""
    print(printable(message, most=500), file=sys.stderr, flush=True)


@checked
def default_cache() -> Cache | None:
    """The user's cache; ``None`` where it is switched off.

    The environment variable ``MATLENS_CACHE`` is its folder, or ``off``; ``MATLENS_CACHE_GIB`` is its limit.

    Raises
    ------
    InputError
        The limit is no number above 0.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() in _OFF:
        return None
    if named:
        return Cache(Path(named).expanduser().absolute(), _limit())
    import platformdirs

    return Cache(platformdirs.user_cache_path("matlens", appauthor=False), _limit())


def _limit() -> int:
    text = os.environ.get(SIZE_VARIABLE, "").strip()
    try:
        size = float(text) if text else DEFAULT_GIB
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise InputError(
            f"The environment variable {SIZE_VARIABLE} is '{printable(text, most=60)}'. Expected a number "
            f"above 0, the most GiB that the cache may have; it is {DEFAULT_GIB:g} where it is not set."
        )
    return int(size * _GIB)


def _name(kind: str, key: Mapping[str, Any]) -> str:
    """The folder's name of a key."""
    if not _KIND.fullmatch(kind):
        raise InputError(f"{short(kind)} is no kind of entries. Expected a word in small letters.")
    content = json.dumps([_LAYOUT, kind, key], sort_keys=True)
    return f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:32]}"


def _remove(path: Path) -> None:
    """Remove a folder or a file; a folder leaves its name at once, so that nobody finds a part of it."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    gone = path.with_name(f"{_GONE}{secrets.token_hex(8)}")
    with suppress(OSError):
        path.rename(gone)
        path = gone
    shutil.rmtree(path)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _is_locked(path: Path) -> bool:
    import fcntl

    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
