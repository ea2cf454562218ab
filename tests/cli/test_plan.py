"""What a job takes is printed without loading weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from command_lines import cells, run_command

from matlens.cli.study import PairsChoice
from matlens.study.plan import Shape, format_bytes, plan_study


@pytest.mark.parametrize(("disk", "fits"), [(10**12, "yes"), (10**9, "no")])
@pytest.mark.parametrize("kept", [False, True])
def test_what_is_printed_is_the_plan(
    disk: int, fits: str, kept: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are stored and not the vectors, unless that is asked for; the disk counts too."""
    monkeypatch.setattr("matlens.study.plan.free_memory", lambda: 10**12)
    monkeypatch.setattr("matlens.study.plan.free_disk", lambda _: disk)
    options = {"layers": 32, "width": 4096, "mlp": 14336, "vocab": 128256, "sentences": 10000}
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    arguments += ["--positions", "all", "--pairs", "last", *["--keep-rows"] * kept]
    printed = run_command(["plan", *arguments], capsys, width=200).out
    shape = Shape(n_layers=32, d_model=4096, d_mlp=14336, d_vocab=128256)
    plans = {
        pairs: plan_study(shape, 10_000, 1000, positions="all", pairs=pairs, keep_rows=kept)
        for pairs in get_args(PairsChoice)
    }
    plan, rows = plans["last"], {row[0]: row[1:] for row in cells(printed)}
    assert list(rows) == list(plan.needs)
    for step, need in plan.needs.items():
        on_disk = format_bytes(need.disk) if need.disk else "–"
        assert rows[step][:2] == [format_bytes(plan.memory(step)), on_disk]
    assert (rows["collect"][3], rows["load the model"][3]) == (
        fits if kept or disk == 10**9 else "yes",
        "yes",
    )
    for pairs, each in plans.items():
        memory, written = each.job
        (line,) = (line for line in printed.splitlines() if line.startswith(f"--pairs {pairs}: "))
        for part in (f"sums of {format_bytes(each.moments)}", f"{format_bytes(memory)} of memory"):
            assert part in line
        assert f"{format_bytes(written)} of disk. Fits: {'yes' if written <= disk else 'no'}." in line
    assert f"1 TB of memory and {format_bytes(disk)} of disk are free" in printed


@pytest.mark.parametrize(
    ("n", "positions", "planned"),
    [(100, "auto", "all"), (100, "sampled", "sampled"), (128, "auto", "sampled")],
)
def test_few_sentences_are_planned_as_they_are_run(
    n: int, positions: str, planned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """'matlens run' takes all positions of sentences that are fewer than twice the width."""
    arguments = ["plan", "--layers", "3", "--width", "64", "--sentences", n, "--positions", positions]
    assert f"{planned} positions" in " ".join(run_command(arguments, capsys, width=200).out.split())


def test_a_models_configuration_is_enough(
    capsys: pytest.CaptureFixture[str], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((model_folder("llama") / "config.json").read_bytes())
    arguments = ["--model", tmp_path, "--sentences", 50, "--positions", "all", "--pairs", "last"]
    printed = run_command(["plan", *arguments], capsys, width=160).out
    assert "3 layers of 32, " in printed
    assert "all positions, pairs last" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Which model? Expected either --model"),
        (["--model", "x", "--layers", "3", "--width", "8"], "Which model? Expected either --model"),
        (["--model", "/nowhere"], "There is no model"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused = run_command(["plan", *arguments], capsys, width=160)
    assert refused.code == 2
    assert message in " ".join(refused.err.split())
