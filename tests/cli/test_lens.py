"""Commands about lenses do what the library does, and print it."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from conftest import D_MODEL
from hub_stand_in import TOKEN
from small_lenses import make_lens
from transformer_lens.tools.analysis import JacobianLens

import matlens
from matlens import Lens
from matlens.io.tables import COLUMNS, write_results
from matlens.lens import LensConfig, compare_lenses


def test_lenses_are_fitted_on_the_training_sentences(commands, corpora, small_model, tmp_path):
    printed = commands.run(
        "lens", "fit", "--corpus", corpora / "words.txt", "--train", 40, "--out", tmp_path / "out",
        "--method", "mat", "--method", "affine", "--standardise", "--sinks", "exclude", "--ridge", "loo",
        model="llama",
    )  # fmt: skip
    texts = matlens.load_corpus(str(corpora / "words.txt"))
    corpus, _ = texts.split(n_train=40, n_validation=len(texts) - 40)
    model, config = small_model("llama"), LensConfig(standardise=True, sinks="exclude", ridge="loo")
    expected = Lens.fit(model, corpus, method=config, progress=False)
    lens = Lens.load(tmp_path / "out" / "standardise-ridge-loo-sinks-exclude", model)
    h = torch.randn(3, D_MODEL, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(lens(h, 1), expected(h, 1), rtol=1e-3, atol=1e-3)
    folders = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(folders) == 2
    assert Lens.load(tmp_path / "out" / folders[1]).norm is not None
    assert f"fitted on {expected.n_samples:,} tokens" in printed


def test_convert_goes_both_ways(commands, small_model, tmp_path):
    model = small_model("llama")
    Lens.identity(model).save(tmp_path / "own")
    printed = commands.run("lens", "convert", tmp_path / "own", tmp_path / "j.pt", model="llama")
    assert "A lens of 3 layers (id)" in printed
    assert torch.equal(JacobianLens.load(str(tmp_path / "j.pt")).jacobians[0], torch.eye(D_MODEL))
    commands.run("lens", "convert", tmp_path / "j.pt", tmp_path / "back", model="llama")
    assert Lens.load(tmp_path / "back").layers == (1, 2)


def test_push_and_pull_go_through_the_hub(commands, small_model, hub, tmp_path, monkeypatch):
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
    assert "Revision Not Found" in " ".join(said.split())
    assert not (tmp_path / "x").exists()


def test_report_writes_tables_and_a_figure_and_prints_a_line_for_each_lens(
    commands, small_model, corpora, tmp_path
):
    arguments = ["--corpus", corpora / "few.txt", "--train", 30, "--val", 20, "--out", tmp_path / "out"]
    printed = commands.run(
        "lens", "report", *arguments, "--method", "id", "--method", "mat", "--layers", "1,2", model="llama"
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
