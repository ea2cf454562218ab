"""The analysis of linearity on a small model: its tables are those of the library."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from analysing import assert_table, run, sizes
from linearity import atlas_summary

import matlens
from matlens import linearity
from matlens.data import make_windows


def test_the_tables_are_what_the_library_gives(corpora, model_folder, small_model, tmp_path):
    words = corpora / "words.txt"
    options = ["--corpus", words, *sizes(), "--windows", 24, "--eval-windows", 3, "--out", tmp_path]
    run("linearity", "--model", model_folder("bert"), *options)
    model, parts = small_model("bert"), matlens.load_corpus(str(words)).split(n_train=90, n_validation=30)
    windows = [
        make_windows(model, part, size=64, max_windows=n, targets=True)
        for part, n in zip(parts, (24, 3), strict=True)
    ]
    expected = linearity.linearity_atlas(model, *windows, progress=False)
    again = linearity.rank_correlations(expected)
    for name, table in (("linearity", expected), ("linearity_correlations", again)):
        found = pd.read_csv(tmp_path / f"{name}.csv", keep_default_na=False)["value"].astype(float)
        assert found.tolist() == pytest.approx(table["value"].tolist(), nan_ok=True)
    assert_table(tmp_path / "linearity_kinds.csv", atlas_summary(expected))
    together = expected["kind"].str.startswith("together") & (expected["metric"] == "agreement")
    few = expected[together | (expected["metric"] == "loss increase")]
    assert set(few["metric"]) == {"loss increase", "agreement"}
    assert_table(tmp_path / "linearity_costs.csv", few)
    (folder,) = (path.parent for path in tmp_path.rglob("scores.json"))
    origin = json.loads((tmp_path / "linearity_costs.json").read_text())
    assert origin["atlas_seconds"] == linearity.atlas_seconds(folder) > 0
