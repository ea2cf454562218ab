"""Verification of all files in a folder, byte by byte."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from matlens.errors import InputError, checked
from matlens.io.artifact import (
    CONFIG,
    MODEL_RECORD,
    TENSORS,
    Artifact,
    check_file,
    is_finished,
    is_record,
    read_record,
)
from matlens.io.files import CHECKSUM, damaged, read_json, verified
from matlens.io.tables import TABLE

FILES = "run.json"
"""The list of the table of results and the figures of a run."""
_FOLDERS = "folders"  # of artifacts, in such a list


class Verdict(NamedTuple):
    """The result for one folder or table.

    Attributes
    ----------
    path
        The folder of an artifact, or a table.
    what
        Contents, such as ``"maps, 12 files"``.
    damage
        The problem, or ``None``.
    """

    path: Path
    what: str
    damage: str | None


@checked
def verify(folder: str | Path) -> Iterator[Verdict]:
    """Verify the checksums of all artifacts and tables below a folder.

    Files of others are ignored. Of an interrupted job, the complete files are verified.

    Parameters
    ----------
    folder
        The folder of an artifact, or one that contains artifacts, such as the ``--out`` of a command.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"folder must be an existing folder, got {folder}.")
    seen: set[tuple[int, int]] = set()
    for place, inner, names in os.walk(folder, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            inner.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        inner.sort()
        names += {CONFIG, MODEL_RECORD, FILES}.intersection(inner)  # folders in place of records
        yield from filter(None, (_verify_record(Path(place, name)) for name in sorted(names)))
        if CONFIG not in names and any(name.endswith(TENSORS) and name[0] in "h0" for name in names):
            yield Verdict(Path(place), "vectors or maps", f"{Path(place, CONFIG)} is missing.")


def check_unchanged(folder: Path) -> None:
    """Raise InputError if a file listed in ``matlens.json`` has changed."""
    try:
        files = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
        _check_model(folder, str([(name, of.st_mtime_ns, of.st_size) for name, of in files]))
    except OSError as error:
        raise damaged(folder, f"cannot be read ({error.strerror}: {error.filename})") from error


@lru_cache(maxsize=16)
def _check_model(folder: Path, state: str) -> None:
    """Hash the files that a model is loaded from, once per state of them."""
    files = read_record(folder / MODEL_RECORD)["files"]
    _check_files(folder, {name: record for name, record in files.items() if not name.endswith(".md")})


def _check_files(folder: Path, records: Mapping[str, Any]) -> None:
    for name, record in records.items():
        check_file(folder / name, record)


def _verify_record(path: Path) -> Verdict | None:
    """Verify the files listed in a record; ``None`` if it is not a record of matlens."""
    if path.suffix != ".json":
        return None
    folder, place, what = path.parent, path.parent, path.name
    if path.name == FILES:
        place = path
    elif path.name not in (CONFIG, MODEL_RECORD):
        place, what = path.with_suffix(".csv"), "table of results"
    is_ours = place.suffix != ".csv" or place.exists()
    try:
        record = read_json(path)
        if path.name == CONFIG:
            if not is_record(record):
                return None
            artifact = Artifact(folder, read_record(path))
            what = _described(record) if artifact.finished else f"unfinished {record['holds']}"
            for _ in artifact.check():
                pass
            return Verdict(folder, what, None)
        marks = {CHECKSUM, TABLE, _FOLDERS}
        if path.name != MODEL_RECORD and (not isinstance(record, dict) or marks.isdisjoint(record)):
            return None
        is_ours = is_ours or TABLE in record  # else it is listed in the config.json of an artifact
        verified(record, path)
        if TABLE in record:
            if record[TABLE]["file"] != place.name:
                raise damaged(path, f"describes another table than {place.name}")
            _check_files(folder, {place.name: record[TABLE]})
        elif is_ours:
            what = _described(record)
            _check_files(folder, record["files"])
            for name in record.get(_FOLDERS, ()):
                if not is_finished(folder / name):
                    raise InputError(f"{folder / name / CONFIG} is missing.")
    except (InputError, OSError) as error:
        return Verdict(place, what, str(error)) if is_ours else None
    except (KeyError, TypeError, AttributeError):  # the checksum is right, but this is another kind of record
        return Verdict(place, what, str(damaged(path, "is incomplete"))) if is_ours else None
    return Verdict(place, what, None) if is_ours else None


def _described(record: Mapping[str, Any]) -> str:
    n = len(record["files"])
    return f"{record.get('holds', 'list')}, {n} {'file' if n == 1 else 'files'}"
