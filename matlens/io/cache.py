"""A cache of artifacts, found by a key and verified when they are used.

Nothing in it is needed: an entry that is damaged or cannot be written is recomputed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from matlens import parallel
from matlens.errors import InputError
from matlens.io.artifact import CONFIG, LAYOUT, Artifact
from matlens.io.bounds import Bound
from matlens.io.files import LOCK, print_to_stderr

VARIABLE = "MATLENS_CACHE"
LIMIT = Bound("MATLENS_CACHE_GIB", 20, "GiB of the cache", 2**30)
_OFF = ("0", "off", "no", "none", "false")
_FILES, _ABOUT = "files", "about"
_ENTRY = re.compile(r"([a-z]+)-[0-9a-f]{32}")


class Entry(NamedTuple):
    """A cache entry: its files, size, and time of last use in Unix seconds."""

    folder: Path
    kind: str
    about: Mapping[str, Any]
    n_bytes: int
    used: float


class Cache:
    """A folder of entries of at most ``limit`` bytes; the entries used longest ago are removed first."""

    def __init__(self, root: Path, limit: int = 20 * 2**30) -> None:
        self.root, self.limit = root, limit

    def find(self, kind: str, key: Mapping[str, Any]) -> Entry | None:
        """The entry of a key, every byte of it verified, or ``None``; a damaged one is removed."""
        place = self._place(kind, key)
        try:
            if not os.path.lexists(place):
                return None
            artifact = Artifact.open(place, kind)
            artifact.check()
            entry = _entry(artifact)
        except (OSError, InputError) as error:
            if _remove(place):
                print_to_stderr(f"An entry of the cache is damaged and recomputed: {error}")
            return None
        with suppress(OSError):  # a cache that is read-only
            os.utime(place / CONFIG)
        return entry

    def store(
        self,
        kind: str,
        key: Mapping[str, Any],
        fill: Callable[[Path], object],
        *,
        about: Mapping[str, Any] | None = None,
    ) -> Entry | None:
        """The entry of a key, filled if it does not exist; a second process waits for the first.

        ``key`` is everything that it depends on, and ``about`` describes it in ``matlens cache show``. An
        entry that cannot be filled, such as on a full disk, or is larger than the cache is ``None``, with a
        message.
        """
        from safetensors import SafetensorError

        place = self._place(kind, key)
        try:
            with parallel.alone(), Artifact.writing(place, kind, {"key": key}) as artifact:
                if not artifact.finished:
                    files = place / _FILES
                    shutil.rmtree(files, ignore_errors=True)  # of a killed process
                    files.mkdir()
                    try:
                        fill(files)
                        if _size(files) > self.limit:
                            raise OSError(f"It must be at most {self.limit:,} bytes, got {_size(files):,}.")
                    except Exception:
                        shutil.rmtree(files)
                        raise
                    artifact.write_json(_ABOUT, about or {})
                    artifact.finish()
        except (OSError, SafetensorError) as error:
            print_to_stderr(f"The cache {self.root} is not used. {type(error).__name__}: {error}")
            return None
        self._shrink(place)
        return _entry(artifact)

    def entries(self) -> list[Entry]:
        """All finished entries, the last used first."""
        found = []
        for place in self._places():
            with suppress(OSError, InputError, AttributeError):
                found.append(_entry(Artifact.open(place, place.name.partition("-")[0])))
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> int:
        """Remove everything that no process is writing; returns the number of bytes freed."""
        freed = sum(map(_remove, self._places()))
        with suppress(OSError):  # not empty, or missing
            self.root.rmdir()
        return freed

    def _place(self, kind: str, key: Mapping[str, Any]) -> Path:
        content = json.dumps([LAYOUT, kind, key], sort_keys=True)
        return self.root / f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:32]}"

    def _places(self) -> list[Path]:
        return sorted(path for path in self.root.glob("*") if _ENTRY.fullmatch(path.name))

    def _shrink(self, latest: Path) -> None:
        entries = self.entries()
        total = sum(entry.n_bytes for entry in entries)
        for entry in reversed(entries):
            if total > self.limit and entry.folder.parent != latest:
                total -= entry.n_bytes if _remove(entry.folder.parent) else 0


def _remove(place: Path) -> int:
    """Remove an entry under its lock; the number of bytes freed, 0 if another process holds the lock."""
    from filelock import FileLock

    with suppress(OSError), FileLock(place / LOCK, timeout=0):
        freed = _size(place)
        shutil.rmtree(place)
        return freed
    return 0


def _entry(artifact: Artifact) -> Entry:
    return Entry(
        artifact.folder / _FILES, artifact.config["holds"], artifact.read_json(_ABOUT) or {},
        sum(record["bytes"] for name, record in artifact.files.items() if name.startswith(f"{_FILES}/")),
        (artifact.folder / CONFIG).stat().st_mtime,
    )  # fmt: skip


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def file_states(paths: Iterable[Path]) -> dict[str, list[Any]]:
    """A key that changes with a file: path, size and both timestamps.

    The time of its last change of status cannot be set, so a file that was overwritten and given its old time
    is noticed too.
    """
    states = {}
    for path in paths:
        status = path.stat()
        states[path.name] = [
            str(path.absolute()), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns,
            status.st_ctime_ns,
        ]  # fmt: skip
    return states


def default_cache() -> Cache | None:
    """The user's cache, ``None`` if it is switched off.

    The environment variable ``MATLENS_CACHE`` is its folder, or ``off``; ``MATLENS_CACHE_GIB`` is its limit.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() in _OFF:
        return None
    folder = Path(named).expanduser() if named else platformdirs.user_cache_path("matlens", appauthor=False)
    return Cache(folder.absolute(), LIMIT.limit)
