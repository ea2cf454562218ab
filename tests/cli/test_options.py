"""Options as typer reads them, and groups of them: a command takes several options as one parameter."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import torch
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from matlens import InputError
from matlens.activations.activations import Positions
from matlens.cli import options
from matlens.cli.options import CorpusOptions, FitOptions, ModelOptions, ReadOptions, SampleOptions, Title
from matlens.numerics.agglomeration import Linkage


def run(command: Any, *arguments: str) -> str:
    """Run a function as a command; what it prints."""
    app = typer.Typer()
    assert options.command(app)(command) is command, "it can be called as it is"
    outcome = CliRunner().invoke(app, arguments)
    if outcome.exception and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome.output


def names(group: Any) -> set[str]:
    return {field.name for field in fields(group)}


def command(model: ModelOptions, fit: FitOptions, title: Title = None) -> None:
    """Print what is given."""
    print(model)
    print(fit)
    print(title)


def test_a_command_is_given_its_groups_and_its_own_options() -> None:
    printed = run(command, "--model", "m", "--dtype", "float16", "--ridge", "2", "--title", "some title")
    model = ModelOptions(model="m", dtype="float16")
    assert printed == f"{model}\n{FitOptions(ridge=2.0)}\nsome title\n"


def test_required_options_come_first_and_all_are_known() -> None:
    app = typer.Typer()
    options.command(app)(command)
    (registered,) = app.registered_commands
    assert registered.callback is not None
    parameters = list(inspect.signature(registered.callback).parameters)
    assert parameters[0] == "model"
    assert set(parameters) == names(ModelOptions) | names(FitOptions) | {"title"}
    assert registered.callback.__doc__ == "Print what is given."
    assert "Missing option '--model'" in run(command)


def test_no_two_groups_of_the_main_job_share_an_option() -> None:
    groups = [names(group) for group in (ModelOptions, CorpusOptions, SampleOptions, FitOptions)]
    assert sum(map(len, groups)) == len(set[str]().union(*groups))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", "all"), ("last", "last"), ("0:12,6:-1", [(0, 12), (6, -1)])],
)
def test_pairs_are_spelled_out(text: str, expected: Any) -> None:
    assert FitOptions(pairs=text).arguments() == {"pairs": expected, "intercept": False, "ridge": None}


@pytest.mark.parametrize("text", ["", "most", "1", "1:2:3", "1:x", "1:2,"])
def test_pairs_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--pairs .*: expected all, last, or a list such as 0:12,6:12\."):
        FitOptions(pairs=text).arguments()


def test_a_model_is_loaded_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "matlens.models.loading.load", lambda *names, **options: calls.append((names, options))
    )
    ModelOptions("m", "cpu", "bfloat16", "v2", True).load()
    ModelOptions("m", "cpu", "bfloat16", "v2", True, "encoder").load()
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
        samples.study(ModelOptions(str(tmp_path / "absent")), CorpusOptions("absent.txt"))


def test_vectors_are_read_as_the_options_say() -> None:
    catalogue: Any = SimpleNamespace(
        projection=lambda reading: SimpleNamespace(reading=reading, unembedding=range(60))
    )
    for choice in ("plain", "norm", "head"):
        read: Any = ReadOptions(read=choice).projection(catalogue)
        assert read.reading == choice
    with pytest.raises(InputError, match=r"^The number of tokens must be"):
        ReadOptions(tokens=61).projection(catalogue)


def described(option: Any) -> OptionInfo:
    """What typer knows of an option."""
    (info,) = (part for part in get_args(option)[1:] if hasattr(part, "help"))
    return info


def hints() -> dict[str, Any]:
    """All options by name: shared ones, and those of groups."""
    shared = {name: value for name, value in vars(options).items() if get_args(value)[1:]}
    groups = (ModelOptions, CorpusOptions, SampleOptions, FitOptions, ReadOptions)
    of_groups = {
        f"{group.__name__}.{name}": hint
        for group in groups
        for name, hint in get_type_hints(group, include_extras=True).items()
    }
    literals = ("Dtype", "PositionChoice", "LinkageChoice")
    return {name: hint for name, hint in (shared | of_groups).items() if name not in literals}


@pytest.mark.parametrize("name", hints())
def test_every_option_has_a_help(name: str) -> None:
    assert described(hints()[name]).help


def test_choices_are_those_of_the_library() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in get_args(options.Dtype))
    assert get_args(options.LinkageChoice) == get_args(Linkage)
    assert set(get_args(options.PositionChoice)) == {"auto", *get_args(Positions)}


@pytest.mark.parametrize(("number", "code"), [("10", 0), ("9", 2), ("many", 2)])
def test_there_is_a_fewest_number_of_sentences(number: str, code: int) -> None:
    app = typer.Typer()

    def command(sentences: Any = None) -> None:
        print(sentences)

    option = options.size_option("--sentences", "How many.", 10, 20)
    command.__annotations__["sentences"] = Annotated[int | None, option]
    app.command()(command)
    outcome = CliRunner().invoke(app, ["--sentences", number])
    assert outcome.exit_code == code
    assert (outcome.output == "10\n") == (code == 0)


def test_the_users_folder_is_known_behind_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert options.folder_of("~/a folder") == tmp_path / "a folder"
    assert options.folder_of(Path("out")) == Path("out")
    for wrong in (" ", "~nobody-of-this-name/out"):
        with pytest.raises(typer.BadParameter, match="Expected the path of a folder"):
            options.folder_of(wrong)


def test_layers_are_numbers_with_a_comma_between() -> None:
    assert options.numbered("5, 10,-3") == [5, 10, -3]
    assert options.numbered(None) is None
    with pytest.raises(InputError, match="Expected numbers"):
        options.numbered("5,x")
