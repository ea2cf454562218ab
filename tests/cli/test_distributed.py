"""A command line in several processes: one writes and speaks, and what goes wrong is said once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pandas as pd
from command_lines import run_command
from conftest import make_sentences
from several import run_ranks

from matlens import parallel
from matlens.cli import app
from matlens.data.examples import Batch
from matlens.lens.lens import Lens


def of_a_command(*arguments: object) -> Callable[[], Any]:
    """Run a command line and give what it printed, and its code."""

    def run() -> Any:
        out, err = io.StringIO(), io.StringIO()
        sys.argv = ["matlens", *map(str, arguments)]
        with redirect_stdout(out), redirect_stderr(err):
            try:
                app.main()
            except SystemExit as stop:
                return stop.code or 0, out.getvalue(), err.getvalue()

    return run


def test_a_refusal_is_printed_by_one_process(tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(make_sentences().sentences))
    options = ["run", "--model", tmp_path / "nowhere", "--corpus", tmp_path / "words.txt"]
    command = of_a_command(*options, "--out", tmp_path / "no")
    refused = run_ranks(2, command, tmp_path / "refusals", join=False)
    assert [outcome["result"][0] for outcome in refused] == [2, 2]
    assert "There is no model" in refused[0]["result"][2]
    # Under torchrun the second is ended before it prints the same.
    assert refused[1]["result"][1] == ""
    assert refused[0]["result"][2].endswith(refused[1]["result"][2])


LAUNCHED = """
import sys
from matlens import parallel

with parallel.distributed():
    said = parallel.broadcast(f"from {parallel.rank()}", "a word")
    with open(f"{sys.argv[1]}{parallel.rank()}", "w") as file:
        file.write(f"{parallel.world_size()} {parallel.local_world_size()} {said}")
"""


def test_processes_of_torchrun_are_found(tmp_path):
    """By the launcher itself, as users start it."""
    (tmp_path / "launched.py").write_text(LAUNCHED)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(tmp_path / "launched.py"), str(tmp_path / "rank")],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["2 2 from 0"] * 2


def test_a_run_of_two_processes_equals_that_of_one(model_folder, tmp_path, capsys):
    (tmp_path / "words.txt").write_text("\n".join(make_sentences().sentences))
    options = [
        "run", "--model", model_folder("llama"), "--corpus", tmp_path / "words.txt", "--train", 30,
        "--val", 10, "--device", "cpu", "--positions", "all", "--pairs", "last",
    ]  # fmt: skip
    two = of_a_command(*options, "--out", tmp_path / "two")
    outcomes = [outcome["result"] for outcome in run_ranks(2, two, tmp_path / "outcomes", join=False)]
    assert [(code, out.count("Figures:")) for code, out, _ in outcomes] == [(0, 1), (0, 0)], outcomes
    assert run_command([*options, "--out", tmp_path / "one"], capsys).code == 0
    tables = [pd.read_csv(tmp_path / name / "results.csv") for name in ("one", "two")]
    pd.testing.assert_frame_equal(*tables, rtol=1e-4)
    assert (tmp_path / "two" / "run.json").is_file()


def test_lenses_of_two_processes_are_saved_by_one(model_folder, tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(make_sentences().sentences))
    given = ["--model", model_folder("llama"), "--corpus", tmp_path / "words.txt", "--device", "cpu"]
    methods = ["--train", 30, "--method", "affine", "--method", "scaled", "--out", tmp_path / "lenses"]
    command = of_a_command("lens", "fit", *given, *methods)
    (code, out, err), second = (
        outcome["result"] for outcome in run_ranks(2, command, tmp_path / "outcomes", join=False)
    )
    assert (code, "Traceback" in err, out.count(str(tmp_path / "lenses"))) == (0, False, 2), err
    assert second == (0, "", "")
    assert [Lens.load(tmp_path / "lenses" / name).layers for name in ("affine", "scaled")] == [(0, 1, 2)] * 2


def test_an_interruption_of_one_process_ends_all(model_folder, tmp_path, capsys, monkeypatch):
    """As Ctrl-C does, or whoever ends one of them gently; the folder goes on."""
    (tmp_path / "words.txt").write_text("\n".join(make_sentences().sentences))
    options = [
        "run", "--model", model_folder("llama"), "--corpus", tmp_path / "words.txt", "--train", 30,
        "--val", 10, "--device", "cpu", "--positions", "all", "--pairs", "last", "--out", tmp_path / "out",
    ]  # fmt: skip
    inputs, calls = Batch.inputs, []

    def stopped(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and parallel.is_main():
            raise KeyboardInterrupt
        return inputs(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "inputs", stopped)
        outcomes = run_ranks(
            2, of_a_command(*options, "--batch-tokens", 20), tmp_path / "outcomes", join=False
        )
    assert [outcome["result"][0] for outcome in outcomes] == [130, 2]
    assert "Interrupted. Rerun the same command" in outcomes[0]["result"][2]
    monkeypatch.setattr("matlens.study.steps.plot_results", lambda *_, **__: [])
    assert run_command([*options, "--batch-tokens", 20], capsys).code == 0
