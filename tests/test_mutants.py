"""Mutants are killed, live or time out, and tables of benchmarks are written into pages."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest

import matlens

BENCHMARKS = Path(matlens.__file__).parents[1] / "benchmarks"


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("mutants")


def _spin() -> int:
    while True:
        pass


@pytest.mark.parametrize(
    ("tests", "limit", "patience", "outcome"),
    [
        (lambda: 0, 60, 20, "lives"),
        (lambda: 1, 60, 20, "killed"),
        (lambda: time.sleep(60), 0.1, 2, "timeout"),
        (_spin, 0.5, 1000, "timeout"),
    ],
    ids=["passes", "fails", "sleeps for ever", "computes for ever"],
)
def test_tests_end_in_an_outcome(mutants, monkeypatch, tests, limit, patience, outcome):
    monkeypatch.setattr(mutants, "_tests_in_this_process", lambda *_: tests())
    monkeypatch.setattr(mutants, "_PATIENCE", patience)
    assert mutants.run_tests("metrics", "", [], limit)[0] == outcome


def test_the_limit_is_four_times_the_processor_time_of_the_module_as_it_is(mutants, monkeypatch, tmp_path):
    given = list[float]()

    def run_tests(module: str, source: str, tests: list[str], limit: float) -> tuple[str, float]:
        given.append(limit)
        return "lives" if source == mutants.path_of(module).read_text() else "killed", 25.0

    monkeypatch.setattr(mutants, "run_tests", run_tests)
    results = mutants.Results(tmp_path / "results.jsonl")
    drawn = mutants.draw("metrics", 2, 0)
    mutants.run_module("metrics", drawn, results, time.monotonic() + 60)
    assert given[1:] == [100.0, 100.0]
    assert [results.seconds("metrics", mutant) for mutant in drawn] == [25.0, 25.0]
    again = mutants.Results(tmp_path / "results.jsonl")
    assert [again.outcome("metrics", mutant) for mutant in drawn] == ["killed", "killed"]


def test_modules_and_their_tests_exist(mutants):
    for module in mutants.MORE_TESTS:
        assert mutants.path_of(module).is_file()
        tests = mutants.tests_of(module)
        assert tests, module
        assert all((mutants.ROOT / path).is_file() for path in tests), module


def test_named_faults_are_put_where_their_code_is(mutants, tmp_path):
    results = mutants.Results(tmp_path / "results.jsonl")
    for fault in mutants.NAMED:
        source = mutants.path_of(fault.module).read_text()
        mutant = mutants.faulty(fault, source)
        assert fault.module in mutants.MORE_TESTS
        assert source.splitlines()[mutant.line - 1] != mutant.source.splitlines()[mutant.line - 1]
        assert len(mutant.source) - len(source) == len(fault.after) - len(fault.before)
        assert fault.after in mutant.part
        results.add(fault.module, mutant, "killed", 1.0)
        assert results.outcome(fault.module, mutant) == "killed"
    assert len({fault.name for fault in mutants.NAMED}) == len(mutants.NAMED) == 11
    with pytest.raises(ValueError, match="0 times"):
        mutants.faulty(mutants.NAMED[0]._replace(before="no such code"), "x = 1")


def test_a_table_is_written_between_two_marks_and_nothing_else_is_touched(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    marked, page = importlib.import_module("marked"), tmp_path / "page.md"
    page.write_text("before\n<!-- races -->\nold\n<!-- races -->\nafter <!-- kills -->\n<!-- kills -->\n")
    for _ in range(2):
        lines = marked.table_lines([["command", "n", "races"], ["fit", "2", 1200], ["all", "", 1200]])
        marked.write_between(page, "races", "\n".join(lines))
        assert page.read_text() == (
            "before\n<!-- races -->\n| command | n | races |\n| --- | --- | --- |\n| fit | 2 | 1,200 |\n"
            "| **all** |  | **1,200** |\n<!-- races -->\nafter <!-- kills -->\n<!-- kills -->\n"
        )


def test_the_page_has_the_marks_of_every_table():
    page = (BENCHMARKS.parent / "docs" / "results" / "robustness.md").read_text()
    findings = page.split("## ")[0]
    for mark in ("attack", "campaign", "mutants"):
        first, table, _ = page.split(f"<!-- {mark} -->")
        assert table.startswith("\n| ")
        assert first
        total = table.strip().splitlines()[-1].split("**")
        assert total[1] == "all"
        assert total[3] in findings
