"""The main job on the command line, whole, in steps, in parts and in two processes."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command_lines import Outcome, cells
from conftest import N_LAYERS, WORDS, make_sentences, tree
from safetensors.torch import load_file, save_file
from several import run_ranks
from studying import study_of

import matlens
from matlens import Lens, parallel
from matlens.activations import Activations
from matlens.cli import app
from matlens.data.examples import Batch
from matlens.study.steps import evaluate_maps, fit_maps, plot_results

N_TRAIN, N_VALIDATION = 70, 20
SIZES = ["--train", str(N_TRAIN), "--val", str(N_VALIDATION), "--device", "cpu"]
ALL_PAIRS = [(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1)]


@pytest.fixture(autouse=True)
def surroundings(request, monkeypatch):
    """Figures take longer than all else, and are drawn only where a test asks for them."""
    if "with_figures" not in request.fixturenames:
        monkeypatch.setattr("matlens.study.steps.plot_results", lambda *_, **__: [])


@pytest.fixture
def with_figures():
    """Draw figures, which take longer than all else."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A hundred different sentences, one a line."""
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("".join(" ".join(generator.choice(WORDS, 5 + i % 16)) + "\n" for i in range(100)))
    return path


@pytest.fixture(scope="session")
def gpt2(model_folder):
    return model_folder("gpt2")


@pytest.fixture
def inputs(gpt2, corpus):
    """What most commands start from."""
    return ["--model", str(gpt2), "--corpus", str(corpus), *SIZES]


@pytest.fixture(scope="session")
def _finished(gpt2, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "out"
    model = matlens.load(str(gpt2), device="cpu")
    texts = matlens.load_corpus(str(corpus))
    _ = study_of(model, texts, out, n_train=N_TRAIN, n_validation=N_VALIDATION).stream
    fit_maps(out, progress=False)
    evaluate_maps(model, out, progress=False)
    plot_results(out)
    return out


@pytest.fixture
def finished(_finished, tmp_path):
    """A folder in which everything is done; a copy, to be damaged at will."""
    return Path(shutil.copytree(_finished, tmp_path / "finished"))


def results(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "results.csv")


def without_command(content: dict[str, bytes]) -> dict[str, bytes]:
    """Files without the words of the command and digests of them, of which ``run.json`` is a list."""
    files = {name: data for name, data in content.items() if name != "run.json"}
    return {name: re.sub(rb'"(command|digest|evaluation)": ".*"', b"", data) for name, data in files.items()}


def assert_refused(outcome: Outcome, *messages: str) -> None:
    """Exit code 2 and a message, without a traceback, that tells all of this."""
    assert outcome.code == 2
    assert "Traceback" not in outcome.err + outcome.out
    message = " ".join(outcome.err.replace("│", " ").split())
    for part in messages:
        assert part in message


# What it does


def test_run_does_everything(run_matlens, inputs, finished, tmp_path, with_figures):
    out = tmp_path / "new" / "out"
    outcome = run_matlens("run", *inputs, "--out", out, "--seed", 3)
    assert outcome.code == 0
    assert set(tree(out)) == set(tree(finished))
    table = results(out)
    of_maps = (table["method"] == "mat") & (table["metric"] == "r2")
    assert list(zip(table[of_maps]["layer"], table[of_maps]["target"], strict=True)) == ALL_PAIRS
    assert (table[of_maps]["value"] != results(finished)[of_maps]["value"]).all()  # another seed
    assert set(table["n"]) == {N_VALIDATION}
    origin = json.loads((out / "results.json").read_text())
    assert origin["maps"]["data"]["seed"] == origin["validation"]["seed"] == 3
    assert (origin["maps"]["n_samples"], origin["validation"]["n"]) == (N_TRAIN, N_VALIDATION)
    assert origin["command"] == f"matlens run {' '.join(inputs)} --out {out} --seed 3"
    rows = cells(outcome.out)
    assert [row[0] for row in rows] == [str(layer) for layer in range(N_LAYERS + 1)]
    for layer, row in enumerate(rows):
        shown = [float(cell) for cell in row[1:] if cell != "–"]
        assert shown == pytest.approx(printed(table, layer), abs=0.00051)


def printed(table: pd.DataFrame, layer: int) -> list[float]:
    """What the printed row of a layer should hold, read from the table one value at a time."""
    values = []
    for metric in ("r2", "precision", "surprisal"):
        for method in ("mat", "id"):
            rows = table[(table["layer"] == layer) & (table["target"] == N_LAYERS)]
            rows = rows[(rows["metric"] == metric) & (rows["method"] == method)]
            values += list(rows[rows["k"].isin([1]) | rows["k"].isna()]["value"])
    return values


def test_run_equals_the_commands_one_after_the_other(run_matlens, inputs, tmp_path, with_figures):
    whole, steps = tmp_path / "whole", tmp_path / "steps"
    assert run_matlens("run", *inputs, "--out", whole).code == 0
    for command, said in (
        (["collect", *inputs, "--out", steps], f"Next: matlens fit {steps}"),
        (["fit", steps], f"{len(ALL_PAIRS)} maps in {steps / 'maps'}"),
        (["evaluate", steps, "--device", "cpu"], f"Next: matlens plot {steps}"),
        (["plot", steps], f"Figures: {steps / 'r2.png'}"),
    ):
        outcome = run_matlens(*command)
        assert outcome.code == 0
        assert said in outcome.out
    assert without_command(tree(whole)) == without_command(tree(steps))


def test_options_of_a_fit_reach_it(run_matlens, inputs, finished):
    shutil.rmtree(finished / "maps")
    options = ["--pairs", "-3:3,0:-2", "--intercept", "--ridge", 0.5]
    outcome = run_matlens("run", *inputs, "--out", finished, *options)
    assert outcome.code == 0
    assert [row[0] for row in cells(outcome.out)] == ["1", "3"]
    train, maps = Activations.load(finished / "train"), matlens.MapSet.load(finished / "maps")
    expected = matlens.MapSet.fit(train, pairs=[(1, 3), (0, 2)], intercept=True, ridge=0.5, progress=False)
    assert list(maps) == list(expected)
    for pair, linear in maps.items():
        torch.testing.assert_close(linear.weight, expected[pair].weight)
        torch.testing.assert_close(linear.bias, expected[pair].bias)


def test_a_stack_of_an_encoder_decoder(run_matlens, model_folder, corpus, tmp_path):
    """An encoder predicts nothing, so its maps have r2 alone; a decoder needs more than sentences."""
    inputs = ["--model", model_folder("t5"), "--corpus", corpus, *SIZES, "--positions", "sampled"]
    refused = run_matlens("run", *inputs, "--stack", "decoder", "--out", tmp_path / "none")
    assert_refused(refused, "has no sources")
    assert not (tmp_path / "none").exists()
    out = tmp_path / "out"
    assert run_matlens("run", *inputs, "--stack", "encoder", "--out", out).code == 0
    table = results(out)
    assert set(table["metric"]) == {"r2"}
    assert run_matlens("evaluate", out, "--stack", "encoder").code == 0
    pd.testing.assert_frame_equal(results(out), table)


def test_a_model_that_has_moved_or_changed(run_matlens, inputs, gpt2, tmp_path):
    """The fingerprint says whether it is the same model, and its name does not matter."""
    here, moved, out = tmp_path / "here", tmp_path / "moved", tmp_path / "out"
    shutil.copytree(gpt2, here)
    of_here, of_moved = (
        [str(path) if item == str(gpt2) else item for item in inputs] for path in (here, moved)
    )
    assert run_matlens("run", *of_here, "--out", out).code == 0
    table = (out / "results.csv").read_bytes()
    train = without_command(tree(out / "train"))
    here.rename(moved)
    assert_refused(run_matlens("evaluate", out), str(here))
    assert run_matlens("evaluate", out, "--model", moved, "--device", "cpu").code == 0
    assert (out / "results.csv").read_bytes() == table
    shutil.rmtree(out / "validation")
    assert run_matlens("run", *of_moved, "--out", out).code == 0
    assert without_command(tree(out / "train")) == train

    before = tree(out)
    weights = load_file(moved / "model.safetensors")
    weights["transformer.h.1.ln_1.weight"] *= 1.5
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    assert_refused(run_matlens("evaluate", out, "--model", moved), str(moved), "weights")
    assert_refused(run_matlens("run", *of_moved, "--out", out), "belongs to another job")
    assert tree(out) == before


def test_maps_are_evaluated_in_another_precision_where_the_user_says_so(run_matlens, inputs, finished):
    table = results(finished)
    options = ["evaluate", finished, "--device", "cpu", "--dtype", "bfloat16"]
    assert_refused(run_matlens(*options), "float32", "bfloat16")
    assert run_matlens(*options, "--no-strict").code == 0
    again, fits = results(finished), table["metric"] == "r2"
    pd.testing.assert_frame_equal(again[fits], table[fits])
    assert not again[~fits]["value"].equals(table[~fits]["value"])
    assert again[~fits]["value"].tolist() == pytest.approx(table[~fits]["value"].tolist(), rel=0.2, abs=0.2)
    assert run_matlens("run", *inputs, "--out", finished).code == 0  # and not taken for those of float32
    pd.testing.assert_frame_equal(results(finished), table)


def test_a_finished_run_is_not_evaluated_again(run_matlens, inputs, finished, monkeypatch):
    command = ["run", *inputs, "--out", finished]
    table = (finished / "results.csv").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("matlens.study.steps.fit_quality", lambda *_, **__: 1 / 0)
        again = run_matlens(*command)
        assert again.code == 0
        assert len(cells(again.out)) == N_LAYERS + 1
        for change in ("results.csv", "results.json"):
            (finished / change).write_bytes((finished / change).read_bytes()[:-9])
            with pytest.raises(ZeroDivisionError):
                run_matlens(*command)
    assert run_matlens(*command).code == 0
    assert (finished / "results.csv").read_bytes() == table


# What it refuses


def test_an_output_folder_of_others_or_of_another_job(run_matlens, inputs, finished):
    command, before = ["run", *inputs, "--out", finished], tree(finished)
    for options, part, message in (
        (["--seed", 5], "train", "seed: 0 there, 5 now"),
        (["--dtype", "bfloat16"], "train", "dtype: float32 there, bfloat16 now"),
        (["--ridge", "0.5"], "maps", "ridge: 0.0 there, 0.5 now"),
        (["--pairs", "last"], "maps", "pairs"),
    ):
        refused = run_matlens(*command, *options)
        assert_refused(refused, str(finished / part), "belongs to another job", message, "remove")
    assert tree(finished) == before
    shutil.rmtree(finished / "maps")
    (finished / "maps" / "deep").mkdir(parents=True)
    (finished / "maps" / "deep" / "mine.txt").write_text("mine")
    before = tree(finished)
    assert_refused(run_matlens(*command), str(finished / "maps"), "holds other files")
    assert tree(finished) == before


# A disk that is full


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Writes beyond a size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))  # Python ignores SIGXFSZ from the start
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_and_nothing_unfinished_remains(
    run_matlens, inputs, finished, tmp_path, with_figures
):
    no_room = "ile too large"  # of Python, or of safetensors
    with largest_file(2000):
        outcome = run_matlens("run", *inputs, "--out", tmp_path / "new" / "out")
    assert_refused(outcome, no_room)
    assert tree(tmp_path / "new") == {}
    for command, n_bytes in ((["plot"], 10_000), (["evaluate", "--device", "cpu"], 1000)):
        before = tree(finished)
        with largest_file(n_bytes):
            assert_refused(run_matlens(*command, finished), no_room)
        assert tree(finished) == before
        (finished / "results.json").unlink(missing_ok=True)  # else there is nothing to evaluate
    maps = without_command(tree(finished / "maps"))
    shutil.rmtree(finished / "maps")
    with largest_file(10_000):  # the first source, with three maps, is too large; the others are not
        assert_refused(run_matlens("fit", finished), no_room)
    assert not (finished / "maps").exists()
    assert run_matlens("fit", finished).code == 0
    assert without_command(tree(finished / "maps")) == maps


# Parts of a job, and processes


@pytest.fixture
def options(model_folder, tmp_path):
    """A job that leaves sufficient statistics of all positions."""
    (tmp_path / "words.txt").write_text("\n".join(make_sentences().sentences))
    sizes = ["--train", "30", "--val", "10", "--device", "cpu", "--positions", "all", "--pairs", "last"]
    return ["--model", str(model_folder("llama")), "--corpus", str(tmp_path / "words.txt"), *sizes]


def test_parts_merged_give_the_table_of_one_run(run_matlens, options, tmp_path):
    assert run_matlens("run", *options, "--out", tmp_path / "whole").code == 0
    for number in (2, 1):
        run_matlens("part", "--part", f"{number}/2", *options, "--out", tmp_path / f"s{number}")
    run_matlens("merge", tmp_path / "s2", tmp_path / "s1", "--out", tmp_path / "joined")
    assert run_matlens("run", *options, "--out", tmp_path / "joined").code == 0
    tables = [pd.read_csv(tmp_path / name / "results.csv") for name in ("whole", "joined")]
    pd.testing.assert_frame_equal(*tables, rtol=1e-4)
    # The same maps as of stored vectors.
    assert run_matlens("run", *options, "--keep-rows", "--out", tmp_path / "kept").code == 0
    train, validation = (Activations.load(tmp_path / "kept" / part) for part in ("train", "validation"))
    assert (train.positions, validation.positions) == ("all", "sampled")
    assert train.n_rows == int(train.examples.lengths.sum())
    one, other = (matlens.MapSet.load(tmp_path / name / "maps") for name in ("whole", "kept"))
    assert one.provenance.to_json() == other.provenance.to_json()
    table = pd.read_csv(tmp_path / "kept" / "results.csv")
    pd.testing.assert_frame_equal(tables[0], table, rtol=1e-4)
    # Maps of merged parts are not fitted on other vectors, which lie there.
    assert run_matlens("merge", tmp_path / "s2", tmp_path / "s1", "--out", tmp_path / "kept").code == 2
    assert not (tmp_path / "kept" / "statistics").exists()


def test_missing_duplicate_and_unknown_parts_are_refused(run_matlens, options, tmp_path):
    assert run_matlens("part", "--part", "1/3", *options, "--out", tmp_path / "s").code == 0
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    for given, message in ((["s"], "missing are 2/3, 3/3"), (["s", "copy"], "1/3, 1/3")):
        folders = [tmp_path / name for name in given]
        assert_refused(run_matlens("merge", *folders, "--out", tmp_path / "joined"), message)
        assert not (tmp_path / "joined").exists()


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


def test_a_refusal_is_printed_by_one_process(options, tmp_path):
    command = of_a_command("run", *options, "--model", tmp_path / "nowhere", "--out", tmp_path / "no")
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


def test_a_run_of_two_processes_equals_that_of_one(run_matlens, options, tmp_path):
    two = of_a_command("run", *options, "--out", tmp_path / "two")
    outcomes = [outcome["result"] for outcome in run_ranks(2, two, tmp_path / "outcomes", join=False)]
    assert [(code, out.count("Figures:")) for code, out, _ in outcomes] == [(0, 1), (0, 0)], outcomes
    assert run_matlens("run", *options, "--out", tmp_path / "one").code == 0
    tables = [pd.read_csv(tmp_path / name / "results.csv") for name in ("one", "two")]
    pd.testing.assert_frame_equal(*tables, rtol=1e-4)
    assert (tmp_path / "two" / "run.json").is_file()


def test_lenses_of_two_processes_are_saved_by_one(options, model_folder, tmp_path):
    given = ["--model", model_folder("llama"), "--corpus", tmp_path / "words.txt", "--device", "cpu"]
    methods = ["--train", 30, "--method", "affine", "--method", "scaled", "--out", tmp_path / "lenses"]
    command = of_a_command("lens", "fit", *given, *methods)
    (code, out, err), second = (
        outcome["result"] for outcome in run_ranks(2, command, tmp_path / "outcomes", join=False)
    )
    assert (code, "Traceback" in err, out.count(str(tmp_path / "lenses"))) == (0, False, 2), err
    assert second == (0, "", "")
    assert [Lens.load(tmp_path / "lenses" / name).layers for name in ("affine", "scaled")] == [(0, 1, 2)] * 2


def test_an_interruption_of_one_process_ends_all(run_matlens, options, tmp_path, monkeypatch):
    """As Ctrl-C does, or whoever ends one of them gently; the folder goes on."""
    job = ["run", *options, "--out", tmp_path / "out", "--batch-tokens", 20]
    inputs, calls = Batch.inputs, []

    def stopped(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and parallel.is_main():
            raise KeyboardInterrupt
        return inputs(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "inputs", stopped)
        outcomes = run_ranks(2, of_a_command(*job), tmp_path / "outcomes", join=False)
    assert [outcome["result"][0] for outcome in outcomes] == [130, 2]
    assert "Interrupted. Rerun the same command" in outcomes[0]["result"][2]
    assert run_matlens(*job).code == 0
