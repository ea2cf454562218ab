"""What a job takes is printed without loading weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import cells, run_command

from matlens.study.plan import PAIRS, Shape, plan_study
from matlens.study.room import in_words


def test_a_shape_alone_is_enough(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matlens.study.room.free_memory", lambda: 20 * 10**9)
    options = {"layers": 32, "width": 4096, "mlp": 14336, "vocab": 128256, "sentences": 10000}
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    printed = run_command(["plan", *arguments], capsys, width=160).out
    shape = Shape(n_layers=32, d_model=4096, d_mlp=14336, d_vocab=128256)
    planned = {pairs: plan_study(shape, 10_000, 3000, pairs=pairs) for pairs in PAIRS}
    rows = {row[0]: row[1:] for row in cells(printed)}
    assert rows["collect"][1] == in_words(planned["all"]["collect"].disk)
    assert rows["fit from collected vectors"][0] == in_words(
        planned["all"].memory("fit from collected vectors")
    )
    assert rows["load the model"][3] == "no"
    for pairs in PAIRS:
        assert f"--pairs {pairs}: moments of {in_words(planned[pairs].moments)} in float64" in printed
    assert "20 GB of memory are free" in printed


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
