"""The output folder of the main job, looked at before the work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matlens.errors import InputError
from matlens.io.artifact import LAYOUT, Artifact, command_line, describe_file, is_finished
from matlens.io.files import check_seal, check_writable, read_json, sealed, write_json
from matlens.io.verification import FILES

TRAIN, VALIDATION, MAPS, RESULTS, RUN = "train", "validation", "maps", "results", FILES
MOMENTS = "moments"  # in the place of TRAIN, where no vectors are kept
FIGURES = tuple(f"{name}.{suffix}" for name in ("r2", "prediction") for suffix in ("png", "pdf"))
_HOLDS = {TRAIN: "activations", VALIDATION: "activations", MOMENTS: "moments", MAPS: "maps"}


def write_list(folder: Path, run: Mapping[str, Any] | None = None) -> None:
    """List the table and the figures in a folder with their hashes, and the parts that are finished there.

    Parameters
    ----------
    folder
        The folder of a run.
    run
        What the run was asked for and has left, see `RunNote`; by default what the list says already.
    """
    path = folder / RUN
    if run is None:
        try:
            said = check_seal(read_json(path), path)
            run = {key: said[key] for key in ("run", "left") if key in said}
        except (OSError, InputError):
            run = {}
    names = [name for name in (f"{RESULTS}.csv", f"{RESULTS}.json", *FIGURES) if (folder / name).is_file()]
    parts = [name for name in _HOLDS if is_finished(folder / name)]
    files = {name: describe_file(folder / name) for name in names}
    write_json(
        path,
        sealed({"layout": LAYOUT, **run, "files": files, "folders": parts, "command": command_line()}),
    )


def check_output(out: Path, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse an output folder that cannot be written, or that belongs to others or to another job.

    Parameters
    ----------
    out
        The folder.
    known
        What is known already of the provenance of its parts, by their names; a part that is not named is
        none of the job's.

    Raises
    ------
    InputError
        Something there is in the way.
    """
    check_writable(out, (f"{RESULTS}.csv", f"{RESULTS}.json", RUN, *FIGURES) if MAPS in known else ())
    for name, provenance in known.items():
        Artifact.check_possible(out / name, _HOLDS[name], {"provenance": provenance})


def has_moments(folder: Path) -> bool:
    """Whether the training part of a study is there as moments, and not as vectors."""
    return is_finished(folder / MOMENTS) and not (folder / TRAIN).is_dir()
