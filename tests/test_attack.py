"""The attack of `benchmarks/attack` tries every public name and every command."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import matlens

BENCHMARKS = Path(matlens.__file__).parents[1] / "benchmarks"


@pytest.fixture
def attack(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("attack.targets")


def test_every_public_name_is_tried_or_excused_with_a_reason(
    attack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(attack.untried()) == []
    for name, reason in attack.EXEMPT.items():
        value: Any = matlens
        for part in name.split("."):
            value = getattr(value, part)
        assert callable(value)
        assert reason
    rest = [target for target in attack.TARGETS if target.name != "lens.read_cells"]
    monkeypatch.setattr(attack, "TARGETS", rest)
    assert list(attack.untried()) == ["lens.read_cells"], "it does not see what is not tried"


def test_every_command_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    commands = importlib.import_module("attack.commands")
    assert list(commands.untried_commands()) == []
    monkeypatch.setattr(commands, "COMMANDS", commands.COMMANDS[1:])
    assert list(commands.untried_commands()) == ["matlens run"]
