"""The analysis of pruning on a small model: its table is that of the library."""

from __future__ import annotations

import json
from typing import Any, get_args

import pandas as pd
import pytest
from analysing import PRUNING, assert_figure, run
from studies import Cells

import matlens
from matlens import pruning
from matlens.data import make_windows
from matlens.pruning import Choice, Method


def test_the_table_is_what_pruning_alone_gives(corpora, model_folder, small_model, tmp_path, capsys):
    words, others = corpora / "words.txt", tmp_path / "others.txt"
    lines = (corpora / "others.txt").read_text().splitlines()
    others.write_text("\n".join(lines[:60]))  # too few for what is asked, and split in its proportion
    run(
        PRUNING, "--model", model_folder("llama"), "--corpus", words, "--corpus", others, "--train", 90,
        "--val", 30, "--window", 20, "--size", 1, "--eval-windows", 4, "--device", "cpu", "--out", tmp_path,
    )  # fmt: skip
    table = pd.read_csv(tmp_path / "pruning.csv", keep_default_na=False)
    assert "refit" in capsys.readouterr().out
    assert set(table["method"]) == {"original", "pruned", *get_args(Method)}
    assert set(table["choice"]) == {"", *get_args(Choice)}
    model = small_model("llama")
    texts = [
        matlens.load_corpus(str(path)).split(n_train=n_train, n_validation=n_validation)
        for path, n_train, n_validation in ((words, 90, 30), (others, 45, 15))
    ]
    fitted_on = make_windows(model, texts[0][0], size=20, max_windows=120)
    pruned = pruning.prune(model, fitted_on, 1, method="replaceme", choice="angle", progress=False)
    for corpus, (_, evaluated) in zip(("words", "others"), texts, strict=True):
        alone = pruning.compare_pruned(
            model, pruned, make_windows(model, evaluated, size=20, max_windows=4), progress=False
        )
        rows = table[(table["method"] == "replaceme") & (table["choice"] == "angle")]
        ours = (
            rows[rows["corpus"].str.contains(corpus)]
            .set_index("metric")["value"]
            .astype(float)
            .drop("recovered")
        )
        expected = alone[alone["method"] == "pruned"].set_index("metric")["value"]
        pd.testing.assert_series_equal(ours.sort_index(), expected.sort_index(), check_dtype=False)


def test_a_run_resumes_and_draws_what_is_written(corpora, model_folder, tmp_path, monkeypatch):
    """Killed after a few cells, it computes the others; run once more, it computes none."""
    options = [
        "--model", model_folder("llama-deep"), "--corpus", corpora / "words.txt", "--train", 90, "--val", 30,
        "--window", 20, "--size", 1, "--size", 2, "--eval-windows", 4, "--device", "cpu", "--out", tmp_path,
        "--choice", "greedy", "--tokens", 5, "--method", "replaceme", "--method", "jump", "--method", "chain",
        "--suffix", "_cuts",
    ]  # fmt: skip
    made, get = list[str](), Cells.get

    def watched(self: Any, name: str, make: Any) -> Any:
        def make_and_count() -> Any:
            made.append(name)
            if len(made) == 6:
                raise KeyboardInterrupt
            return make()

        return get(self, name, make_and_count)

    monkeypatch.setattr(Cells, "get", watched)
    with pytest.raises(SystemExit):
        run(PRUNING, *options)
    for _ in range(2):
        run(PRUNING, *options)
    assert (
        len(made) == len({*made}) + 1 == 1 + 2 + 6 + 1 + 1
    )  # the original, choices, models, costs; one twice
    table = pd.read_csv(tmp_path / "pruning_cuts.csv", keep_default_na=False)
    written = pd.read_csv(tmp_path / "pruning_generation_cuts.csv", keep_default_na=False)
    assert set(table["method"]) == {"original", "pruned", "replaceme", "jump", "chain"}
    assert set(written["method"]) == set(table["method"]) - {"pruned"}
    assert set(written["decoding"]) == {"greedy", "sampled"}
    assert set(written["n"]) == {4}
    assert_figure(tmp_path, "pruning_cuts")
    described = json.loads((tmp_path / "pruning_cuts.json").read_text())
    assert described["tokens"] == 5
    assert described["processor_seconds"] > 0
