"""Analyses as scripts: the options that are added, the studies that are made, and what is written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from studies import Report, Study, run_study


def run(work: Callable[..., None], *arguments: object, **options: Any) -> None:
    """Run an analysis as a script; a refusal comes through as `SystemExit`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["analysis.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_study(work, **options)
    if ended.value.code:
        raise ended.value


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("\n".join(f"a b c d {i}" for i in range(30)))
    return path


def test_an_analysis_is_given_its_study_its_report_and_its_options(words: Path, tmp_path: Path) -> None:
    given: list[Any] = []

    def work(study: Study, report: Report, every: int = 1) -> None:
        given.extend((study, report, every))

    run(work, "--corpus", words, "--train", 20, "--seed", 2, "--every", 3, "--out", tmp_path, "--title", "t")
    study, report, every = given
    assert (study.n_train, study.n_validation, study.seed, study.out) == (20, 3000, 2, tmp_path)
    assert study.corpus.name == str(words)
    assert report == Report(tmp_path, "t")
    assert every == 3


def test_an_analysis_of_several_is_given_a_study_for_each_and_a_model_is_loaded_once(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("several", [False, True])
def test_beside_other_corpora_one_may_be_smaller(several: bool, words: Path, tmp_path: Path) -> None:
    """Sizes that the user gives are kept for one corpus; of several, those of each are what it has."""
    seen: list[tuple[str, ...]] = []

    def work(studies: Iterator[Study], report: Report) -> None:
        seen.extend(study.adjustable for study in studies)

    options = ["--corpus", words, "--train", 40, "--val", 20, "--out", tmp_path]
    run(work, *options, model=None, corpus=["a", "b"] if several else "a")
    assert seen == ([("train", "validation")] if several else [()])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"train", "val", "model", "corpus", "device", "suffix", "title"}),
        ({"sentences": 20}, {"sentences", "model", "corpus", "device", "suffix", "title"}),
        ({"train": None, "figures": False}, {"model", "corpus", "device", "suffix"}),
        ({"corpus": None}, {"model", "device", "suffix", "title"}),
        ({"model": None, "train": None}, {"corpus", "title"}),
    ],
)
def test_only_options_that_mean_something_are_added(
    options: dict[str, Any], expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def work(study: Study, report: Report) -> None:
        """Do something."""

    run(work, "--help", **options)
    printed = capsys.readouterr().out
    assert "Do something." in printed
    assert {line.split()[1] for line in printed.splitlines() if line.startswith("│ --")} == {
        f"--{name}" for name in expected | {"seed", "out", "help"}
    }


def test_sentences_are_those_that_are_run(words: Path, tmp_path: Path) -> None:
    parts: list[Any] = []

    def work(study: Study, report: Report) -> None:
        parts.extend(study.parts)

    options = {"sentences": 20, "fewest": 4}
    run(work, "--corpus", words, "--sentences", 4, "--out", tmp_path, **options)
    assert list(map(len, parts)) == [1, 4]
    with pytest.raises(SystemExit):
        run(work, "--corpus", words, "--sentences", 3, "--out", tmp_path, **options)


def test_what_cannot_be_used_is_told_in_a_line(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(study: Study, report: Report) -> None:
        _ = study.model

    for options, message in (
        (["--corpus", tmp_path / "absent.txt"], "error: There is no file or folder"),
        (["--corpus", words, "--train", 30], "must be at most"),
        (["--corpus", words, "--train", 9, "--val", 9, "--model", tmp_path / "absent"], "There is no model"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(work, *options, "--out", tmp_path / "out")
        assert ended.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_report_is_a_table_its_origin_and_its_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = pd.DataFrame({"value": [1, 2]}), tmp_path / "new"
    report, figure = Report(out, "A title"), Figure()
    figure.suptitle("another")
    report.write("first", table, {"seed": 1}, figure)
    assert figure.get_suptitle() == "A title"
    assert pd.read_csv(out / "first.csv").equals(table)
    origin = json.loads((out / "first.json").read_text())
    assert origin["seed"] == 1
    assert 0 < origin["processor_seconds"] <= sum(os.times()[:4]) + 0.05
    names = ["first.csv", "first.png", "first.pdf"]
    assert capsys.readouterr().out.split() == [str(out / name) for name in names]
    report.write("second", table, {})
    assert capsys.readouterr().out.split() == [str(out / "second.csv")]
    assert report.write_table("third", table) == out / "third.csv"
    assert {path.name for path in out.iterdir()} == {
        *names, "first.json", "second.csv", "second.json", "third.csv"
    }  # fmt: skip


def test_small_models_are_trained_on_none_of_what_others_are_validated_on() -> None:
    """Without options all of them split a corpus alike."""
    folder = Path(__file__).parents[2] / "analyses"
    for name in ("small_bert", "small_gpts", "small_wikilm", "paper_a_fig5_masked", "paper_a_fig7_models"):
        (call,) = (
            line for line in (folder / f"{name}.py").read_text().splitlines() if "run_study(main" in line
        )
        assert "train=" not in call
        assert "val=" not in call
