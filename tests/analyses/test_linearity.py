"""The analysis of linearity on a small model: its tables are those of the library."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from analysing import assert_table, run
from linearity import atlas_summary

import matlens
from matlens import linearity
from matlens.data import make_windows


def test_the_tables_are_what_the_library_gives(corpora, model_folder, small_model, tmp_path, capsys):
    run(
        "linearity", "--model", model_folder("bert"), "--corpus", corpora / "words.txt", "--train", 90,
        "--val", 30, "--windows", 24, "--eval-windows", 3, "--device", "cpu", "--suffix", "_bert",
        "--out", tmp_path,
    )  # fmt: skip
    assert "Parts replaced together" in capsys.readouterr().out
    model = small_model("bert")
    train, validation = matlens.load_corpus(str(corpora / "words.txt")).split(n_train=90, n_validation=30)
    expected = linearity.linearity_atlas(
        model, make_windows(model, train, size=64, max_windows=24, targets=True),
        make_windows(model, validation, size=64, max_windows=3, targets=True),
        progress=False,
    )  # fmt: skip
    table = pd.read_csv(tmp_path / "linearity_bert.csv", keep_default_na=False)
    assert table["value"].astype(float).tolist() == pytest.approx(expected["value"].tolist(), nan_ok=True)
    correlations = pd.read_csv(tmp_path / "linearity_correlations_bert.csv")
    again = linearity.rank_correlations(expected)
    assert correlations["value"].tolist() == pytest.approx(again["value"].tolist())
    assert (tmp_path / "linearity_bert.png").is_file()
    (folder,) = (path.parent for path in tmp_path.rglob("scores.json"))
    origin = json.loads((tmp_path / "linearity_costs_bert.json").read_text())
    assert origin["atlas_seconds"] == linearity.atlas_seconds(folder) > 0
    assert_table(tmp_path / "linearity_kinds_bert.csv", atlas_summary(expected))
    together = expected["kind"].str.startswith("together") & (expected["metric"] == "agreement")
    few = expected[together | (expected["metric"] == "loss increase")]
    assert set(few["metric"]) == {"loss increase", "agreement"}
    assert_table(tmp_path / "linearity_costs_bert.csv", few)
