"""What a job takes is printed without loading weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import cells, run_command

from matlens.study.plan import Shape, format_bytes, plan_study


def test_a_shape_alone_is_enough(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matlens.study.plan.free_memory", lambda: 20 * 10**9)
    monkeypatch.setattr("matlens.study.plan.free_disk", lambda _: 10**12)
    options = {"layers": 32, "width": 4096, "mlp": 14336, "vocab": 128256, "sentences": 10000}
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    printed = run_command(["plan", *arguments], capsys, width=160).out
    shape = Shape(n_layers=32, d_model=4096, d_mlp=14336, d_vocab=128256)
    planned = {pairs: plan_study(shape, 10_000, 1000, pairs=pairs) for pairs in ("last", "all")}
    rows = {row[0]: row[1:] for row in cells(printed)}
    assert rows["collect"][1] == format_bytes(planned["all"]["collect"].disk)
    assert rows["fit from collected vectors"][0] == format_bytes(
        planned["all"].memory("fit from collected vectors")
    )
    assert rows["load the model"][3] == "no"
    for pairs in ("last", "all"):
        assert f"--pairs {pairs}: moments of {format_bytes(planned[pairs].moments)} in float64" in printed
    assert "20 GB of memory and 1 TB of disk are free" in printed
    verdicts = {line.split(":")[0]: line for line in " ".join(printed.split()).split("--pairs ")[1:]}
    memory, disk = planned["last"].job
    assert (
        f"take {format_bytes(memory)} of memory and {format_bytes(disk)} of disk, which" in verdicts["last"]
    )


@pytest.mark.parametrize(("disk", "fits"), [(10**12, "yes"), (10**9, "no")])
def test_all_positions_are_planned_as_they_are_run(
    disk: int, fits: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments are kept and not the vectors, unless that is asked for; the disk counts too."""
    monkeypatch.setattr("matlens.study.plan.free_memory", lambda: 10**12)
    monkeypatch.setattr("matlens.study.plan.free_disk", lambda _: disk)
    arguments = ["plan", "--layers", "32", "--width", "4096", "--positions", "all", "--pairs", "last"]
    printed = run_command(arguments, capsys, width=160).out
    shape = Shape(n_layers=32, d_model=4096)
    for kept in (False, True):
        printed = run_command([*arguments, *["--keep-rows"] * kept], capsys, width=160).out
        rows = {row[0]: row[1:] for row in cells(printed)}
        plan = plan_study(shape, 3000, 1000, positions="all", pairs="last", keep_rows=kept)
        assert rows["collect"][1] == format_bytes(plan["collect"].disk)
        assert (rows["collect"][3], rows["load the model"][3]) == (fits, "yes")
        assert ("fit from collected vectors" in rows) is kept
        assert ("fit from moments" in rows) is not kept
        said = "which fits" if fits == "yes" else "which does not fit"
        assert " ".join(printed.split()).count(said) == 2
        assert ("--keep-rows keeps the vectors" in " ".join(printed.split())) is not kept


def test_few_sentences_are_planned_as_they_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    """'matlens run' takes all positions of sentences that are fewer than twice the width."""
    note = "100 sentences are few for 64 dimensions: unless it is told --positions drawn, 'matlens run' takes"
    arguments = ["plan", "--layers", "3", "--width", "64", "--sentences"]
    for n, positions, planned, told in (
        (100, "auto", "all", False),
        (100, "drawn", "drawn", True),
        (128, "auto", "drawn", False),
        (128, "drawn", "drawn", False),
    ):
        printed = run_command([*arguments, n, "--positions", positions], capsys, width=200).out
        assert f"{planned} positions" in printed
        assert (note in " ".join(printed.split())) is told


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
        (["--layers", "3"], "Which model? Expected either --model"),
        (["--model", "x", "--layers", "3", "--width", "8"], "Which model? Expected either --model"),
        (["--model", "x", "--vocab", "9"], "Which model? Expected either --model"),
        (["--layers", "3", "--width", "8", "--pairs", "0:1"], "--pairs"),
        (["--model", "/nowhere"], "There is no model"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused = run_command(["plan", *arguments], capsys, width=160)
    assert refused.code == 2
    assert message in " ".join(refused.err.split())
