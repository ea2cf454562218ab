"""A cache of artifacts, found by a key and verified when they are used.

Nothing in it is needed: an entry that is damaged or cannot be written is recomputed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from matlens import parallel
from matlens.errors import InputError
from matlens.io.artifact import CONFIG, LAYOUT, Artifact
from matlens.io.files import LOCK, content_hash, print_to_stderr

VARIABLE = "MATLENS_CACHE"
LIMIT_VARIABLE = "MATLENS_CACHE_GIB"
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
        if not place.exists():
            return None
        try:
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
        entry that cannot be filled, such as on a full disk, or is larger than the cache is ``None``, with
        a message.
        """
        from safetensors import SafetensorError

        place = self._place(kind, key)
        try:
            with parallel.alone(), Artifact.writing(place, kind, {"key": key}) as artifact:
                if not artifact.finished:
                    shutil.rmtree(place / _FILES, ignore_errors=True)  # of a killed process
                    (place / _FILES).mkdir()
                    fill(place / _FILES)
                    artifact.write_json(_ABOUT, about or {})
                    artifact.finish()
            if (n_bytes := _entry(artifact).n_bytes) > self.limit:
                raise OSError(f"An entry must be at most {self.limit:,} bytes, got {n_bytes:,}.")
        except Exception as error:
            _remove(place)
            if not isinstance(error, OSError | SafetensorError):
                raise
            print_to_stderr(f"The cache {self.root} is not used. {type(error).__name__}: {error}")
            return None
        self._shrink(place)
        return _entry(artifact)

    def entries(self) -> list[Entry]:
        """All finished entries, the last used first."""
        found = []
        for place in self._places():
            with suppress(OSError, InputError):  # unfinished or damaged
                found.append(_entry(Artifact.open(place, place.name.partition("-")[0])))
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> int:
        """Remove everything that no process is writing; returns the number of bytes freed."""
        n_bytes = {entry.folder.parent: entry.n_bytes for entry in self.entries()}
        return sum(n_bytes.get(place, 0) for place in self._places() if _remove(place))

    def _place(self, kind: str, key: Mapping[str, Any]) -> Path:
        return self.root / f"{kind}-{content_hash({'layout': LAYOUT, 'kind': kind, 'key': key})[:32]}"

    def _places(self) -> Iterator[Path]:
        return (path for path in self.root.glob("*") if _ENTRY.fullmatch(path.name))

    def _shrink(self, latest: Path) -> None:
        """Remove the entries used longest ago until all fit, but for the latest."""
        total = 0
        for entry in self.entries():
            total += entry.n_bytes
            if total > self.limit and entry.folder.parent != latest:
                _remove(entry.folder.parent)


def _remove(place: Path) -> bool:
    """Remove an entry; returns False if another process is writing it."""
    from filelock import FileLock

    with suppress(OSError), FileLock(place / LOCK, timeout=0):
        shutil.rmtree(place)
        return True
    return False


def _entry(artifact: Artifact) -> Entry:
    return Entry(
        artifact.folder / _FILES, artifact.config["holds"], artifact.read_json(_ABOUT) or {},
        sum(record["bytes"] for name, record in artifact.files.items() if name.startswith(f"{_FILES}/")),
        (artifact.folder / CONFIG).stat().st_mtime,
    )  # fmt: skip


def file_states(paths: Iterable[Path]) -> dict[str, list[Any]]:
    """A key that changes with a file: path, size and both timestamps.

    The time of its last change of status cannot be set, so a file that was overwritten and given its old time
    is noticed too.
    """
    states = ((path, path.stat()) for path in paths)
    return {
        path.name: [str(path.absolute()), of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns]
        for path, of in states
    }


def default_cache() -> Cache | None:
    """The user's cache, ``None`` if it is switched off.

    The environment variable ``MATLENS_CACHE`` is its folder, or ``off``; ``MATLENS_CACHE_GIB`` is its limit.
    """
    named, limit = os.environ.get(VARIABLE, "").strip(), os.environ.get(LIMIT_VARIABLE, "").strip() or "20"
    if named.lower() in _OFF:
        return None
    if not limit.isdecimal():
        raise InputError(f"The environment variable {LIMIT_VARIABLE} must be an integer, got {limit}.")
    folder = Path(named).expanduser() if named else platformdirs.user_cache_path("matlens", appauthor=False)
    return Cache(folder.absolute(), int(limit) * 2**30)
