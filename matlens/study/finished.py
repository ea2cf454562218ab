"""Runs that are finished: the same one given again is answered from its folder, and no model is loaded.

Beside the results lies ``run.json``: the options, and digests of the model's files, of the corpus and of
what the run has left. Where all of it is as it was, the table in the folder is what the run would give.
In any doubt it is done again, which compares everything and does what is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from matlens.data.sources import SAMPLES
from matlens.errors import InputError
from matlens.io.artifact import software_versions
from matlens.io.files import check_seal, hash_file, open_regular, read_json
from matlens.models.families.wikilm.dictionary import DICTIONARY
from matlens.models.places import CHECKPOINT, locate
from matlens.parallel import waiting
from matlens.study.output import FIGURES, MAPS, MOMENTS, RESULTS, RUN, TRAIN, VALIDATION, write_list

PARTS = (TRAIN, VALIDATION, MAPS)
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)  # what damaged files can cause
_MOST_FILES = 1000  # of a model's folder; more are no model alone
# What bundled samples are made from and by: they change with these alone.
_MAKERS = ("gensim", "mwparserfromhell", "sentencex", "weblate")


class RunNote:
    """The note of a run in its folder.

    Parameters
    ----------
    folder
        The output folder.
    options
        What the user asked for: the groups of options by name, each by the names of its options.
    """

    def __init__(self, folder: Path, options: Mapping[str, Mapping[str, Any]]) -> None:
        self._path = folder / RUN
        self._folder, self._options = folder, json.loads(json.dumps(options))
        with waiting("looking at the files"):
            self._asked = self._told_apart()

    def answers(self) -> bool:
        """Whether the folder holds what the run would give."""
        try:
            note = check_seal(read_json(self._path), self._path)
            if self._asked is None or note["run"] != self._asked or note["left"] != self._left():
                return False
            return all(_digest(self._folder / name) == of["sha256"] for name, of in note["files"].items())
        except _UNREADABLE:
            return False

    def write(self) -> None:
        """List the files of the run, and what it was unless the model or the corpus has changed meanwhile."""
        note: dict[str, Any] = {}
        if self._asked is not None and self._told_apart() == self._asked:
            with suppress(*_UNREADABLE):
                note = {"run": self._asked, "left": self._left()}
        write_list(self._folder, note)

    def _told_apart(self) -> dict[str, Any] | None:
        try:
            return self._identities()
        except (OSError, InputError):  # whoever loads them says what is wrong with them
            return None

    def _identities(self) -> dict[str, Any] | None:
        model = model_identity(self._options["model"], but=self._folder)
        corpus = corpus_identity(self._options["corpus"]["corpus"])
        if model is None or corpus is None:
            return None
        return {
            "options": self._options, "model": model, "corpus": corpus, "software": software_versions(),
        }  # fmt: skip

    def _left(self) -> dict[str, Any]:
        """What the run has left: its table, and what its parts say of themselves and of their files."""
        left: dict[str, Any] = {}
        for name in PARTS:
            if name == TRAIN and not (self._folder / TRAIN).is_dir():
                name = MOMENTS
            config = read_json(self._folder / name / "config.json")
            for file, about in config.get("files", {}).items():
                if (self._folder / name / file).stat().st_size != about["bytes"]:
                    raise ValueError(f"{file} has another size")
            said = json.dumps([config.get(key) for key in ("layout", "holds", "request", "files")])
            left[name] = hashlib.sha256(said.encode()).hexdigest()
        left[RESULTS] = _digest(self._folder / f"{RESULTS}.csv")
        check_seal(read_json(described := self._folder / f"{RESULTS}.json"), described)
        left["figures"] = [name for name in FIGURES if (self._folder / name).is_file()]
        return left


def model_identity(options: Mapping[str, Any], *, but: Path) -> dict[str, Any] | None:
    """Digests of a model's files, or its commit on the hub; None where that does not settle what it is."""
    if options["trust_remote_code"]:
        return None  # its code may read anything
    place, gguf, commit = locate(options["model"], options["revision"])
    if commit is not None:
        return {"commit": commit}
    if gguf is not None:
        beside = [DICTIONARY] if gguf.lower().endswith(CHECKPOINT) else []
        return {"files": {name: _digest(Path(place, name)) for name in (gguf, *beside)}}
    files = _files(Path(place), os.path.realpath(but))
    if files is None or any(path.name == "adapter_config.json" for path in files):
        return None  # an adapter's model is elsewhere
    return {"files": {str(path.relative_to(place)): _digest(path) for path in files}}


def corpus_identity(name: str) -> dict[str, Any] | None:
    """The digest of a corpus file, or what a sample is made by; None for what only reading it can tell."""
    if name in SAMPLES:
        return {"sample": {package: _version(package) for package in _MAKERS}}
    path = Path(os.path.expanduser(name))
    return {"file": _digest(path)} if os.path.isfile(path) else None


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _files(folder: Path, but: str) -> list[Path] | None:
    paths = []
    for path in _walk(folder, but):
        paths.append(path)
        if len(paths) > _MOST_FILES or not path.is_file():
            return None
    return sorted(paths)


def _walk(folder: Path, but: str) -> Iterable[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if os.path.realpath(path) != but:
                yield from _walk(path, but)
        else:
            yield path


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hash_file(file)[0]
