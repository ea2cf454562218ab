"""Options as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from matlens.cli import options
from matlens.cli.options import DtypeChoice, PositionChoice, ReadChoice


def described(option: Any) -> OptionInfo:
    """What typer knows of an option."""
    (info,) = (part for part in get_args(option)[1:] if hasattr(part, "help"))
    return info


@pytest.mark.parametrize("name", [name for name, value in vars(options).items() if get_args(value)[1:]])
def test_every_option_has_a_help(name: str) -> None:
    assert described(getattr(options, name)).help


@pytest.mark.parametrize("choice", DtypeChoice)
def test_every_precision_is_one_of_torch(choice: DtypeChoice) -> None:
    assert isinstance(getattr(torch, choice), torch.dtype)


def test_choices_say_what_they_are() -> None:
    assert [*map(str, PositionChoice)] == ["auto", "drawn", "all"]
    assert [*map(str, ReadChoice)] == ["plain", "norm", "head"]


@pytest.mark.parametrize(("number", "code"), [("10", 0), ("9", 2), ("many", 2)])
def test_there_is_a_fewest_number_of_sentences(number: str, code: int) -> None:
    app = typer.Typer()

    def command(sentences: int) -> None:
        print(sentences)

    command.__annotations__["sentences"] = options.sentences(10, 20)
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
