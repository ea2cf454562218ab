"""The analysis of pruning on a small model: its table is that of the library, after a kill too."""

from __future__ import annotations

import json
from typing import Any, get_args

import pandas as pd
import pytest
from analysing import PRUNING, assert_figure, run, sizes
from studies import Cells

import matlens
from matlens import pruning
from matlens.data import make_windows

SIZES = [*sizes(), "--window", 20, "--eval-windows", 4]


def test_the_table_is_what_pruning_alone_gives(corpora, model_folder, small_model, tmp_path):
    words, others = corpora / "words.txt", tmp_path / "others.txt"
    lines = (corpora / "others.txt").read_text().splitlines()
    others.write_text("\n".join(lines[:60]))  # too few for what is asked, and split in its proportion
    options = ["--corpus", words, "--corpus", others, *SIZES, "--size", 1, "--out", tmp_path]
    run(PRUNING, "--model", model_folder("llama"), *options)
    table, model = pd.read_csv(tmp_path / "pruning.csv", keep_default_na=False), small_model("llama")
    assert set(table["method"]) == {"original", "pruned", *get_args(pruning.Method)}
    assert set(table["choice"]) == {"", *get_args(pruning.Choice)}
    texts = [
        matlens.load_corpus(str(path)).split(n_train=n_train, n_validation=n_validation)
        for path, n_train, n_validation in ((words, 90, 30), (others, 45, 15))
    ]
    fitted_on = make_windows(model, texts[0][0], size=20, max_windows=120)
    pruned = pruning.prune(model, fitted_on, 1, method="replaceme", choice="angle", progress=False)
    rows = table[(table["method"] == "replaceme") & (table["choice"] == "angle")]
    for corpus, (_, evaluated) in zip(("words", "others"), texts, strict=True):
        windows = make_windows(model, evaluated, size=20, max_windows=4)
        alone = pruning.compare_pruned(model, pruned, windows, progress=False)
        expected = alone[alone["method"] == "pruned"].set_index("metric")["value"].to_dict()
        ours = rows[rows["corpus"].str.contains(corpus)].set_index("metric")["value"].astype(float)
        assert ours.drop("recovered").to_dict() == pytest.approx(expected)


def test_a_run_resumes_and_draws_what_is_written(corpora, model_folder, tmp_path, monkeypatch):
    """Killed after a few cells, it computes the others; run once more, it computes none."""
    methods = ("replaceme", "jump", "chain")
    options = [
        "--model", model_folder("llama-deep"), "--corpus", corpora / "words.txt", *SIZES, "--size", 1,
        "--size", 2, "--choice", "greedy", "--tokens", 5, "--suffix", "_cuts", "--out", tmp_path,
        *(part for name in methods for part in ("--method", name)),
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
    # The original, choices, models, costs; one twice.
    assert len(made) == len({*made}) + 1 == 1 + 2 + 6 + 1 + 1
    names = ("pruning_cuts", "pruning_generation_cuts")
    table, written = (pd.read_csv(tmp_path / f"{name}.csv", keep_default_na=False) for name in names)
    assert set(table["method"]) == {"original", "pruned", *methods}
    assert set(written["method"]) == {"original", *methods}
    assert (set(written["decoding"]), set(written["n"])) == ({"greedy", "sampled"}, {4})
    assert_figure(tmp_path, "pruning_cuts")
    described = json.loads((tmp_path / "pruning_cuts.json").read_text())
    assert described["processor_seconds"] > 0 == described["tokens"] - 5
