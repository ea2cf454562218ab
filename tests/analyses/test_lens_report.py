"""The report of lenses on a small model: its tables are there, and `id` is what it is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from analysing import LENSES, assert_figure, run

import matlens
from matlens.lens import prediction_quality


def test_the_logit_lens_is_that_of_the_main_job(
    corpora: Path, model_folder: Callable[[str], Path], small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    words = corpora / "words.txt"
    run(
        LENSES, "--model", model_folder("llama"), "--corpus", words, "--train", 90, "--val", 30, "--layer", 1,
        "--layer", 2, "--no-tuned", "--device", "cpu", "--out", tmp_path,
    )  # fmt: skip
    table = pd.read_csv(tmp_path / f"{LENSES}.csv", keep_default_na=False)
    assert_figure(tmp_path, LENSES)
    assert (tmp_path / f"{LENSES}_exits.csv").exists()
    model = small_model("llama")
    fitted_on, judged_on = matlens.load_corpus(str(words)).split(n_train=90, n_validation=30)
    train, validation = (
        matlens.collect(model, matlens.make_examples(model, part), progress=False)
        for part in (fitted_on, judged_on)
    )
    maps = matlens.MapSet.fit(train, pairs="last", progress=False)
    expected = prediction_quality(matlens.Readout(model), maps, validation, progress=False)
    expected = expected[(expected["method"] == "id") & expected["layer"].isin([1, 2])]
    ours = table[(table["method"] == "id") & (table["against"] == "")]
    for row in expected.itertuples():
        k = "" if pd.isna(row.k) else row.k
        same = ours[(ours["layer"].astype(str) == str(row.layer)) & (ours["metric"] == row.metric)]
        same = same if k == "" else same[pd.to_numeric(same["k"]) == k]
        assert float(same["value"].item()) == pytest.approx(row.value, rel=1e-4)
