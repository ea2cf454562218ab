"""Commands about lenses do what the library does, and print it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from command_lines import FfnCommands, cells, run_command
from conftest import D_MODEL, N_LAYERS
from hub_stand_in import TOKEN, Hub
from small_lenses import make_lens
from transformer_lens.tools.analysis import JacobianLens

import matlens
from matlens import Lens
from matlens.io.tables import COLUMNS, write_results
from matlens.models.vocabulary import visible

PROMPT = "w3 w14 w15 w9"


@pytest.fixture
def commands(model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> FfnCommands:
    return FfnCommands(model_folder, capsys)


def test_fit_keeps_the_lenses_of_the_training_sentences(
    commands: FfnCommands, corpora: Path, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    arguments = ["--corpus", corpora / "words.txt", "--train", 40, "--val", 20, "--out", tmp_path / "out"]
    printed = commands.run(
        "lens", "fit", *arguments, "--method", "mat", "--method", "normed+affine without sinks", model="llama"
    )
    corpus, _ = matlens.load_corpus(str(corpora / "words.txt")).split(n_train=40, n_validation=20)
    model = small_model("llama")
    expected = Lens.fit(model, corpus, method="mat", progress=False)
    lens = Lens.load(tmp_path / "out" / "mat", model)
    h = torch.randn(3, D_MODEL, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(lens(h, 1), expected(h, 1), rtol=1e-3, atol=1e-3)
    folders = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(folders) == 2
    assert Lens.load(tmp_path / "out" / folders[1]).norm is not None
    assert f"fitted on {expected.n_samples:,} tokens" in printed


@pytest.mark.filterwarnings("always::matlens.InputWarning")
def test_few_tokens_are_warned_of_in_one_line(
    model_folder: Callable[[str], Path], corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["lens", "fit", "--model", model_folder("llama"), "--device", "cpu", "--out", tmp_path / "few"]
    few = ["--corpus", corpora / "few.txt", "--train", 3, "--val", 2]
    outcome = run_command([*command, *few], capsys)
    (warning,) = (line for line in outcome.err.splitlines() if "warning" in line.lower())
    assert warning.startswith(f"warning: Maps of {D_MODEL} dimensions")
    assert "warning" not in outcome.out
    assert Lens.load(tmp_path / "few").method == "mat"


def test_show_and_trajectory_print_what_layers_predict(
    commands: FfnCommands, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    trajectory = Lens.identity(small_model("llama")).trajectory(PROMPT)
    best = trajectory.top_tokens()
    printed = commands.run("lens", "show", PROMPT, "--last", 2, model="llama")
    assert [[cell.strip() for cell in row] for row in cells(printed)] == [
        [str(layer), *(visible(best[layer][place][0]) for place in (2, 3))] for layer in range(N_LAYERS + 1)
    ]
    printed = commands.run(
        "lens", "trajectory", PROMPT, "--token", "w7", "--plot", tmp_path / "a.png",
        "--csv", tmp_path / "a.csv", "--colour", "kl", model="llama",
    )  # fmt: skip
    rows = cells(printed)
    assert [int(row[0]) for row in rows] == list(range(N_LAYERS + 1))
    assert [int(row[-1]) for row in rows] == trajectory.rank("w7")[:, 3].tolist()
    assert [int(row[-2]) for row in rows] == trajectory.final_rank[:, 3].tolist()
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 4 * (N_LAYERS + 1)
    masked = commands.run("lens", "trajectory", "w3 [MASK] w9", model="bert")
    assert "At token 2, '[MASK]'" in masked


def test_convert_goes_both_ways(
    commands: FfnCommands, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    model = small_model("llama")
    Lens.identity(model).save(tmp_path / "own")
    printed = commands.run("lens", "convert", tmp_path / "own", tmp_path / "j.pt", model="llama")
    assert "A lens of 3 layers (id)" in printed
    assert torch.equal(JacobianLens.load(str(tmp_path / "j.pt")).jacobians[0], torch.eye(D_MODEL))
    commands.run("lens", "convert", tmp_path / "j.pt", tmp_path / "back", model="llama")
    assert Lens.load(tmp_path / "back").layers == (1, 2)


def test_trained_lenses_are_fitted_at_chosen_layers(
    commands: FfnCommands, corpora: Path, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    arguments = ["--corpus", corpora / "few.txt", "--train", 9, "--val", 2, "--out", tmp_path / "out"]
    printed = commands.run(
        "lens", "fit", *arguments, "--method", "polished", "--layers", "1,2", "--rows", tmp_path / "rows",
        model="llama",
    )  # fmt: skip
    corpus, _ = matlens.load_corpus(str(corpora / "few.txt")).split(n_train=9, n_validation=2)
    model = small_model("llama")
    expected = Lens.fit(model, corpus, method="polished", layers=[1, 2], progress=False)
    lens = Lens.load(tmp_path / "out", model)
    assert lens.layers == (1, 2)
    torch.testing.assert_close(lens.maps[1].matrix(1), expected.maps[1].matrix(1), rtol=1e-3, atol=1e-4)
    assert f"fitted on {expected.n_samples:,} tokens" in printed
    assert (tmp_path / "rows" / "config.json").exists()


def test_push_and_pull_go_through_the_hub(
    commands: FfnCommands, small_model: Callable[[str], Any], hub: Hub, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        hub.address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = small_model("llama")
    lens = make_lens(model)
    lens.save(tmp_path / "lens")
    row = {"method": "by hand", "layer": 1, "target": 3, "metric": "r2", "value": 0.625, "n": 9}
    write_results(tmp_path, "report", pd.DataFrame([row], columns=[*COLUMNS, "against"]), {})
    printed = commands.run(
        "lens", "push", tmp_path / "lens", "someone/lenses", "--results", tmp_path / "report.csv",
        "--name", "llama/hand", "--private",
    )  # fmt: skip
    commit, content = hub.repositories["someone/lenses"][-1]
    assert commit in printed.replace("\n", "")
    assert "| 1 | 0.625 |" in content["llama/hand/README.md"].decode()
    assert hub.private == {"someone/lenses"}
    commands.run(
        "lens", "pull", "someone/lenses", "llama/hand", "--revision", commit, "--out", tmp_path / "back",
    )  # fmt: skip
    assert Lens.load(tmp_path / "back", model).digest == lens.digest
    said = commands.run(
        "lens", "pull", "someone/lenses", "llama/hand", "--revision", "0" * 40, "--out", tmp_path / "x",
        code=2,
    )  # fmt: skip
    assert "no such revision" in " ".join(said.split())
    assert not (tmp_path / "x").exists()


def test_refusals_come_before_the_work(commands: FfnCommands, corpora: Path, tmp_path: Path) -> None:
    said = commands.run("lens", "show", PROMPT, "--lens", tmp_path / "no", model="llama", code=2)
    assert "There is no folder" in said
    said = commands.run("lens", "convert", tmp_path / "no", tmp_path / "x", model="llama", code=2)
    assert "Expected a folder of a lens" in said
    said = commands.run(
        "lens", "fit", "--corpus", corpora / "few.txt", "--out", tmp_path / "o", "--method", "best",
        model="llama", code=2,
    )  # fmt: skip
    assert "is no method of a lens" in said
    assert not (tmp_path / "o").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other.txt").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matlens.models.loading.load", None)
        said = commands.run(
            "lens", "fit", "--corpus", corpora / "few.txt", "--out", tmp_path / "full", model="llama", code=2
        )
        assert "holds other files" in said
        for option, path in (("--csv", tmp_path), ("--plot", tmp_path / "a.svg")):
            said = commands.run("lens", "trajectory", PROMPT, option, path, model="llama", code=2)
            assert "Expected" in said
