"""Every analysis runs on a small model and leaves its table, its provenance and its figure."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import N_LAYERS, WORDS

ANALYSES = sorted((Path(__file__).parents[1] / "analyses").glob("*.py"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    lines = [" ".join(generator.choice(WORDS, int(generator.integers(5, 12)))) for _ in range(120)]
    path = tmp_path / "words.txt"
    path.write_text("\n".join(lines))
    return path


def run(script: Path, *options: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, options)])
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise


@pytest.mark.parametrize("script", ANALYSES, ids=lambda path: path.stem)
def test_it_runs_on_a_small_model(
    script: Path,
    corpus: Path,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    options = ["--model", model_folder("llama"), "--corpus", corpus, "--train", 90, "--val", 30, "--out", out]
    run(script, *options, "--device", "cpu", monkeypatch=monkeypatch)
    table = pd.read_csv(out / f"{script.stem}.csv")
    assert set(table["layer"]) >= set(range(N_LAYERS))
    assert json.loads((out / f"{script.stem}.json").read_text())["maps"]["data"]["seed"] == 0
    if script.stem.startswith("paper_"):
        assert (out / f"{script.stem}.png").stat().st_size > 10_000
        assert (out / f"{script.stem}.pdf").read_bytes().startswith(b"%PDF")


def test_both_ways_of_fitting_are_in_one_table_and_differ(
    corpus: Path, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maps of the drawn positions are those of the main job on the same sentences."""
    script = next(path for path in ANALYSES if path.stem == "all_positions")
    options = ["--model", model_folder("llama"), "--corpus", corpus, "--train", 90, "--val", 30]
    run(script, *options, "--out", tmp_path / "both", "--device", "cpu", monkeypatch=monkeypatch)
    main_job = next(path for path in ANALYSES if path.stem == "paper_a_fig4_next_token")
    run(main_job, *options, "--out", tmp_path / "main", "--device", "cpu", monkeypatch=monkeypatch)
    table = pd.read_csv(tmp_path / "both" / "all_positions.csv")
    predictions = table[table["experiment"] == "prediction_quality"]
    drawn, every = (
        predictions[predictions["method"] == f"mat, {name}"]["value"].to_numpy() for name in ("drawn", "all")
    )
    main = pd.read_csv(tmp_path / "main" / "paper_a_fig4_next_token.csv")
    np.testing.assert_allclose(drawn, main[main["method"] == "mat"]["value"], atol=1e-4)
    assert not np.allclose(drawn, every, atol=1e-3)


@pytest.mark.parametrize("script", ANALYSES, ids=lambda path: path.stem)
def test_bad_input_is_told_with_code_2(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(script, "--model", tmp_path / "absent", "--out", tmp_path / "out", monkeypatch=monkeypatch)
    assert ended.value.code == 2
    assert "There is no model" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
