"""The output folder of the main job: what is in the way is told before the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from matlens.errors import InputError
from matlens.io.artifact import Artifact
from matlens.study.output import MAPS, TRAIN, VALIDATION, check_output

KNOWN: dict[str, dict[str, Any]] = {
    TRAIN: {"data": {"seed": 0}, "positions": "sampled"},
    VALIDATION: {"data": {"seed": 0}},
    MAPS: {"ridge": 0.0},
}


def begin(folder: Path, holds: str, **provenance: Any) -> None:
    """A folder in which a job of this provenance is finished."""
    with Artifact.writing(folder, holds, {"provenance": provenance, "layers": "from 0"}) as artifact:
        artifact.finish()


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_a_new_an_empty_and_an_own_folder_can_be_used(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "out", KNOWN)
    check_output(tmp_path, KNOWN)
    begin(tmp_path / TRAIN, "activations", data={"seed": 0, "n": 3}, positions="sampled")
    begin(tmp_path / MAPS, "maps", ridge=0.0, intercept=False)
    (tmp_path / "mine.txt").write_text("mine")
    before = everything(tmp_path)
    check_output(tmp_path, KNOWN)
    assert everything(tmp_path) == before


def test_where_nothing_can_be_written_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "results.csv").mkdir()
    before = everything(tmp_path)
    for place in (tmp_path / "file" / "out", tmp_path / "loop", Path("/dev/null/out"), Path("/proc/x")):
        with pytest.raises(InputError, match=str(place.parent)):
            check_output(place, KNOWN)
    with pytest.raises(InputError, match="got a folder, a pipe or a device"):
        check_output(tmp_path, KNOWN)
    assert everything(tmp_path) == before
