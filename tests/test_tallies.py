"""Tables of benchmarks are written between the marks of a page."""

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
