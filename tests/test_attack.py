"""The attack of `benchmarks/attack` tries every command, tells faults from refusals, and kills half-way."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from attack import commands
from attack.annotations import calls
from attack.arguments import TAKEN
from attack.cases import Case, Misread, Refused, Unnamed, judge
from attack.folders import MUTATIONS, kill
from attack.world import RECIPES

from matlens import InputError


def _fail(error: BaseException) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


def _loop() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("verdict", "run"),
    [
        ("clear", _fail(InputError("layer must be between 0 and 29, got 31."))),
        ("clear", _fail(Refused("layer must be between 0 and 29, got 31."))),
        ("unclear", _fail(InputError("No."))),
        ("unclear", _fail(Refused("x" * 3000))),
        ("unclear", _fail(Unnamed("h is not named"))),
        ("silent", lambda: 3.0),
        ("silent", lambda: None),
        ("silent", _fail(Misread("read otherwise: config.json"))),
        ("traceback", _fail(KeyError("method"))),
        ("hang", _loop),
    ],
)
def test_a_case_is_judged_by_what_comes_of_it(verdict: str, run: Callable[[], Any]) -> None:
    assert judge(Case("a fault", "a case", run), seconds=0.2).verdict == verdict


def test_what_is_taken_and_right_is_clear() -> None:
    assert judge(Case("a fault", "a case", lambda: 3.0, right=(3.0).__eq__)).verdict == "clear"
    assert judge(Case("a fault", "a case", lambda: 4.0, right=(3.0).__eq__)).verdict == "silent"


def test_every_command_has_what_it_needs() -> None:
    app: Any = typer.main.get_command(importlib.import_module("matlens.cli.app").app)
    found = dict(commands._commands_of(app, ()))
    assert len(found) > 25
    for words, command in found.items():
        for parameter in command.params:
            names = {f"{' '.join(words)} {parameter.name}", parameter.name}
            assert not parameter.required or names & set(commands.GOOD), f"{words}: {parameter.name}"


def test_what_the_attack_names_is_public() -> None:
    """A recipe for a parameter, or what may be taken, that nothing has any more is to be removed."""
    parameters = [f"{call.name}.{name}" for call in calls() for name in call.hints]
    qualified = [name for name in RECIPES if "." in name and not name.startswith("lens.")]
    assert [name for name in qualified if not any(each.endswith(f".{name}") for each in parameters)] == []
    taken = [name.replace("(", ".") for name in TAKEN]
    assert [name for name in taken if not any(name in each for each in parameters)] == []


def test_a_job_is_killed_after_a_share_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def job() -> None:
        folder.mkdir(exist_ok=True)
        for number in range(10):
            (folder / f"{number}.txt").write_text("done")

    kill(job, folder, share=0.5)
    assert len(list(folder.iterdir())) == 4
    assert (folder / "3.txt").read_text() == "done"


@pytest.mark.parametrize("way", MUTATIONS)
def test_every_mutation_changes_some_file(way: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"b": 2}')
    for seed in range(30):
        path, beside = tmp_path / f"{seed}" / "F32.json", tmp_path / f"{seed}" / "beside.json"
        path.parent.mkdir()
        path.write_text('{"F32": 1, "False": [2, 3], "shape": 5}')
        beside.write_text("{}")
        before = path.read_bytes()
        MUTATIONS[way](random.Random(seed), path, other)
        if not path.is_file() or path.read_bytes() != before:
            return
    pytest.fail(f"{way} changes nothing")
