"""What commands print: tables, figures, and errors that the user can mend."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from command_lines import cells
from hypothesis import given
from hypothesis import strategies as st

from matlens import InputError
from matlens.cli import printing, starting


def test_tables_show_markup_as_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printing.print_table("Of [red]all", ("rank", "token"), [(1, "[MASK]"), (2, "[/bold]")])
    printed = capsys.readouterr().out
    assert printed.startswith("Of [red]all")
    assert cells(printed) == [["1", "[MASK]"], ["2", "[/bold]"]]


@pytest.mark.parametrize(
    "foreign", ["\x1b[2J", "\x1b]0;owned\x07", "\u202e", "\x9b31m", "\r", "\x08", "\udcff"]
)
def test_control_characters_are_escaped(foreign, capsys):
    printing.print_table(f"Of {foreign}", ("token", "other"), [(f"a{foreign}b", f"{foreign}:smile:")])
    printing.print_line("Figures:", Path(f"a{foreign}.png"))
    with pytest.raises(SystemExit):
        starting.report_errors(lambda: refuse(f"The file {foreign} :smile: [red]"))
    printed = "".join(capsys.readouterr())
    assert foreign not in printed.replace("\r\n", "\n")
    assert foreign.encode("unicode_escape").decode() in printed
    assert printed.count(":smile:") == 2
    assert "[red]" in printed


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
