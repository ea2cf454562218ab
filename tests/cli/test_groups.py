"""Groups of options: a command takes several options as one parameter."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from matlens import InputError
from matlens.cli.groups import (
    CorpusOptions,
    FitOptions,
    ModelOptions,
    ReadOptions,
    SampleOptions,
    grouped,
)
from matlens.cli.options import DtypeChoice, ReadChoice, StackChoice, Title


def run(command: Any, *arguments: str) -> str:
    """Run a function as a command; what it prints."""
    app = typer.Typer()
    app.command()(command)
    outcome = CliRunner().invoke(app, arguments)
    if outcome.exception and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome.output


def names(group: Any) -> set[str]:
    return {field.name for field in fields(group)}


@grouped
def command(model: ModelOptions, fit: FitOptions, title: Title = None) -> None:
    """Print what is given."""
    print(model)
    print(fit)
    print(title)


def test_a_command_is_given_its_groups_and_its_own_options() -> None:
    printed = run(command, "--model", "m", "--dtype", "float16", "--ridge", "2", "--title", "some title")
    model = ModelOptions(model="m", dtype=DtypeChoice.float16)
    assert printed == f"{model}\n{FitOptions(ridge=2.0)}\nsome title\n"


def test_required_options_come_first_and_all_are_known() -> None:
    parameters = list(inspect.signature(command).parameters)
    assert parameters[0] == "model"
    assert set(parameters) == names(ModelOptions) | names(FitOptions) | {"title"}
    assert command.__doc__ == "Print what is given."
    assert "Missing option '--model'" in run(command)


def test_no_two_groups_of_the_main_job_share_an_option() -> None:
    groups = [names(group) for group in (ModelOptions, CorpusOptions, SampleOptions, FitOptions)]
    assert sum(map(len, groups)) == len(set[str]().union(*groups))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", "all"), ("last", "last"), ("0:12,6:-1", [(0, 12), (6, -1)])],
)
def test_pairs_are_spelled_out(text: str, expected: Any) -> None:
    assert FitOptions(pairs=text).fit_arguments() == {"pairs": expected, "intercept": False, "ridge": None}


@pytest.mark.parametrize("text", ["", "most", "1", "1:2:3", "1:x", "1:2,"])
def test_pairs_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--pairs .*: expected all, last, or a list such as 0:12,6:12\."):
        FitOptions(pairs=text).fit_arguments()


def test_a_model_is_loaded_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("matlens.models.places.locate", lambda *_: None)
    monkeypatch.setattr(
        "matlens.models.loading.load", lambda *names, **options: calls.append((names, options))
    )
    ModelOptions("m", "cpu", DtypeChoice.bfloat16, "v2", True).load()
    ModelOptions("m", "cpu", DtypeChoice.bfloat16, "v2", True, StackChoice.encoder).load()
    options = {"device": "cpu", "dtype": torch.bfloat16, "revision": "v2", "trust_remote_code": True}
    assert calls == [(("m",), options | {"stack": None}), (("m",), options | {"stack": "encoder"})]


def test_a_corpus_is_read_as_the_options_say(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"body": "these are five words here"}\n{"body": "and these are five others"}\n')
    corpus = CorpusOptions(str(path), field="body", limit=1).load()
    assert corpus.sentences == ("these are five words here",)


def test_the_study_of_the_main_job_is_in_the_output_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("\n".join(f"a b c d {i}" for i in range(9)))
    samples = SampleOptions(tmp_path / "out", train=5, val=2, seed=3, draw_special=False, batch_tokens=7)
    model = tmp_path / "model.gguf"
    model.touch()
    study = samples.study(ModelOptions(str(model)), CorpusOptions(str(words)), ridge=1.0)
    assert study.folder == study.out == tmp_path / "out"
    assert (study.n_train, study.n_validation, study.seed, study.batch_tokens) == (5, 2, 3, 7)
    assert (study.positions, study.draw_special, study.ridge) == ("auto", False, 1.0)
    assert capsys.readouterr().out.startswith("9 sentences of")
    with pytest.raises(InputError, match="There is no model"):
        samples.check(ModelOptions(str(tmp_path / "absent")))


def test_vectors_are_read_as_the_options_say() -> None:
    catalogue: Any = SimpleNamespace(
        projection=lambda reading: SimpleNamespace(reading=reading, unembedding=range(60))
    )
    for choice in ReadChoice:
        read: Any = ReadOptions(read=choice).projection(catalogue)
        assert read.reading == choice.value
    with pytest.raises(InputError, match=r"^The number of tokens must be"):
        ReadOptions(tokens=61).projection(catalogue)
