"""The command line: what it writes and prints, and what it says of input that it cannot use."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command_lines import Outcome
from conftest import N_LAYERS, WORDS
from safetensors.torch import load_file, save_file
from sklearn.metrics import r2_score
from studying import study_of

import matlens
from matlens.activations import collecting
from matlens.io.files import sealed, write_json
from matlens.study.steps import evaluate_maps, fit_maps, plot_results

COLUMNS = "experiment,model,corpus,method,layer,target,metric,k,value,low,high,n"
N_TRAIN, N_VALIDATION = 70, 20
FIGURES = {"r2.png", "r2.pdf", "prediction.png", "prediction.pdf"}
ALL_PAIRS = [(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1)]


Matlens = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the hub for anything."""

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("the hub is patched away")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred different sentences, one a line."""
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("".join(" ".join(generator.choice(WORDS, 5 + i % 16)) + "\n" for i in range(100)))
    return path


@pytest.fixture(scope="session")
def gpt2(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("gpt2")


def sizes(n_train: int = N_TRAIN, n_validation: int = N_VALIDATION) -> list[str]:
    return ["--train", str(n_train), "--val", str(n_validation), "--device", "cpu"]


@pytest.fixture
def inputs(gpt2: Path, corpus: Path) -> list[str]:
    """What most commands start from."""
    return ["--model", str(gpt2), "--corpus", str(corpus), *sizes()]


@pytest.fixture(scope="session")
def _finished(
    gpt2: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, bytes]]:
    out = tmp_path_factory.mktemp("finished") / "out"
    model = matlens.load(str(gpt2), device="cpu")
    texts = matlens.load_corpus(str(corpus))
    _ = study_of(model, texts, out, n_train=N_TRAIN, n_validation=N_VALIDATION).stream
    fit_maps(out, progress=False)
    evaluate_maps(model, out, progress=False)
    plot_results(out)
    return out, files(out)


@pytest.fixture
def finished(_finished: tuple[Path, dict[str, bytes]], tmp_path: Path) -> Path:
    """A folder in which everything is done; a copy, to be damaged at will."""
    original, content = _finished
    assert files(original) == content
    return Path(shutil.copytree(original, tmp_path / "finished"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def state(folder: Path) -> dict[str, bytes] | None:
    """All that is in a folder, empty folders too, or None where there is no folder."""
    if not folder.exists():
        return None
    return files(folder) | {str(p.relative_to(folder)): b"" for p in folder.rglob("*") if p.is_dir()}


def results(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "results.csv")


def without_command(content: dict[str, bytes]) -> dict[str, bytes]:
    """Files without the words of the command and digests of them, of which ``run.json`` is a list."""
    files = {name: data for name, data in content.items() if name != "run.json"}
    return {name: re.sub(rb'"(command|digest)": ".*"', b"", data) for name, data in files.items()}


def assert_refused(outcome: Outcome, *messages: str) -> None:
    """Exit code 2 and a message, without a traceback, that tells all of this."""
    assert outcome.code == 2
    assert re.search(r"(?:^|[\r ])(?:error|Usage): ", outcome.err, re.MULTILINE)  # behind a bar, perhaps
    assert "Traceback" not in outcome.err + outcome.out
    message = " ".join(outcome.err.replace("│", " ").split())
    for part in messages:
        assert part in message


# --- what it does -----------------------------------------------------------------------------------


def test_run_does_everything(run_matlens: Matlens, inputs: list[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    outcome = run_matlens("run", *inputs, "--out", out, "--seed", 3)
    assert outcome.code == 0

    arrays = {"00000.safetensors", "examples.safetensors", "config.json"}
    maps = {"config.json"} | {f"h.{layer}.safetensors" for layer in range(N_LAYERS)}
    expected = FIGURES | {"results.csv", "results.json", "run.json"}
    expected |= {f"{part}/{name}" for part in ("train", "validation") for name in arrays}
    expected |= {f"maps/{name}" for name in maps}
    assert set(files(out)) == expected
    assert (out / "r2.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "prediction.pdf").read_bytes().startswith(b"%PDF")

    table = results(out)
    assert (out / "results.csv").read_text().splitlines()[0] == COLUMNS
    fit = table[table["experiment"] == "fit_quality"]
    for method in ("mat", "id"):
        part = fit[fit["method"] == method]
        assert list(zip(part["layer"], part["target"], strict=True)) == ALL_PAIRS
    prediction = table[table["experiment"] == "prediction_quality"]
    counted = prediction.groupby(["layer", "method", "metric"]).size().unstack()
    assert len(counted) == (N_LAYERS + 1) * 2
    assert (counted["precision"] == 3).all()
    assert (counted["surprisal"] == 1).all()
    assert set(table["n"]) == {N_VALIDATION}

    origin = json.loads((out / "results.json").read_text())
    assert origin["maps"]["data"]["seed"] == origin["validation"]["seed"] == 3
    assert (origin["maps"]["data"]["n"], origin["maps"]["n_samples"]) == (N_TRAIN, N_TRAIN)
    assert origin["validation"]["n"] == N_VALIDATION
    assert origin["software"]["matlens"] == matlens.__version__
    assert origin["software"]["torch"] == torch.__version__
    assert origin["command"] == f"matlens run {' '.join(inputs)} --out {out} --seed 3"

    for layer in range(N_LAYERS + 1):
        (line,) = [line for line in outcome.out.splitlines() if line.startswith(f"│ {layer} ")]
        shown = [float(cell) for cell in line.split("│")[2:-1] if cell.strip() not in ("", "–")]
        wanted = printed(table, layer)
        assert shown == pytest.approx(wanted, abs=0.00051)
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


def test_run_equals_the_commands_one_after_the_other(
    run_matlens: Matlens, inputs: list[str], tmp_path: Path
) -> None:
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
    assert (whole / "results.csv").read_bytes() == (steps / "results.csv").read_bytes()
    assert without_command(files(whole)) == without_command(files(steps))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("last", [(0, 3), (1, 3), (2, 3)]),
        ("2:3, 0:1 ,0:3", [(2, 3), (0, 1), (0, 3)]),
        ("-3:3,0:-2", [(1, 3), (0, 2)]),
    ],
)
def test_pairs(
    run_matlens: Matlens, inputs: list[str], finished: Path, pairs: str, expected: list[tuple[int, int]]
) -> None:
    every = results(finished)
    shutil.rmtree(finished / "maps")
    outcome = run_matlens("run", *inputs, "--out", finished, "--pairs", pairs)
    assert outcome.code == 0
    chosen = [(f"h.{source}", f"h.{target}") for source, target in expected]
    assert list(matlens.MapSet.load(finished / "maps")) == chosen
    # The same numbers as among all pairs, and no others.
    keys = ["experiment", "method", "layer", "target", "metric", "k"]
    fitted = every["metric"] == "r2"
    pair_of = pd.Series(list(zip(every["layer"], every["target"], strict=True)), index=every.index)
    shown = {source for source, target in expected if target == N_LAYERS} | {N_LAYERS}
    wanted = every[(fitted & pair_of.isin(expected)) | (~fitted & every["layer"].isin(shown))]
    pd.testing.assert_frame_equal(
        results(finished).sort_values(keys, ignore_index=True), wanted.sort_values(keys, ignore_index=True)
    )
    rows = [line.split("│")[1].strip() for line in outcome.out.splitlines() if line.startswith("│")]
    assert rows == [str(layer) for layer in sorted(shown)]


def test_all_positions(run_matlens: Matlens, inputs: list[str], finished: Path, tmp_path: Path) -> None:
    command = ["run", *inputs, "--out", tmp_path / "all", "--positions", "all", "--keep-rows"]
    assert run_matlens(*command).code == 0
    train = matlens.activations.Activations.load(tmp_path / "all" / "train")
    drawn = matlens.activations.Activations.load(finished / "train")
    assert train.n_rows == int(train.examples.lengths.sum()) > N_TRAIN
    at_positions = torch.from_numpy(train.examples.offsets[:-1] + train.examples.positions)
    for layer in range(N_LAYERS + 1):
        torch.testing.assert_close(train[layer][at_positions], drawn[layer])
    # Evaluated on one position a sentence, the same ones, so that the numbers compare.
    assert without_command(files(tmp_path / "all" / "validation")) == without_command(
        files(finished / "validation")
    )
    new, old = results(tmp_path / "all"), results(finished)
    assert list(new["n"]) == list(old["n"])
    assert mat_r2(new, 0, 3) > mat_r2(old, 0, 3)  # ten times the samples
    assert json.loads((tmp_path / "all/results.json").read_text())["maps"]["n_samples"] == train.n_rows


def mat_r2(table: pd.DataFrame, source: int, target: int) -> float:
    part = table[(table["layer"] == source) & (table["target"] == target) & (table["metric"] == "r2")]
    return float(part[part["method"] == "mat"]["value"].iloc[0])


def test_intercept_and_ridge(run_matlens: Matlens, finished: Path) -> None:
    train = matlens.activations.Activations.load(finished / "train")
    x, y = train[0].double().numpy(), train[3].double().numpy()
    before = mat_r2(results(finished), 0, 3)

    shutil.rmtree(finished / "maps")
    assert run_matlens("fit", finished, "--ridge", 0.5).code == 0
    assert run_matlens("evaluate", finished, "--device", "cpu").code == 0
    ridge = matlens.MapSet.load(finished / "maps")[0, 3]
    expected = np.linalg.solve(x.T @ x + 0.5 * np.eye(x.shape[1]), x.T @ y).T
    np.testing.assert_allclose(ridge.weight, expected, rtol=1e-4, atol=1e-5)
    assert ridge.bias is None
    after = mat_r2(results(finished), 0, 3)
    assert abs(after - before) > 1e-3

    shutil.rmtree(finished / "maps")
    assert run_matlens("fit", finished, "--intercept").code == 0
    assert run_matlens("evaluate", finished, "--device", "cpu").code == 0
    affine = matlens.MapSet.load(finished / "maps")[0, 3]
    ones = np.concatenate([np.ones((len(x), 1)), x], axis=1)
    solution = np.linalg.lstsq(ones, y, rcond=None)[0]
    assert affine.bias is not None
    np.testing.assert_allclose(affine.bias, solution[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(affine.weight, solution[1:].T, rtol=1e-3, atol=1e-4)
    assert mat_r2(results(finished), 0, 3) not in (before, after)
    assert json.loads((finished / "results.json").read_text())["maps"]["intercept"] is True


def test_run_hands_the_penalty_and_the_intercept_on(
    run_matlens: Matlens, inputs: list[str], finished: Path
) -> None:
    shutil.rmtree(finished / "maps")
    assert run_matlens("run", *inputs, "--out", finished, "--intercept", "--ridge", 0.5).code == 0
    together = files(finished / "maps")
    shutil.rmtree(finished / "maps")
    assert run_matlens("fit", finished, "--intercept", "--ridge", 0.5).code == 0
    assert without_command(files(finished / "maps")) == without_command(together)
    origin = json.loads((finished / "results.json").read_text())["maps"]
    assert (origin["intercept"], origin["ridge"]) == (True, 0.5)


def test_a_stack_of_an_encoder_decoder(
    run_matlens: Matlens, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    """An encoder predicts nothing, so its maps have r2 alone; a decoder needs more than sentences."""
    inputs = ["--model", model_folder("t5"), "--corpus", corpus, *sizes(), "--positions", "drawn"]
    refused = run_matlens("run", *inputs, "--stack", "decoder", "--out", tmp_path / "none")
    assert refused.code == 2
    assert "holds no sources" in " ".join(refused.err.split())
    assert not (tmp_path / "none").exists()
    out = tmp_path / "out"
    assert run_matlens("run", *inputs, "--stack", "encoder", "--out", out).code == 0
    table = pd.read_csv(out / "results.csv")
    assert set(table["metric"]) == {"r2"}
    encoder = matlens.load(model_folder("t5"), device="cpu", stack="encoder")
    n_layers = encoder.cfg.n_layers
    assert table["target"].max() == n_layers
    train, validation = (matlens.activations.Activations.load(out / part) for part in ("train", "validation"))
    x, y = (train[layer].double().numpy() for layer in (0, n_layers))
    mapped = validation[0].double().numpy() @ np.linalg.lstsq(x, y, rcond=None)[0]
    (row,) = table[
        (table["method"] == "mat") & (table["layer"] == 0) & (table["target"] == n_layers)
    ].itertuples()
    assert row.value == pytest.approx(r2_score(validation[n_layers].numpy(), mapped), abs=1e-4)
    (out / "results.csv").unlink()
    (out / "results.json").unlink()
    assert run_matlens("evaluate", out, "--stack", "encoder").code == 0
    pd.testing.assert_frame_equal(pd.read_csv(out / "results.csv"), table)


def test_the_seed_decides(run_matlens: Matlens, inputs: list[str], finished: Path, tmp_path: Path) -> None:
    for name, seed in (("first", 1), ("again", 1)):
        assert run_matlens("run", *inputs, "--out", tmp_path / name, "--seed", seed).code == 0
    first, again, zero = (results(folder) for folder in (tmp_path / "first", tmp_path / "again", finished))
    assert without_command(files(tmp_path / "first")) == without_command(files(tmp_path / "again"))
    of_maps = (first["method"] == "mat") & (first["metric"] == "r2")
    assert (first[of_maps]["value"] != zero[of_maps]["value"]).all()
    pd.testing.assert_frame_equal(first, again)


@pytest.mark.parametrize("skip", [False, True])
def test_special_tokens_of_bert(
    run_matlens: Matlens, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path, skip: bool
) -> None:
    command = [
        "run",
        "--model",
        model_folder("bert"),
        "--corpus",
        corpus,
        *sizes(),
        "--out",
        tmp_path / "out",
    ]
    assert run_matlens(*command, *(["--skip-special"] if skip else [])).code == 0
    examples = matlens.activations.Activations.load(tmp_path / "out" / "train").examples
    at_the_ends = (examples.positions == 0) | (examples.positions == examples.lengths - 1)
    assert at_the_ends.any() != skip
    read = examples.tokens[examples.offsets[:-1][~at_the_ends]]
    assert len(set(read)) == 1  # [CLS] is read all the same


def test_plot_draws_from_the_table_alone(run_matlens: Matlens, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    for name in ("results.csv", "results.json"):
        shutil.copy(finished / name, tmp_path / "alone")
    assert run_matlens("plot", tmp_path / "alone").code == 0
    drawn = without_command(files(tmp_path / "alone"))
    assert set(drawn) == FIGURES | {"results.csv", "results.json"}
    assert drawn.items() <= without_command(files(finished)).items()


def test_evaluate_takes_a_model_that_has_moved(
    run_matlens: Matlens, inputs: list[str], gpt2: Path, tmp_path: Path
) -> None:
    moved, out = tmp_path / "moved", tmp_path / "out"
    shutil.copytree(gpt2, tmp_path / "here")
    inputs = [str(tmp_path / "here") if item == str(gpt2) else item for item in inputs]
    assert run_matlens("run", *inputs, "--out", out).code == 0
    table = (out / "results.csv").read_bytes()
    (tmp_path / "here").rename(moved)
    assert_refused(run_matlens("evaluate", out), str(tmp_path / "here"))
    assert run_matlens("evaluate", out, "--model", moved, "--device", "cpu").code == 0
    assert (out / "results.csv").read_bytes() == table


def test_a_collection_goes_on_after_the_model_was_renamed(
    run_matlens: Matlens, inputs: list[str], gpt2: Path, tmp_path: Path
) -> None:
    """The fingerprint says that it is the same model, and its name does not matter."""
    out = tmp_path / "out"
    assert run_matlens("collect", *inputs, "--out", out).code == 0
    before = files(out)
    shutil.rmtree(out / "validation")
    shutil.copytree(gpt2, tmp_path / "renamed")
    inputs = [str(tmp_path / "renamed") if item == str(gpt2) else item for item in inputs]
    assert run_matlens("run", *inputs, "--out", out).code == 0
    kept = {name: content for name, content in files(out).items() if name.startswith("train/")}
    assert kept == {name: content for name, content in before.items() if name.startswith("train/")}
    with_other = shutil.copytree(gpt2, tmp_path / "other")
    config = json.loads((with_other / "config.json").read_text())
    (with_other / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.5}))
    inputs = [str(with_other) if item == str(tmp_path / "renamed") else item for item in inputs]
    assert_refused(run_matlens("collect", *inputs, "--out", out), "belongs to another job", "other now")


def test_maps_are_evaluated_in_another_precision_where_the_user_says_so(
    run_matlens: Matlens, finished: Path
) -> None:
    table = results(finished)
    options = ["evaluate", finished, "--device", "cpu", "--dtype", "bfloat16"]
    assert_refused(run_matlens(*options), "fitted in float32, not in bfloat16", "--other-precision")
    assert run_matlens(*options, "--other-precision").code == 0
    fits = table["metric"] == "r2"
    again = results(finished)
    pd.testing.assert_frame_equal(again[fits], table[fits])
    assert not again[~fits]["value"].equals(table[~fits]["value"])
    assert again[~fits]["value"].to_numpy() == pytest.approx(
        table[~fits]["value"].to_numpy(), rel=0.2, abs=0.2
    )


def test_interrupting_is_no_error(
    run_matlens: Matlens, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(collecting, "_run", interrupt)
        outcome = run_matlens("collect", *inputs, "--out", tmp_path / "out")
    assert outcome.code == 130
    assert "Run the same command again" in outcome.err
    assert run_matlens("collect", *inputs, "--out", tmp_path / "out").code == 0


# --- what it refuses --------------------------------------------------------------------------------


def test_model_that_is_not_there(run_matlens: Matlens, corpus: Path, tmp_path: Path) -> None:
    for name in ("no-such-model", "nobody/no-such-model", "./no-such-folder", tmp_path / "absent.gguf"):
        outcome = run_matlens("run", "--model", name, "--corpus", corpus, *sizes(), "--out", tmp_path / "out")
        assert_refused(outcome, str(name), "Expected", ".gguf file")
        assert state(tmp_path / "out") is None


def test_model_that_is_damaged(run_matlens: Matlens, gpt2: Path, corpus: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(gpt2, tmp_path / "model")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    outcome = run_matlens(
        "run", "--model", path.parent, "--corpus", corpus, *sizes(), "--out", tmp_path / "out"
    )
    assert_refused(outcome, str(path.parent), "could not be loaded", "Expected a complete model")
    assert state(tmp_path / "out") is None


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        (None, ["There is no file or folder", "Give one of the samples"]),
        (b"only this one sentence here\n", ["70+20 sentences", "were asked for", "has 1.", "Ask for fewer"]),
    ],
)
def test_corpus_that_cannot_be_used(
    run_matlens: Matlens, gpt2: Path, tmp_path: Path, content: bytes | None, messages: list[str]
) -> None:
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    outcome = run_matlens("run", "--model", gpt2, "--corpus", path, *sizes(), "--out", tmp_path / "out")
    assert_refused(outcome, str(path), *messages)
    assert state(tmp_path / "out") is None


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--train", 90, "--val", 20], ["90+20 sentences", "were asked for", "has 100.", "Ask for fewer"]),
        (["--limit", 70], ["70+20 sentences", "were asked for", "has 70."]),
        (["--val", 1], ["'--val'", "greater than or equal to 2"]),
        (["--ridge", "inf"], ["ridge must be a finite number of at least 0 or None, got inf"]),
        (["--dtype", "int8"], ["'--dtype'", "float32", "bfloat16"]),
        (["--device", "abacus"], ["The device abacus cannot be used here", "Expected cpu, cuda or mps"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--pairs", "3"], ["'--pairs'", "3", "expected all, last, or a list such as 0:12,6:12"]),
        (["--pairs", "0:4"], ["Layer 4 of site 'h' is out of range", "h.0 to h.3"]),
        (["--pairs", "-5:3"], ["Layer -5 of site 'h' is out of range", "h.0 to h.3"]),
        (["--pairs", "2:1"], ["from layer 2 to layer 1", "the source must lie before the target"]),
        (["--pairs", "1:-3"], ["from layer 1 to layer 1", "the source must lie before the target"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if "--" in str(value[0]) else "",
)
def test_option_that_makes_no_sense(
    run_matlens: Matlens, inputs: list[str], tmp_path: Path, options: list[object], messages: list[str]
) -> None:
    outcome = run_matlens("run", *inputs, *options, "--out", tmp_path / "out")
    assert_refused(outcome, *messages)
    assert "could not be loaded" not in outcome.err  # not the model's fault
    assert state(tmp_path / "out") is None


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--pairs", "0:9"], ["Layer 9 of site 'h' is out of range", "h.0 to h.3"]),
        (["--pairs", "3:0"], ["the source must lie before the target"]),
        (["--ridge", "nan"], ["ridge"]),
    ],
)
def test_fit_refuses(
    run_matlens: Matlens, finished: Path, options: Sequence[str], messages: Sequence[str]
) -> None:
    shutil.rmtree(finished / "maps")
    before = state(finished)
    assert_refused(run_matlens("fit", finished, *options), *messages)
    assert state(finished) == before


def test_output_folder_with_other_files(run_matlens: Matlens, inputs: list[str], finished: Path) -> None:
    maps = finished / "maps"
    shutil.rmtree(maps)
    (maps / "deep").mkdir(parents=True)
    (maps / "deep" / "mine.txt").write_text("mine")
    before = state(finished)
    assert_refused(run_matlens("run", *inputs, "--out", finished), str(maps), "holds other files")
    assert state(finished) == before


@pytest.mark.parametrize(
    ("options", "part", "message"),
    [
        (["--seed", 5], "train", "seed: 0 in the folder, 5 now"),
        (["--train", 40], "train", "sentences: 70 in the folder, 40 now"),
        (["--positions", "all"], "train", "positions: drawn in the folder, all now"),
        (["--dtype", "bfloat16"], "train", "dtype: float32 in the folder, bfloat16 now"),
        (["--ridge", "0.5"], "maps", "ridge: 0.0 in the folder, 0.5 now"),
        (["--intercept"], "maps", "intercept: False in the folder, True now"),
        (["--pairs", "last"], "maps", "pairs"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_output_folder_of_another_job(
    run_matlens: Matlens,
    inputs: list[str],
    finished: Path,
    options: list[object],
    part: str,
    message: str,
) -> None:
    before = state(finished)
    outcome = run_matlens("run", *inputs, "--out", finished, *options)
    assert_refused(outcome, str(finished / part), "belongs to another job", message, "remove")
    assert state(finished) == before
    assert run_matlens("run", *inputs, "--out", finished, "--batch-tokens", 64).code == 0


def test_maps_of_another_model(
    run_matlens: Matlens, inputs: list[str], gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(gpt2, model)
    inputs = [str(model) if item == str(gpt2) else item for item in inputs]
    assert run_matlens("collect", *inputs, "--out", out).code == 0
    assert run_matlens("fit", out).code == 0
    before = state(out)

    weights = load_file(model / "model.safetensors")
    weights["transformer.h.1.ln_1.weight"] *= 1.5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    outcome = run_matlens("evaluate", out)
    assert_refused(
        outcome, str(model), "The maps and this model", "fingerprint", "Make the maps anew for this model"
    )
    assert_refused(run_matlens("run", *inputs, "--out", out), "belongs to another job", "fingerprint")
    assert state(out) == before
    assert run_matlens("evaluate", out, "--model", gpt2, "--device", "cpu").code == 0


@pytest.mark.parametrize(
    ("command", "part", "messages"),
    [
        (["fit"], "train", "must be a folder of activations"),
        (["evaluate"], "maps", "must be a folder of maps"),
        (["plot"], "results.csv", "'matlens evaluate' writes it"),
    ],
    ids=["fit", "evaluate", "plot"],
)
def test_folder_that_is_not_there(
    run_matlens: Matlens, tmp_path: Path, command: list[str], part: str, messages: str
) -> None:
    outcome = run_matlens(*command, tmp_path / "absent")
    assert_refused(outcome, str(tmp_path / "absent" / part), messages)
    assert state(tmp_path) == {}


@pytest.mark.parametrize(
    ("command", "part"), [("fit", "train"), ("evaluate", "validation"), ("evaluate", "maps")]
)
def test_folder_that_is_unfinished(run_matlens: Matlens, finished: Path, command: str, part: str) -> None:
    path = finished / part / "config.json"
    config = json.loads(path.read_text())
    write_json(path, sealed({**config, "finished": False}))
    if command == "fit":
        shutil.rmtree(finished / "maps")
    before = state(finished)
    assert_refused(run_matlens(command, finished), str(finished / part), "is unfinished", "Rerun the same")
    assert state(finished) == before


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("run", "maps/h.1.safetensors"),
        ("fit", "maps/h.1.safetensors"),
        ("evaluate", "maps/h.1.safetensors"),
        ("run", "train/00000.safetensors"),
        ("fit", "train/examples.safetensors"),
    ],
)
def test_files_that_are_damaged(
    run_matlens: Matlens, inputs: list[str], finished: Path, command: str, name: str
) -> None:
    if name.startswith("train"):
        shutil.rmtree(finished / "maps")
    path = finished / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = state(finished)
    arguments = [*inputs, "--out", finished] if command == "run" else [finished]
    assert_refused(run_matlens(command, *arguments), str(path), "changed or damaged")
    assert state(finished) == before


@pytest.mark.parametrize(
    "damage", [lambda text: text[: len(text) // 2], lambda text: text.replace(",mat,", ",mut,")]
)
def test_table_that_is_damaged(run_matlens: Matlens, finished: Path, damage: Callable[[str], str]) -> None:
    path = finished / "results.csv"
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole
    before = state(finished)
    assert_refused(run_matlens("plot", finished), f"{path} is not the table that results.json describes")
    assert state(finished) == before


# --- a disk that is full ----------------------------------------------------------------------------


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size: the system refuses the write, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))  # Python ignores SIGXFSZ from the start
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


NO_ROOM = ["There is no room on the disk", "Free some, or write elsewhere"]


@pytest.mark.parametrize("n_bytes", [0, 2000])
def test_no_room_for_a_collection(
    run_matlens: Matlens, inputs: list[str], tmp_path: Path, n_bytes: int
) -> None:
    with largest_file(n_bytes):
        outcome = run_matlens("run", *inputs, "--out", tmp_path / "new" / "out")
    assert_refused(outcome, *NO_ROOM, str(tmp_path / "new" / "out"))
    assert state(tmp_path) == {}


def test_no_room_for_the_second_part(run_matlens: Matlens, gpt2: Path, corpus: Path, tmp_path: Path) -> None:
    command = ["collect", "--model", gpt2, "--corpus", corpus, *sizes(10, 60), "--out", tmp_path / "out"]
    command += ["--positions", "drawn"]
    with largest_file(10_000):
        assert_refused(run_matlens(*command), *NO_ROOM, str(tmp_path / "out" / "validation"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]
    assert matlens.activations.Activations.load(tmp_path / "out" / "train").n_rows == 10
    assert run_matlens(*command).code == 0


def test_no_room_for_maps(run_matlens: Matlens, inputs: list[str], finished: Path) -> None:
    whole = without_command(files(finished / "maps"))
    shutil.rmtree(finished / "maps")
    before = state(finished)
    with largest_file(10_000):  # the first source, with three maps, is too large; the others are not
        assert_refused(run_matlens("fit", finished), *NO_ROOM, str(finished / "maps"))
        assert state(finished) == before
        pairs = ["--pairs", "2:3,1:3,0:1,0:2,0:3"]  # here it comes last
        assert_refused(run_matlens("run", *inputs, "--out", finished, *pairs), *NO_ROOM)
        assert state(finished) == before
    assert run_matlens("fit", finished).code == 0
    assert without_command(files(finished / "maps")) == whole


@pytest.mark.parametrize(
    ("command", "removed", "n_bytes"),
    [
        (["evaluate", "--device", "cpu"], [], 1000),
        (["evaluate", "--device", "cpu"], ["results.csv", "results.json"], 1000),
        (["plot"], FIGURES, 10_000),
    ],
    ids=["results", "first results", "figures"],
)
def test_no_room_for_results(
    run_matlens: Matlens, finished: Path, command: list[str], removed: list[str], n_bytes: int
) -> None:
    for name in removed:
        (finished / name).unlink()
    before = state(finished)
    with largest_file(n_bytes):
        assert_refused(run_matlens(*command, finished), *NO_ROOM, str(finished))
    assert state(finished) == before


# --- first runs -------------------------------------------------------------------------------------


def test_a_finished_run_is_answered_without_its_model(
    run_matlens: Matlens, inputs: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.txt"
    shutil.copy(corpus, copy)
    inputs = [str(copy) if item == str(corpus) else item for item in inputs]
    command = ["run", *inputs, "--out", tmp_path / "out"]
    first = run_matlens(*command)
    content = files(tmp_path / "out")
    with monkeypatch.context() as patch:
        for name in ("matlens.models.loading.load", "matlens.data.corpus.load_corpus"):
            patch.setattr(name, lambda *_, **__: 1 / 0)
        again = run_matlens(*command)
        assert again.code == 0
        assert [line for line in again.out.splitlines() if line.startswith(("│", "Figures"))] == [
            line for line in first.out.splitlines() if line.startswith(("│", "Figures"))
        ]
        assert files(tmp_path / "out") == content
        copy.write_text(copy.read_text().replace("w1 ", "w2 "))
        with pytest.raises(ZeroDivisionError):
            run_matlens(*command)
    assert_refused(run_matlens(*command), "belongs to another job")
    assert_refused(
        run_matlens(*command, "--seed", 1), "belongs to another job", "seed: 0 in the folder, 1 now"
    )


@pytest.mark.filterwarnings("always::matlens.InputWarning")
def test_few_samples_take_all_positions_and_say_so(
    run_matlens: Matlens, inputs: list[str], tmp_path: Path
) -> None:
    few = [*inputs, "--train", 40]
    outcome = run_matlens("run", *few, "--out", tmp_path / "auto")
    assert "40 sentences are few for 32 dimensions" in " ".join(outcome.err.split())
    assert matlens.linear.StoredLeastSquares(tmp_path / "auto" / "moments").provenance.positions == "all"
    assert not (tmp_path / "auto" / "train").exists()
    assert "few for" not in outcome.out
    assert json.loads((tmp_path / "auto/results.json").read_text())["note"] is None

    plain = run_matlens("run", *few, "--positions", "drawn", "--ridge", 0, "--out", tmp_path / "plain")
    assert "on 40 samples, which is few for 32 dimensions" in " ".join(plain.out.split())
    assert plain.err.count("warning: ") == 1
    assert "warning: " not in outcome.err
    assert "40 samples" in json.loads((tmp_path / "plain/results.json").read_text())["note"]
    assert mat_r2(results(tmp_path / "auto"), 0, 3) > mat_r2(results(tmp_path / "plain"), 0, 3)

    drawn = run_matlens("run", *few, "--positions", "drawn", "--out", tmp_path / "drawn")
    assert "a ridge of" in " ".join(drawn.out.split())
    fit = json.loads((tmp_path / "drawn/results.json").read_text())["maps"]
    assert fit["ridge"] > 0
    assert mat_r2(results(tmp_path / "drawn"), 0, 3) > mat_r2(results(tmp_path / "plain"), 0, 3)


def test_a_masked_model_of_few_samples_takes_a_ridge(
    run_matlens: Matlens, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    command = [
        "run",
        "--model",
        model_folder("bert"),
        "--corpus",
        corpus,
        *sizes(40),
        "--out",
        tmp_path / "o",
    ]
    outcome = run_matlens(*command)
    assert "a ridge of" in " ".join(outcome.out.split())
    assert matlens.activations.Activations.load(tmp_path / "o" / "train").positions == "drawn"


def test_a_corpus_smaller_than_the_sizes_of_the_paper_is_split_in_proportion(
    run_matlens: Matlens, gpt2: Path, corpus: Path, tmp_path: Path
) -> None:
    command = ["collect", "--model", gpt2, "--corpus", corpus, "--device", "cpu"]
    outcome = run_matlens(*command, "--out", tmp_path / "out")
    assert "has 100 sentences, fewer than 3,000+1,000" in " ".join(outcome.err.split())
    assert len(matlens.activations.Activations.load(tmp_path / "out" / "train").examples) == 75
    assert len(matlens.activations.Activations.load(tmp_path / "out" / "validation").examples) == 25
    assert run_matlens(*command, "--train", 90, "--out", tmp_path / "most").code == 0
    assert len(matlens.activations.Activations.load(tmp_path / "most" / "validation").examples) == 10
    asked = run_matlens(*command, "--train", 99, "--out", tmp_path / "too-many")
    assert_refused(asked, "99+1000 sentences", "has 100")


def test_a_model_is_looked_for_before_the_corpus_is_read(run_matlens: Matlens, tmp_path: Path) -> None:
    for command in ("run", "collect"):
        outcome = run_matlens(
            command,
            "--model",
            tmp_path / "no.gguf",
            "--corpus",
            tmp_path / "no.txt",
            "--out",
            tmp_path / "out",
        )
        assert_refused(outcome, "There is no file", "no.gguf")
        assert "no.txt" not in outcome.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", str(2**32)], "'--seed'"),
        (["--seed", "9" * 5000], "'--seed'"),
        (["--positions", "all", "--skip-special"], "special tokens"),
        (["--device", "abacus"], "The device abacus cannot be used"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_options_are_refused_before_anything_is_read(
    run_matlens: Matlens, gpt2: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    outcome = run_matlens(
        "run", "--model", gpt2, "--corpus", tmp_path / "no.txt", "--out", tmp_path / "out", *options
    )
    assert_refused(outcome, message)
    assert len(outcome.err) < 3000


def test_it_runs_as_a_module_and_a_closed_pipe_is_no_error() -> None:
    code = f"{sys.executable} -m matlens --help | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "1", "141")
    loud = (
        "from matlens.cli.starting import report_errors\n"
        "report_errors(lambda: [print('x' * 1000) for _ in range(1000)] and None)"
    )
    code = f'{sys.executable} -c "{loud}" | head -c 10; code=${{PIPESTATUS[0]}}; echo; echo $code'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "141"
