"""What commands print: tables, figures, and errors that the user can mend."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from command_lines import cells
from hypothesis import given
from hypothesis import strategies as st
from tqdm.auto import tqdm

from matlens import InputError
from matlens.cli import printing, starting


def test_an_error_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it comes out of a loop whose progress is shown."""

    def work() -> None:
        rows = iter(tqdm(range(3), desc="slow work"))  # held by this frame, so by the exception's traceback
        raise InputError(f"No row {next(rows)}.")

    with pytest.raises(SystemExit) as ended:
        starting.report_errors(work)
    assert ended.value.code == 2
    assert "slow work" in (said := capsys.readouterr().err)
    assert said.endswith("\nerror: No row 0.\n")


@pytest.mark.parametrize(("code", "hint"), [(130, True), (1, False)])
def test_an_exit_comes_through_and_an_interruption_is_explained(
    code: int, hint: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise KeyboardInterrupt if hint else SystemExit(code)

    with pytest.raises(SystemExit) as ended:
        starting.report_errors(work)
    assert ended.value.code == code
    assert ("Rerun the same command" in capsys.readouterr().err) == hint


def test_tables_show_markup_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printing.print_table("Of [red]all", ("rank", "token"), [(1, "[MASK]"), (2, "[/bold]")])
    printed = capsys.readouterr().out
    assert printed.startswith("Of [red]all")
    assert cells(printed) == [["1", "[MASK]"], ["2", "[/bold]"]]


@pytest.mark.parametrize(
    "foreign", ["\x1b[2J", "\x1b]0;owned\x07", "\u202e", "\x9b31m", "\r", "\x08", "\udcff"]
)
def test_control_characters_are_escaped(foreign: str, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_number_is_shown_to_its_digits(digits: int, number: float) -> None:
    text = printing.number_text(number, digits)
    assert len(text) <= 9 + digits
    assert (float(text) == 0) == (number == 0)
    error = 0.51 * 10.0**-digits
    assert math.isclose(float(text), number, rel_tol=error, abs_tol=0 if "e" in text else error) or (
        abs(number) > 1e308
    )
    assert printing.number_text(math.nan) == "nan"
