"""Verification of all files in a folder, byte by byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from matlens.io.tables import TABLE, check_described

FILES = "run.json"
"""The list of the table of results and the figures of a run."""


class Verdict(NamedTuple):
    """The result for one folder or table.

    Attributes
    ----------
    path
        The folder of an artifact, or a table.
    what
        What it holds, such as ``"maps, 12 files"``.
    damage
        What is wrong with it, or ``None``.
    """

    path: Path
    what: str
    damage: str | None


@checked
def verify(folder: str | Path) -> Iterator[Verdict]:
    """Verify every artifact and every table of results in a folder and its subfolders, byte by byte.

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
        for name in {CONFIG, MODEL_RECORD} & {*inner}:
            yield Verdict(Path(place), name, f"{Path(place, name)} must be a file, and is a folder.")
        inner.sort()
        yield from filter(None, (_verify_file(Path(place), name) for name in sorted(names)))
        if CONFIG not in names and any(name.endswith(TENSORS) and name[0] in "h0" for name in names):
            yield Verdict(Path(place), "vectors or maps", f"{Path(place, CONFIG)} is missing.")


def check_unchanged(folder: Path) -> None:
    """Raise InputError if a file of a folder with a ``matlens.json``, such as a pruned model, has changed."""
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


def _verify_file(folder: Path, name: str) -> Verdict | None:
    """Verify what a JSON file is the record of; ``None`` if it is none of matlens."""
    path = folder / name
    if path.suffix != ".json":
        return None
    try:
        content = read_json(path)
        if name in (CONFIG, MODEL_RECORD):
            return _verify_record(folder, path) if name == MODEL_RECORD or is_record(content) else None
        if name == FILES:
            return _verify_list(path, content)
        return _verify_table(path, content)
    except (InputError, OSError) as error:
        if name in (CONFIG, MODEL_RECORD):
            return Verdict(folder, name, str(error))
        table = path.with_suffix(".csv")
        known = name == FILES or table.exists()  # else it is somebody else's
        return Verdict(path if name == FILES else table, name, str(error)) if known else None


def _verify_record(folder: Path, path: Path) -> Verdict:
    record = read_record(path)
    if path.name == MODEL_RECORD:
        return Verdict(folder, _described(record), _damage(lambda: _check_files(folder, record["files"])))
    artifact = Artifact(folder, record)
    what = _described(record) if artifact.finished else f"unfinished {record['holds']}"
    return Verdict(folder, what, _damage(lambda: _drain(artifact.check())))


def _described(record: Mapping[str, Any]) -> str:
    n = len(record["files"])
    return f"{record['holds']}, {n} {'file' if n == 1 else 'files'}"


def _drain(checks: Iterable[Any]) -> None:
    for _ in checks:
        pass


def _damage(check: Callable[[], None]) -> str | None:
    try:
        check()
    except (InputError, OSError) as error:
        return str(error)
    return None


def _verify_list(path: Path, listed: Any) -> Verdict | None:
    """Verify the table and the figures that a run lists, and that its folders exist."""
    if not isinstance(listed, dict) or not ({CHECKSUM, "files", "folders"} & listed.keys()):
        return None  # somebody else's
    verified(listed, path)
    what = f"list of {len(listed['files'])} files"
    absent = [name for name in listed["folders"] if not is_finished(path.parent / name)]
    if absent:
        return Verdict(path, what, f"{path.parent / absent[0] / CONFIG} is missing.")
    return Verdict(path, what, _damage(lambda: _check_files(path.parent, listed["files"])))


def _verify_table(record: Path, described: Any) -> Verdict | None:
    table, what = record.with_suffix(".csv"), "table of results"
    described = described if isinstance(described, dict) else {}
    if described.get("listed_in") is not None and not (record.parent / FILES).exists():
        return Verdict(table, what, f"{record.parent / FILES} is missing, which lists its files.")
    if not table.exists():
        return Verdict(table, what, f"{table} is missing.") if TABLE in described else None
    return Verdict(table, what, None) if check_described(table) else None
