"""Functions as commands: help from docstrings, bounds from annotations, options from dataclasses."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from conftest import make_sentences
from typer.testing import CliRunner

from matlens import InputError
from matlens.cli import options
from matlens.cli.app import app
from matlens.cli.options import FitOptions, Layers, ModelOptions, PairsOption
from matlens.cli.parts import Blocks
from matlens.cli.study import Part
from matlens.errors import PositiveInt


def run(*arguments: str) -> str:
    """Run a function as a command; what it prints."""
    app = typer.Typer()
    assert options.command(app)(command) is command, "it can be called as it is"
    outcome = CliRunner().invoke(app, arguments)
    if outcome.exception and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return " ".join(outcome.output.replace("│", " ").split())


def command(
    names: list[str],
    /,
    model: ModelOptions,
    fit: FitOptions,
    out_folder: Path,
    n: PositiveInt | None = None,
    some_flag: bool = False,
) -> None:
    """Print what is given.

    Parameters
    ----------
    names
        Names of things.
    out_folder
        Where it is
        written.
    n, some_flag
        About both.
    """
    print(names, model, fit, out_folder, n, some_flag)


def test_a_command_is_given_its_groups_and_its_own_options():
    given = ["a", "--model", "m", "--dtype", "float16", "--ridge", "2", "b", "--out-folder", "x", "--n", "3"]
    model = ModelOptions(model="m", dtype="float16")
    expected = f"['a', 'b'] {model} {FitOptions(ridge=2.0)} x 3"
    assert run(*given) == f"{expected} False"
    assert run(*given, "--some-flag") == f"{expected} True"


def test_help_and_bounds_are_those_of_the_function():
    printed = run("--help")
    for text in ("Print what is given. ", "Names of things.", "Where it is written.", "[x>=1] About both."):
        assert text in printed
    assert "Parameters" not in printed
    assert "--no-some-flag" not in printed
    required = ["a", "--model", "m", "--out-folder", "x"]
    assert "greater than or equal to 1" in run(*required, "--n", "0")
    assert "greater than or equal to 0" in run(*required, "--ridge", "-1")
    assert "Missing option '--model'" in run("a", "--out-folder", "x")


def callbacks(of: typer.Typer) -> list[Any]:
    inner = [callback for group in of.registered_groups for callback in callbacks(group.typer_instance)]  # type: ignore[arg-type]
    return [*(command.callback for command in of.registered_commands), *inner]


def test_every_option_of_every_command_has_a_help():
    for function in callbacks(app):
        for name, parameter in inspect.signature(function).parameters.items():
            assert get_args(parameter.annotation)[1].help, (function, name)


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        (PairsOption, "all", "all"), (PairsOption, "0:12,6:-1", [(0, 12), (6, -1)]),
        *((PairsOption, text, None) for text in ("", "most", "1", "1:2:3", "1:x", "1:2,")),
        (Layers, "5, 10,-3", [5, 10, -3]), (Layers, "5,x", None),
        (Blocks, "3", 3), (Blocks, "13,", [13]), (Blocks, "13,14", [13, 14]), (Blocks, "all", None),
        (Part, "3/8", (3, 8)), *((Part, text, None) for text in ("9/8", "0/8", "3", "a/b", "1/0")),
    ],
)  # fmt: skip
def test_texts_become_values(option, text, expected):
    parse = get_args(option)[1].parser
    if expected is not None:
        assert parse(text) == expected
        return
    with pytest.raises(typer.BadParameter, match="must be"):
        parse(text)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((None, None), (30, 10)), ((None, 30), (10, 30)), ((35, None), (35, 5)), ((20, 10), (20, 10)),
        ((90, 30), None), ((39, None), None), ((None, 40), None),
    ],
)  # fmt: skip
def test_a_small_corpus_is_split_in_proportion_or_leaves_what_was_given(sizes, expected, capsys):
    if expected is None:
        with pytest.raises(InputError, match="must be at most 40"):
            options.split_parts(make_sentences(), sizes, (90, 30), 3)
        return
    parts = options.split_parts(make_sentences(), sizes, (90, 30), 3)
    assert tuple(map(len, parts)) == expected
    n_train, n_validation = expected
    assert parts == make_sentences().split(n_train=n_train, n_validation=n_validation, seed=3)
    assert ("it is split into" in capsys.readouterr().err) is (None in sizes)
