"""What `verify` says of folders as they were written, and of damaged ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command_lines import run_command
from damage import harmed
from small_maps import ORIGIN, PAIRS, linear

from matlens import MapSet
from matlens.io.rows import Column, writing_rows
from matlens.io.tables import write_results
from matlens.io.verification import verify
from matlens.linear.mapsets import write_maps


def write_rows(folder: Path, *, broken_off: bool = False) -> None:
    columns, arrays = dict.fromkeys(("h.0", "h.1"), Column(3)), {"tokens": np.arange(3)}
    with writing_rows("activations", {}, columns, [2] * 3, folder=folder, arrays=arrays) as writer:
        for number in writer.missing:
            if broken_off and number == 2:
                raise KeyboardInterrupt
            rows = torch.arange(6.0).view(2, 3) + number
            writer.add(np.arange(2) + 2 * number, {"h.0": rows, "h.1": -rows})


@pytest.fixture
def out(tmp_path):
    """An output folder with everything in it, and with files of others."""
    folder = tmp_path / "out"
    write_rows(folder / "train")
    MapSet([linear(*pair) for pair in PAIRS], provenance=ORIGIN).save(folder / "maps")
    write_results(folder, "results", pd.DataFrame({"value": [0.25, 0.5]}), {"seed": 0})
    with pytest.raises(KeyboardInterrupt):
        write_rows(folder / "validation", broken_off=True)

    def fit(pairs: Any) -> Any:
        for pair in pairs:
            if pair[0] == "h.1":
                raise KeyboardInterrupt
            yield linear(*pair)

    with pytest.raises(KeyboardInterrupt):
        write_maps(folder / "more-maps", PAIRS, fit, ORIGIN)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    (folder / "notes.txt").write_text("mine")
    os.mkfifo(folder / "pipe")
    return folder


WHATS = {
    "maps": "maps, 3 files",
    "more-maps": "unfinished maps",
    "results.csv": "table of results",
    "train": "activations, 4 files",
    "validation": "unfinished activations",
}


def test_undamaged_folders_and_tables_are_verified(out):
    verdicts = list(verify(out))
    assert {v.path.name: v.what for v in verdicts} == WHATS
    assert [v.damage for v in verdicts] == [None] * 5
    assert [v.what for v in verify(str(out / "maps"))] == ["maps, 3 files"]


def test_a_damaged_or_missing_file_is_named(out):
    for name in (
        "train/00001.safetensors",
        "validation/00000.safetensors",
        "maps/h.0.safetensors",
        "results.csv",
    ):
        path = out / name
        place, whole = path.parent if path.parent != out else path, path.read_bytes()
        for harm in harmed(path, 12, seed=3):
            verdicts = {verdict.path: verdict.damage for verdict in verify(out)}
            assert str(path) in (verdicts.pop(place) or ""), harm
            assert set(verdicts.values()) == {None}, harm
        if not name.startswith("validation"):
            path.unlink()
            (damage,) = (verdict.damage for verdict in verify(out) if verdict.damage)
            assert str(path) in damage
            path.write_bytes(whole)


def test_the_command_exits_with_2_on_damage(out, capsys, tmp_path):
    done = run_command(["verify", out], capsys)
    assert done.code == 0
    assert [line.endswith("  ok") for line in done.out.splitlines()] == [True] * 5
    path = out / "train" / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    done = run_command(["verify", out], capsys)
    assert done.code == 2
    assert len(done.out.splitlines()) == 5
    (line,) = (line for line in done.out.splitlines() if "DAMAGED" in line)
    assert str(path) in line
    assert run_command(["verify", tmp_path / "absent"], capsys).code == 2
