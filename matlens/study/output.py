"""The output folder of the main job, checked first and listed in ``run.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matlens.io.artifact import Artifact, is_finished, make_config
from matlens.io.files import check_writable, checksummed, describe_file, write_files
from matlens.io.verification import RUN_RECORD

TRAIN, VALIDATION, MAPS, RESULTS, RUN = "train", "validation", "maps", "results", RUN_RECORD
STATISTICS = "statistics"  # in place of TRAIN, where no vectors are stored
FIGURES = tuple(f"{name}.{suffix}" for name in ("r2", "prediction") for suffix in ("png", "pdf"))
_HOLDS = {TRAIN: "activations", VALIDATION: "activations", STATISTICS: "sufficient statistics", MAPS: "maps"}


def check_output(out: Path, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise InputError if an output folder is not writable or belongs to another job.

    ``known`` is the part of the provenance known so far, by folder.
    """
    check_writable(out, (f"{RESULTS}.csv", f"{RESULTS}.json", RUN, *FIGURES))
    for name, provenance in known.items():
        Artifact.check_possible(out / name, _HOLDS[name], {"provenance": provenance})


def has_statistics(folder: Path) -> bool:
    """Whether the training part of a study exists as sufficient statistics, and not as vectors."""
    return is_finished(folder / STATISTICS) and not (folder / TRAIN).is_dir()


def write_list(folder: Path) -> None:
    """List the results in a folder with their hashes, and its finished folders."""
    names = [name for name in (f"{RESULTS}.csv", f"{RESULTS}.json", *FIGURES) if (folder / name).is_file()]
    files = {name: describe_file(folder / name) for name in names}
    config = make_config("results", {"folders": [name for name in _HOLDS if is_finished(folder / name)]})
    write_files({folder / RUN: checksummed({**config, "finished": True, "files": files})})
