"""What commands print: tables, figures, and errors that the user can mend."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from command_lines import cells
from tqdm.auto import tqdm

from matlens import InputError
from matlens.cli import printing, starting
from matlens.io.tables import csv_text, result_row, result_table
from matlens.metrics import Estimate


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


@pytest.mark.parametrize(("code", "hint"), [(130, True), (1, False), (0, False)])
def test_an_exit_comes_through_and_an_interruption_is_explained(
    code: int, hint: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise SystemExit(code)

    with pytest.raises(SystemExit) as ended:
        starting.report_errors(work)
    assert ended.value.code == code
    assert ("Run the same command again" in capsys.readouterr().err) == hint


def test_a_message_with_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise InputError("Expected exactly one [MASK] in [bold]it[/bold].")

    with pytest.raises(SystemExit):
        starting.report_errors(work)
    assert capsys.readouterr().err == "error: Expected exactly one [MASK] in [bold]it[/bold].\n"


def test_a_defect_of_ours_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        starting.report_errors(lambda: 1 / 0)


def test_tables_show_what_looks_like_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printing.print_table("Of [red]all", ("rank", "token"), [(1, "[MASK]"), (2, "[/bold]")])
    printed = capsys.readouterr().out
    assert printed.startswith("Of [red]all")
    assert cells(printed) == [["1", "[MASK]"], ["2", "[/bold]"]]


def test_layers_have_a_line_each_and_what_is_not_there_is_a_dash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def row(layer: int, metric: str, value: float, k: int | None = None) -> dict[str, object]:
        return result_row(
            "x", model="m", corpus="c", method="mat", layer=layer, target=2, metric=metric, k=k,
            estimate=Estimate(value, value, value, 5),
        )  # fmt: skip

    rows = [row(0, "r2", 0.5), row(1, "r2", 0.25), row(1, "precision", 1.0, 1), row(1, "precision", 0.1, 5)]
    table = csv_text(result_table(rows).astype({"k": "Int64"}))
    printing.print_layers(csv.DictReader(table.splitlines()))
    printed = capsys.readouterr().out
    assert "Onto layer 2" in printed
    assert cells(printed) == [["0", "0.500", "–"], ["1", "0.250", "1.000"]]


def test_paths_of_figures_are_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_figures([Path("a.png"), Path("b.pdf")])
    assert capsys.readouterr().out == "Figures: a.png, b.pdf\n"


@pytest.mark.parametrize(
    "foreign", ["\x1b[2J", "\x1b]0;owned\x07", "\u202e", "\x9b31m", "\r", "\x08", "\udcff"]
)
def test_what_others_wrote_does_nothing_to_the_terminal(
    foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(31, "31 seconds"), (60, "a minute"), (200, "3 minutes"), (5000, "83 minutes"), (7300, "2 hours")],
)
def test_durations_are_in_words(seconds: float, words: str) -> None:
    assert printing.duration(seconds) == words


def test_the_time_is_operations_over_the_speed_and_short_work_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_model: Any
) -> None:
    model = small_model("gpt2")
    assert printing._operations_per_second(model) > 1e6
    capsys.readouterr()
    monkeypatch.setattr(printing, "_operations_per_second", lambda _: 1e9)
    monkeypatch.setattr(printing, "_SHARE", 0.5)
    printing.print_expected(model, 0, 240 * 0.5e9, "--windows")
    printing.print_expected(model, 0, 20 * 0.5e9, "--windows")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "This takes about 4 minutes on this machine (--windows).\n"
