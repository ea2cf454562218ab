"""Analyses as scripts: the options that are added, the studies that are made, and what is written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from studies import Cells, Report, Study, run_study

from matlens.io import Artifact


def run(work: Callable[..., None], *arguments: object, **options: Any) -> None:
    """Run an analysis as a script; a refusal comes through as `SystemExit`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["analysis.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_study(work, **options)
    if ended.value.code:
        raise ended.value


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(f"a b c d {i}" for i in range(30)))
    return path


def test_an_analysis_of_several_is_given_a_study_for_each_and_a_model_is_loaded_once(
    words, tmp_path, monkeypatch
):
    loads: list[str] = []
    monkeypatch.setattr("matlens.models.places.locate", lambda *_: None)
    monkeypatch.setattr("matlens.models.loading.load", lambda name, **_: loads.append(name) or object())
    other = words.with_name("other.txt")
    other.write_text(words.read_text())
    seen: list[tuple[Any, str]] = []

    def work(studies: Iterator[Study], report: Report) -> None:
        seen.extend((study.model, study.corpus.name) for study in studies)

    names = ["--model", "m1", "--model", "m2", "--model", "m1", "--corpus", words, "--corpus", other]
    run(work, *names, "--train", 5, "--val", 5, "--out", tmp_path, model=["a"], corpus=["b"])
    assert loads == ["m1", "m2"]
    assert [name for _, name in seen] == [str(words), str(other)] * 2
    assert seen[0][0] is seen[1][0] is not seen[2][0]


def test_a_report_is_a_table_its_origin_and_its_figure(tmp_path, capsys):
    table, out = pd.DataFrame({"value": [1, 2]}), tmp_path / "new"
    report, figure = Report(out, "_new"), Figure()
    figure.suptitle("A title")
    report.write("first", table, {"seed": 1}, figure)
    assert pd.read_csv(out / "first_new.csv").equals(table)
    origin = json.loads((out / "first_new.json").read_text())
    assert origin["seed"] == 1
    assert 0 < origin["processor_seconds"] <= sum(os.times()[:4]) + 0.05
    names = ["first_new.csv", "first_new.png", "first_new.pdf"]
    assert capsys.readouterr().out.split() == [str(out / name) for name in names]
    report.write_table("second", table)
    assert {path.name for path in out.iterdir()} == {*names, "first_new.json", "second_new.csv"}


def test_small_models_are_trained_on_none_of_what_others_are_validated_on():
    """Without options all of them split a corpus alike."""
    folder = Path(__file__).parents[2] / "analyses"
    for name in ("small_bert", "small_gpts", "small_wikilm", "paper_a_fig5_masked", "paper_a_fig7_models"):
        (call,) = (
            line for line in (folder / f"{name}.py").read_text().splitlines() if "run_study(main" in line
        )
        assert "train=" not in call
        assert "val=" not in call


def test_a_cell_is_computed_once_and_stored_with_its_seconds(tmp_path):
    made, seconds = list[str](), list[dict[str, float]]()

    def make(name: str) -> dict[str, Any]:
        made.append(name)
        total = sum(i * i for i in range(400_000))  # some work
        return {"value": torch.tensor([total, len(made)]), "words": [name]}

    for _ in range(2):
        with Artifact.writing(tmp_path / "cells", "cells", {"a": 1}) as artifact:
            cells = Cells(artifact)
            for name in ("chain 1 2", "chain, healed 1 2", "chain 1 2"):
                cell = cells.get(name, partial(make, name))
                assert (int(cell["value"][1]), cell["words"]) == (1 + ("," in name), [name])
            assert min(cells.seconds.values()) > 0
            seconds.append(cells.seconds)
    assert seconds[0] == seconds[1]
    assert made == ["chain 1 2", "chain, healed 1 2"]
