"""The command that says which lens to use writes what the library makes, and prints it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_lines import FfnCommands

import matlens
from matlens import InputError
from matlens.cli.lens_report import numbered
from matlens.lens import compare_lenses


def test_report_writes_tables_and_a_figure_and_prints_a_line_for_each_lens(
    model_folder: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    small_model: Callable[[str], Any],
    corpora: Path,
    tmp_path: Path,
) -> None:
    commands = FfnCommands(model_folder, capsys)
    arguments = ["--corpus", corpora / "few.txt", "--train", 30, "--val", 20, "--out", tmp_path / "out"]
    printed = commands.run(
        "lens", "report", *arguments, "--methods", "id, mat", "--layers", "1,2", model="llama"
    )
    parts = matlens.load_corpus(str(corpora / "few.txt")).split(n_train=30, n_validation=20)
    made = compare_lenses(
        small_model("llama"), parts, tmp_path / "own", methods=["id", "mat"], layers=[1, 2], progress=False
    )
    written = pd.read_csv(tmp_path / "out" / "lens_report.csv")
    costs = written["metric"].isin(["seconds"])
    assert written.loc[~costs, "value"].tolist() == pytest.approx(
        made.report.loc[~made.report["metric"].eq("seconds"), "value"].tolist(), rel=1e-5
    )
    assert (tmp_path / "out" / "lens_report.png").stat().st_size > 1000
    assert (tmp_path / "out" / "lens_exits.json").is_file()
    assert not (tmp_path / "out" / "lens_cosines.csv").exists()
    lines = [line for line in printed.splitlines() if "│ id" in line or "│ mat" in line]
    assert len(lines) == 2


def test_layers_are_numbers_with_a_comma_between() -> None:
    assert numbered("5, 10,-3") == [5, 10, -3]
    assert numbered(None) is None
    with pytest.raises(InputError, match="Expected numbers"):
        numbered("5,x")
