"""The main job on the command line: what it writes and prints, and what it says of unusable input."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command_lines import Outcome, cells
from conftest import N_LAYERS, WORDS, tree
from safetensors.torch import load_file, save_file
from studying import study_of

import matlens
from matlens.activations import Activations
from matlens.study.steps import evaluate_maps, fit_maps, plot_results

N_TRAIN, N_VALIDATION = 70, 20
SIZES = ["--train", str(N_TRAIN), "--val", str(N_VALIDATION), "--device", "cpu"]
FIGURES = {"r2.png", "r2.pdf", "prediction.png", "prediction.pdf"}
ALL_PAIRS = [(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1)]
Matlens = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def surroundings(request, monkeypatch):
    """No test asks the hub for anything, and figures are drawn only where a test asks for them."""

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("the hub is patched away")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
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


def origin_of(folder: Path) -> dict[str, dict[str, object]]:
    return dict(json.loads((folder / "results.json").read_text()))


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
    fit = table[table["experiment"] == "fit_quality"]
    for method in ("mat", "id"):
        part = fit[fit["method"] == method]
        assert list(zip(part["layer"], part["target"], strict=True)) == ALL_PAIRS
    of_maps = (table["method"] == "mat") & (table["metric"] == "r2")
    assert (table[of_maps]["value"] != results(finished)[of_maps]["value"]).all()  # another seed
    prediction = table[table["experiment"] == "prediction_quality"]
    counted = prediction.groupby(["layer", "method", "metric"]).size().unstack()
    assert counted.to_numpy().tolist() == [[3, 1]] * (N_LAYERS + 1) * 2
    assert set(table["n"]) == {N_VALIDATION}

    origin = origin_of(out)
    assert origin["maps"]["data"]["seed"] == origin["validation"]["seed"] == 3  # type: ignore[index]
    assert (origin["maps"]["n_samples"], origin["validation"]["n"]) == (N_TRAIN, N_VALIDATION)
    assert origin["software"]["torch"] == torch.__version__
    assert origin["command"] == f"matlens run {' '.join(inputs)} --out {out} --seed 3"

    rows = cells(outcome.out)
    assert [row[0] for row in rows] == [str(layer) for layer in range(N_LAYERS + 1)]
    for layer, row in enumerate(rows):
        shown = [float(cell) for cell in row[1:] if cell != "–"]
        assert shown == pytest.approx(printed(table, layer), abs=0.00051)
    for figure in FIGURES:
        assert str(out / figure) in outcome.out


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
    origin = origin_of(finished)["maps"]
    assert (origin["intercept"], origin["ridge"], origin["n_samples"]) == (True, 0.5, N_TRAIN)


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
    said = "The maps and this model", "fingerprint"
    assert_refused(run_matlens("evaluate", out, "--model", moved), str(moved), *said)
    assert_refused(run_matlens("run", *of_moved, "--out", out), "belongs to another job")
    assert tree(out) == before


def test_maps_are_evaluated_in_another_precision_where_the_user_says_so(run_matlens, inputs, finished):
    table = results(finished)
    options = ["evaluate", finished, "--device", "cpu", "--dtype", "bfloat16"]
    assert_refused(run_matlens(*options), "float32", "bfloat16")
    assert run_matlens(*options, "--other-precision").code == 0
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
        (["--seed", 5], "train", "seed: 0 in the folder, 5 now"),
        (["--dtype", "bfloat16"], "train", "dtype: float32 in the folder, bfloat16 now"),
        (["--ridge", "0.5"], "maps", "ridge: 0.0 in the folder, 0.5 now"),
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
