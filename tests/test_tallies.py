"""Tables of benchmarks: runs add up, and a page has them between its marks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import matlens

BENCHMARKS = Path(matlens.__file__).parents[1] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_runs_of_other_commands_and_seeds_add_up_and_the_same_run_counts_once(
    modules: Any, tmp_path: Path
) -> None:
    path = tmp_path / "out" / "racing.csv"
    for command, processes, seed, races, identical in (
        ("prune", 2, 0, 5, 4), ("prune", 4, 0, 7, 7), ("fit", 2, 0, 3, 3), ("prune", 2, 1, 10, 10),
        ("prune", 2, 0, 6, 6),
    ):  # fmt: skip
        tally = modules("tallies").Tally(path, ("command", "processes", "seed"))
        tally.put(command=command, processes=processes, seed=seed, races=races, identical=identical)
    read = modules("tallies").Tally(path, ("command", "processes", "seed"))
    assert len(read.table) == 4
    rows = read.summed(["command", "processes"], ["races", "identical"])
    assert rows[0] == ["command", "processes", "races", "identical"]
    assert sorted(rows[1:-1]) == [["fit", "2", 3, 3], ["prune", "2", 16, 16], ["prune", "4", 7, 7]]
    assert rows[-1] == ["all", "", 26, 26]


def test_a_table_is_written_between_two_marks_and_nothing_else_is_touched(
    modules: Any, tmp_path: Path
) -> None:
    marked, page = modules("marked"), tmp_path / "page.md"
    page.write_text("before\n<!-- races -->\nold\n<!-- races -->\nafter <!-- kills -->\n<!-- kills -->\n")
    for _ in range(2):
        lines = marked.table_lines([["command", "n", "races"], ["fit", "2", 1200], ["all", "", 1200]])
        marked.write_between(page, "races", "\n".join(lines))
        assert page.read_text() == (
            "before\n<!-- races -->\n| command | n | races |\n| --- | --- | --- |\n| fit | 2 | 1,200 |\n"
            "| **all** |  | **1,200** |\n<!-- races -->\nafter <!-- kills -->\n<!-- kills -->\n"
        )


def test_the_page_has_the_marks_of_every_table() -> None:
    page = (BENCHMARKS.parent / "docs" / "results" / "robustness.md").read_text()
    for mark in ("attack", "races", "kills", "mutants", "named faults"):
        first, table, _ = page.split(f"<!-- {mark} -->")
        assert table.startswith("\n| ")
        assert first
