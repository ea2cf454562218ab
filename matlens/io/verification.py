"""Whether all that lies under a folder is what was written, byte for byte."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from matlens.errors import InputError, checked
from matlens.io.arrays import check_hash, check_record, read_header
from matlens.io.files import SEAL, check_seal, damaged, open_regular, read_json
from matlens.io.folders import BESIDE, CONFIG, FILES, is_record, read_record
from matlens.io.notes import UNFINISHED, Notes
from matlens.io.rows import check_noted, recorded_columns
from matlens.io.tables import TABLE, check_described

_OF_SITE = re.compile(r"[a-z0-9_]+\.\d+\.(npy|safetensors)")  # a file of vectors or of maps


class Verdict(NamedTuple):
    """What was found at one place.

    Attributes
    ----------
    path
        The folder of an artifact, or a table.
    what
        What is there, such as ``"maps, 12 files"``.
    damage
        What is wrong with it, or ``None``.
    """

    path: Path
    what: str
    damage: str | None


@checked
def verify(folder: str | Path) -> Iterator[Verdict]:
    """Check every artifact and every table of results in a folder and below it, all bytes of them.

    What others have put there is passed over. Of a job that was broken off, what it has noted is checked.

    Parameters
    ----------
    folder
        The folder of an artifact, or one with artifacts in it, such as the ``--out`` of a command.

    Raises
    ------
    InputError
        There is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}. Expected one that matlens has written into.")
    seen: set[tuple[int, int]] = set()
    for place, inner, files in os.walk(folder, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            inner.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        for name in {CONFIG, UNFINISHED, BESIDE} & {*inner}:
            yield Verdict(Path(place), name, f"{Path(place, name)} is a folder. Expected a file.")
        inner.sort()
        yield from _verify_place(Path(place), sorted(files))


def _verify_place(folder: Path, names: list[str]) -> Iterator[Verdict]:
    marker = next((name for name in (CONFIG, UNFINISHED) if name in names), None)
    if marker is None and any(map(_OF_SITE.fullmatch, names)):
        config = folder / CONFIG
        yield Verdict(folder, "vectors or maps", f"{config} is missing, so nothing says what its files hold.")
    for record in filter(None, (marker, BESIDE if BESIDE in names else None)):
        verdict = _verify_folder(folder, folder / record)
        if verdict is not None:
            yield verdict
    for name in names:
        if name.endswith(".json") and name not in (CONFIG, UNFINISHED, BESIDE):
            verdict = _verify_list(folder / name) if name == FILES else _verify_table(folder / name)
            if verdict is not None:
                yield verdict


def _verify_folder(folder: Path, marker: Path) -> Verdict | None:
    try:
        if marker.name != BESIDE and not is_record(read_json(marker)):
            return None  # a model's, or something else
        record = read_record(folder, marker)
        if marker.name == UNFINISHED:
            return Verdict(folder, f"unfinished {record['holds']}", _damage(_unfinished(folder, record)))
        count = len(record["files"])
        what = f"{record['holds']}, {count} {'file' if count == 1 else 'files'}"
        return Verdict(folder, what, _damage(_finished(folder, record)))
    except (InputError, OSError) as error:
        return Verdict(folder, marker.name, str(error))


def _damage(checks: Iterator[None]) -> str | None:
    """What the first check that fails says, and None where all hold."""
    try:
        for _ in checks:
            pass
    except (InputError, OSError) as error:
        return str(error)
    return None


def _finished(folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
    for name in config["files"]:
        check_hash(folder / name, check_record(config, folder, name))
        yield


def check_unchanged(folder: Path) -> None:
    """Refuse a pruned model, or any folder with a ``matlens.json``, whose files are not what was written.

    Raises
    ------
    InputError
        A file is missing or has changed; the message names it.
    """
    try:
        files = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
        _check_files(folder, str([(name, of.st_mtime_ns, of.st_size) for name, of in files]))
    except OSError as error:
        raise damaged(folder, f"cannot be read ({error.strerror}: {error.filename})") from error


@lru_cache(maxsize=16)
def _check_files(folder: Path, state: str) -> None:
    """Hash the files that a model is loaded from, once for each state that they are in."""
    config = read_record(folder, folder / BESIDE)
    read = {name: record for name, record in config["files"].items() if not name.endswith(".md")}
    for _ in _finished(folder, {"files": read}):
        pass


def _unfinished(folder: Path, record: Mapping[str, Any]) -> Iterator[None]:
    notes = Notes(folder)
    for note in notes.records:
        if "file" in note:  # of maps; what is gone is made again
            if os.path.lexists(folder / note["file"]):
                check_hash(folder / note["file"], note["record"])
            yield
    for note in notes.records[-1:]:  # of moments, whose last state is what a killed run goes on from
        for of_source in note.get("files", {}).values():
            check_hash(folder / of_source["file"], of_source["record"])
            yield
    if notes.records and "sha256" in notes.records[0]:  # of columns of rows
        for name, column in recorded_columns(record, folder):
            path = folder / f"{name}.npy"
            with open_regular(path) as file:
                read_header(file, path)
                check_noted(path, file.fileno(), file.tell(), column.row_bytes, notes)
            yield


def _verify_list(path: Path) -> Verdict | None:
    """Check the files that a run lists: its table, its figures, and what says what its folders hold."""
    try:
        listed = read_json(path)
        if not isinstance(listed, dict) or not ({SEAL, "files", "folders"} & listed.keys()):
            return None  # somebody else's
        check_seal(listed, path)
        what = f"list of {len(listed['files'])} files"
        absent = [name for name in listed["folders"] if not (path.parent / name / CONFIG).is_file()]
        if absent:
            return Verdict(path, what, f"{path.parent / absent[0] / CONFIG} is missing.")
        return Verdict(path, what, _damage(_finished(path.parent, listed)))
    except (InputError, OSError, KeyError, TypeError) as error:
        return Verdict(path, "list of files", str(error))


def _verify_table(beside: Path) -> Verdict | None:
    table, what = beside.with_suffix(".csv"), "table of results"
    try:
        described = read_json(beside)
        listed_in = described.get("listed_in") if isinstance(described, dict) else None
        if listed_in is not None and not (beside.parent / FILES).exists():
            return Verdict(table, what, f"{beside.parent / FILES} is missing, which lists its files.")
        if not table.exists():
            gone = isinstance(described, dict) and TABLE in described
            return Verdict(table, what, f"{table} is gone.") if gone else None
        return Verdict(table, what, None) if check_described(table) else None
    except (InputError, OSError) as error:
        return Verdict(table, what, str(error)) if table.exists() else None  # else it is somebody else's
