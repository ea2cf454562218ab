"""The output folder of the main job, looked at before the work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matlens.storage.files import require_writable
from matlens.storage.folders import Workplace

TRAIN, VALIDATION, MAPS, RESULTS, RUN = "train", "validation", "maps", "results", "run.json"
MOMENTS = "moments"  # in the place of TRAIN, where no vectors are kept
FIGURES = tuple(f"{name}.{suffix}" for name in ("r2", "prediction") for suffix in ("png", "pdf"))
_HOLDS = {TRAIN: "activations", VALIDATION: "activations", MOMENTS: "moments", MAPS: "maps"}


def require_output(out: Path, known: Mapping[str, Mapping[str, Any]]) -> None:
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
    require_writable(out, (f"{RESULTS}.csv", f"{RESULTS}.json", RUN, *FIGURES) if MAPS in known else ())
    for name, provenance in known.items():
        Workplace(out / name, _HOLDS[name], {"provenance": provenance}).require_possible()


def require_shard_folder(out: Path, provenance: Mapping[str, Any]) -> None:
    """Refuse a folder that cannot be written, or that holds something else than moments of such samples.

    Raises
    ------
    InputError
        Something there is in the way.
    """
    require_writable(out)
    Workplace(out, _HOLDS[MOMENTS], {"provenance": provenance}).require_possible()


def has_moments(folder: Path) -> bool:
    """Whether the training part of a study is there as moments, and not as vectors."""
    return (folder / MOMENTS / "config.json").is_file() and not (folder / TRAIN).is_dir()
