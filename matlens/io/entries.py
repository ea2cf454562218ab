"""A cache of artifacts: folders of files that are found by a key, and checked when they are used.

Nothing in the cache is needed: where an entry is damaged, missing or cannot be written, its content is
recomputed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matlens import parallel
from matlens.errors import InputError, checked, printable
from matlens.io.artifact import CONFIG, LAYOUT, Artifact
from matlens.io.files import LOCK, library_errors

VARIABLE, SIZE_VARIABLE = "MATLENS_CACHE", "MATLENS_CACHE_GIB"
DEFAULT_GIB = 20.0
_OFF = ("0", "off", "no", "none", "false")
_GIB = 2**30
HASHES = "hashes"  # the folder in which the hashes of the user's files are remembered
_FILES, _ABOUT = "files", "about"
_ENTRY = re.compile(r"([a-z]+)-[0-9a-f]{32}")


@dataclass(frozen=True, eq=False)
class Entry:
    """An entry of the cache.

    Attributes
    ----------
    folder
        Where its files are.
    kind
        What it holds, such as ``"model"``.
    about
        What it was made from, for people.
    n_bytes
        The size of all files.
    used
        When it was last used, in seconds since 1970.
    """

    folder: Path
    kind: str
    about: Mapping[str, Any]
    n_bytes: int
    used: float


@checked
class Cache:
    """A folder of entries.

    Parameters
    ----------
    root
        The folder; it is made when the first entry is.
    limit
        How many bytes all entries may have; beyond it those that were used longest ago are removed.
    """

    def __init__(self, root: Path, limit: int = int(DEFAULT_GIB * _GIB)) -> None:
        self.root, self.limit = Path(root), limit

    def find(self, kind: str, key: Mapping[str, Any], *, whole: bool = True) -> Entry | None:
        """The entry of a key, or ``None``; a damaged one is removed with a message.

        Parameters
        ----------
        kind, key
            What it holds, and all that it was made from.
        whole
            Whether every byte is checked first. Without, the reader of a file has to check it.
        """
        place = self._place(kind, key)
        if not os.path.lexists(place / CONFIG):
            return None
        try:
            artifact = Artifact.open(place, kind)
            for _ in artifact.check() if whole else ():
                pass
            entry = _entry(artifact)
        except (OSError, InputError) as error:
            if os.path.lexists(place) and not self._in_use(place):
                self.discard(place / _FILES, str(error))
            return None
        with suppress(OSError):  # a cache that is only read
            os.utime(place / CONFIG)
        return entry

    def keep(
        self,
        kind: str,
        key: Mapping[str, Any],
        fill: Callable[[Path], None],
        *,
        about: Mapping[str, Any] | None = None,
    ) -> Entry | None:
        """The entry of a key, which is filled where it does not exist; of two processes one waits.

        Parameters
        ----------
        kind, key
            What it holds, and all that it is made from.
        fill
            Writes the entry's files into the folder that it is given.
        about
            What people are shown of it.

        Returns
        -------
        Entry or None
            ``None`` where it is larger than the cache, or the disk is full or cannot be written.
        """
        place = self._place(kind, key)
        try:
            with parallel.alone(), library_errors(), Artifact.writing(place, kind, {"key": key}) as artifact:
                if not artifact.finished:
                    shutil.rmtree(place / _FILES, ignore_errors=True)  # of a killed process
                    (place / _FILES).mkdir()
                    fill(place / _FILES)
                    if _size(place / _FILES) > self.limit:
                        shutil.rmtree(place)
                        return None
                    artifact.write_json(_ABOUT, about or {})
                    artifact.finish()
        except (OSError, InputError) as error:
            reason = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(reason, OSError):
                raise
            tell(f"Nothing is kept in the cache {self.root}: {reason.strerror or reason}.")
            return None
        self._make_room(place)
        return _entry(artifact)

    def entries(self) -> list[Entry]:
        """All finished entries, those used last first."""
        found = []
        for place in self._places():
            with suppress(OSError, InputError, AttributeError):
                found.append(_entry(Artifact.open(place, place.name.partition("-")[0])))
        return sorted(found, key=lambda entry: -entry.used)

    def discard(self, folder: Path, damage: str) -> None:
        """Remove an entry that is not what was written, and say so.

        Raises
        ------
        InputError
            The folder is not that of an entry of this cache.
        """
        place = Path(folder).parent
        if place.parent != self.root or not _ENTRY.fullmatch(place.name):
            raise InputError(f"folder must be that of an entry of the cache {self.root}, got {folder}.")
        tell(f"An entry of the cache is damaged and recomputed: {damage}")
        shutil.rmtree(place, ignore_errors=True)

    def clear(self) -> int:
        """Remove everything that no process is writing; returns the number of bytes freed."""
        freed = 0
        for place in [*self._places(), self.root / HASHES]:
            if place.is_dir() and not self._in_use(place):
                freed += _size(place)
                shutil.rmtree(place)
        with suppress(OSError):  # not empty, or missing
            self.root.rmdir()
        return freed

    def _place(self, kind: str, key: Mapping[str, Any]) -> Path:
        content = json.dumps([LAYOUT, kind, key], sort_keys=True)
        return self.root / f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:32]}"

    def _places(self) -> list[Path]:
        try:
            return sorted(path for path in self.root.iterdir() if _ENTRY.fullmatch(path.name))
        except OSError:
            return []

    def _make_room(self, kept: Path) -> None:
        entries = self.entries()
        total = sum(entry.n_bytes for entry in entries)
        for entry in reversed(entries):
            if total > self.limit and entry.folder.parent != kept:
                shutil.rmtree(entry.folder.parent, ignore_errors=True)
                total -= entry.n_bytes

    @staticmethod
    def _in_use(place: Path) -> bool:
        from filelock import FileLock, Timeout

        if not (place / LOCK).exists():
            return False
        try:
            with FileLock(place / LOCK).acquire(timeout=0):
                return False
        except Timeout:
            return True


def _entry(artifact: Artifact) -> Entry:
    return Entry(
        artifact.folder / _FILES, artifact.config["holds"], artifact.read_json(_ABOUT) or {},
        sum(record["bytes"] for name, record in artifact.files.items() if name.startswith(f"{_FILES}/")),
        (artifact.folder / CONFIG).stat().st_mtime,
    )  # fmt: skip


def tell(message: str) -> None:
    """Print what the cache does, apart from the output of a command."""
    print(printable(message, most=500), file=sys.stderr, flush=True)


@checked
def default_cache() -> Cache | None:
    """The user's cache; ``None`` where it is switched off.

    The environment variable ``MATLENS_CACHE`` is its folder, or ``off``; ``MATLENS_CACHE_GIB`` is its limit.

    Raises
    ------
    InputError
        The limit is not a number above 0.
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
            f"The environment variable {SIZE_VARIABLE} must be a number of GiB above 0, got "
            f"'{printable(text, most=60)}'."
        )
    return int(size * _GIB)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
