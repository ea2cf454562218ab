"""The output folder of the main job: checked before the work, listed after it, and known when it is finished.

``run.json`` lists the results with their hashes, and says what the run was asked for: the options, and
digests of the model's files and of the corpus. Where all of it is as it was, the same run given again is
answered from the folder, and no model is loaded. In any doubt the run is done again, which compares
everything and does what is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from matlens.data.sources import SAMPLES
from matlens.errors import InputError
from matlens.io.artifact import (
    LAYOUT,
    Artifact,
    command_line,
    describe_file,
    is_finished,
    software_versions,
)
from matlens.io.files import (
    check_seal,
    check_writable,
    content_hash,
    hash_file,
    open_regular,
    read_json,
    sealed,
    write_json,
)
from matlens.io.verification import FILES
from matlens.models.families.wikilm.dictionary import DICTIONARY
from matlens.models.places import CHECKPOINT, locate
from matlens.parallel import waiting

TRAIN, VALIDATION, MAPS, RESULTS, RUN = "train", "validation", "maps", "results", FILES
MOMENTS = "moments"  # in the place of TRAIN, where no vectors are stored
FIGURES = tuple(f"{name}.{suffix}" for name in ("r2", "prediction") for suffix in ("png", "pdf"))
_HOLDS = {TRAIN: "activations", VALIDATION: "activations", MOMENTS: "moments", MAPS: "maps"}
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)  # what damaged files can cause
_MAX_FILES = 1000  # of a model's folder; with more it is not a model alone
_MAKERS = ("gensim", "mwparserfromhell", "sentencex", "weblate")  # which the bundled samples depend on


def check_output(out: Path, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse an output folder that cannot be written, or that belongs to others or to another job.

    ``known`` is what is known already of the provenance of the job's folders, by their names.
    """
    check_writable(out, (f"{RESULTS}.csv", f"{RESULTS}.json", RUN, *FIGURES) if MAPS in known else ())
    for name, provenance in known.items():
        Artifact.check_possible(out / name, _HOLDS[name], {"provenance": provenance})


def has_moments(folder: Path) -> bool:
    """Whether the training part of a study exists as moments, and not as vectors."""
    return is_finished(folder / MOMENTS) and not (folder / TRAIN).is_dir()


def write_list(folder: Path, run: Mapping[str, Any] | None = None) -> None:
    """List the results in a folder with their hashes, and its finished folders."""
    path = folder / RUN
    if run is None:
        try:
            said = check_seal(read_json(path), path)
            run = {key: said[key] for key in ("run", "left") if key in said}
        except (OSError, InputError):
            run = {}
    names = [name for name in (f"{RESULTS}.csv", f"{RESULTS}.json", *FIGURES) if (folder / name).is_file()]
    files = {name: describe_file(folder / name) for name in names}
    folders = [name for name in _HOLDS if is_finished(folder / name)]
    write_json(
        path,
        sealed({"layout": LAYOUT, **run, "files": files, "folders": folders, "command": command_line()}),
    )


class RunNote:
    """The options, the model and the corpus of a run, and whether a folder holds its results.

    Parameters
    ----------
    folder
        The output folder.
    options
        Groups of options by name, each by the names of its options.
    """

    def __init__(self, folder: Path, options: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder, self._options = folder, json.loads(json.dumps(options))
        with waiting("looking at the files"):
            self._asked = self._identities()

    def answers(self) -> bool:
        """Whether the folder holds the results of this run."""
        path = self._folder / RUN
        try:
            note = check_seal(read_json(path), path)
            if self._asked is None or note["run"] != self._asked or note["left"] != self._left():
                return False
            return all(_digest(self._folder / name) == of["sha256"] for name, of in note["files"].items())
        except _UNREADABLE:
            return False

    def write(self) -> None:
        """List the results, and what the run was asked for if model and corpus are still the same."""
        note: dict[str, Any] = {}
        if self._asked is not None and self._identities() == self._asked:
            with suppress(*_UNREADABLE):
                note = {"run": self._asked, "left": self._left()}
        write_list(self._folder, note)

    def _identities(self) -> dict[str, Any] | None:
        try:
            model = model_identity(self._options["model"], but=self._folder)
            corpus = corpus_identity(self._options["corpus"]["corpus"])
        except (OSError, InputError):  # loading them will say what is wrong with them
            return None
        if model is None or corpus is None:
            return None
        software = software_versions()
        return {"options": self._options, "model": model, "corpus": corpus, "software": software}

    def _left(self) -> dict[str, str]:
        """Digests of the table and of the folders' configs; the folders' files must have their sizes."""
        left = {RESULTS: _digest(self._folder / f"{RESULTS}.csv")}  # which another evaluation replaces
        for name in (MOMENTS if has_moments(self._folder) else TRAIN, VALIDATION, MAPS):
            config = read_json(self._folder / name / "config.json")
            for file, about in config.get("files", {}).items():
                if (self._folder / name / file).stat().st_size != about["bytes"]:
                    raise ValueError(f"{file} has another size")
            left[name] = content_hash(
                {key: config.get(key) for key in ("layout", "holds", "request", "files")}
            )
        return left


def model_identity(options: Mapping[str, Any], *, but: Path) -> dict[str, Any] | None:
    """Digests of a model's files, or its commit on the hub; None where that does not settle what it is."""
    if options["trust_remote_code"]:
        return None  # its code may read anything
    place, gguf, commit = locate(options["model"], options["revision"])
    if commit is not None:
        return {"commit": commit}
    folder = Path(place)
    if gguf is not None:
        paths = [folder / gguf]
        if gguf.lower().endswith(CHECKPOINT):
            paths.append(folder / DICTIONARY)
    else:
        out = Path(os.path.realpath(but))
        ignored = {out} if folder in out.parents else set()
        found = (
            Path(place, name)
            for place, _, names in os.walk(folder, followlinks=True)
            for name in names
            if not ignored.intersection((Path(place), *Path(place).parents))
        )
        paths = list(islice(found, _MAX_FILES + 1))
        if len(paths) > _MAX_FILES or any(path.name == "adapter_config.json" for path in paths):
            return None  # an adapter's model is elsewhere
    return {"files": {str(path.relative_to(folder)): _digest(path) for path in sorted(paths)}}


def corpus_identity(name: str) -> dict[str, Any] | None:
    """The digest of a corpus file, or what a sample is made by; None for what only reading it can tell."""
    if name in SAMPLES:
        return {"sample": {package: version(package) for package in _MAKERS if find_spec(package)}}
    path = Path(os.path.expanduser(name))
    return {"file": _digest(path)} if path.is_file() else None


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hash_file(file)[0]
