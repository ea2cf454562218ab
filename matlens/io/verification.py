"""Verification of all files in a folder, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from matlens.errors import InputError, checked
from matlens.io.artifact import CONFIG, MODEL_RECORD, Artifact, is_finished, is_record, read_record
from matlens.io.cache import file_states
from matlens.io.files import CHECKSUM, check_file, damaged, inside, read_json
from matlens.io.tables import TABLE, check_described

RUN_RECORD = "run.json"
"""The record of the table of results and the figures of a run, and of its folders."""


class Verdict(NamedTuple):
    """The result for the folder of an artifact, or for a table."""

    path: Path
    what: str  # such as "maps, 12 files"
    damage: str | None


@checked
def verify(folder: str | Path) -> Iterator[Verdict]:
    """Verify the checksums of all artifacts and tables below a folder.

    Files of others are ignored. Of an interrupted job, the complete files are verified.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"folder must be an existing folder, got {folder}.")
    for path in sorted(folder.rglob("*.json")):
        is_table = path.name not in (CONFIG, MODEL_RECORD, RUN_RECORD)
        subject = path.with_suffix(".csv") if is_table else path if path.name == RUN_RECORD else path.parent
        try:
            what = _verify_table(path) if is_table else _verify_artifact(path)
        except (InputError, OSError) as error:
            yield Verdict(subject, path.name, str(error))
        else:
            if what:
                yield Verdict(subject, what, None)


def _verify_artifact(path: Path) -> str | None:
    """The contents of an artifact, by its record; None if the record is not of matlens."""
    if path.name != MODEL_RECORD and not is_record(read_json(path)):
        return None
    artifact = Artifact(path.parent, read_record(path))
    artifact.check()
    for name in artifact.request.get("folders", ()):
        if not is_finished(inside(path.parent, name)):
            raise InputError(f"{path.parent / name / CONFIG} is missing.")
    holds, n = artifact.config["holds"], len(artifact.config.get("files", ()))
    return f"{holds}, {n} {'file' if n == 1 else 'files'}" if artifact.finished else f"unfinished {holds}"


def _verify_table(path: Path) -> str | None:
    """What a JSON describes, if it is a table; other JSON is of an artifact, which lists it, or foreign."""
    table = path.with_suffix(".csv")
    if table.is_file():
        return "table of results" if check_described(table) else None
    try:
        record = read_json(path)
    except (InputError, OSError):
        return None
    if isinstance(record, dict) and {CHECKSUM, TABLE} <= record.keys():
        raise damaged(table, "is missing")
    return None


def check_unchanged(folder: Path) -> None:
    """Raise InputError if a file of a pruned model, but its card, is not what was written."""
    _check_model(folder, str(file_states(sorted(folder.iterdir()))))


@lru_cache
def _check_model(folder: Path, state: str) -> None:
    """Hash the files that a model is loaded from, once per state of them."""
    for name, record in read_record(folder / MODEL_RECORD)["files"].items():
        if not name.endswith(".md"):
            check_file(inside(folder, name), record)
