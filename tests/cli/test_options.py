"""Functions as commands: help, bounds and options; what is printed of numbers and foreign text."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from conftest import make_sentences
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from matlens import InputError, pruning
from matlens.cli import options, parts, printing, starting
from matlens.cli.app import app
from matlens.cli.options import FitOptions, Layers, ModelOptions, PairsOption
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
        (parts.Blocks, "3", 3), (parts.Blocks, "13,", [13]), (parts.Blocks, "13,14", [13, 14]),
        (parts.Blocks, "all", None),
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
    made = options.split_parts(make_sentences(), sizes, (90, 30), 3)
    assert tuple(map(len, made)) == expected
    n_train, n_validation = expected
    assert made == make_sentences().split(n_train=n_train, n_validation=n_validation, seed=3)
    assert ("it is split into" in capsys.readouterr().err) is (None in sizes)


@pytest.mark.parametrize(
    "foreign", ["\x1b[2J", "\x1b]0;owned\x07", "\u202e", "\x9b31m", "\r", "\x08", "\udcff"]
)
def test_control_characters_are_escaped(foreign, capsys):
    printing.print_table(f"Of {foreign}", ("token", "other"), [(f"a{foreign}b", f"{foreign}:smile:[MASK]")])
    printing.print_line("Figures:", Path(f"a{foreign}.png"))
    with pytest.raises(SystemExit):
        starting.report_errors(lambda: refuse(f"The file {foreign} :smile: [red]"))
    printed = "".join(capsys.readouterr())
    assert foreign not in printed.replace("\r\n", "\n")
    assert foreign.encode("unicode_escape").decode() in printed
    assert printed.count(":smile:") == 2
    assert all(markup in printed for markup in ("[red]", "[MASK]"))


def refuse(message: str) -> None:
    raise InputError(message)


@pytest.mark.parametrize("digits", [0, 3])
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_shown_to_its_digits(digits, number):
    text = printing.number_text(number, digits)
    assert len(text) <= 9 + digits
    assert (float(text) == 0) == (number == 0)
    error = 0.51 * 10.0**-digits
    assert math.isclose(float(text), number, rel_tol=error, abs_tol=0 if "e" in text else error) or (
        abs(number) > 1e308
    )
    assert printing.number_text(math.nan) == "nan"


def test_options_offer_what_the_library_does():
    """The command line has copies of the names, since --help is shown without importing torch."""
    assert get_args(parts.Method) == get_args(pruning.Method)
    assert get_args(parts.Choice) == get_args(pruning.Choice)
