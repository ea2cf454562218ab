"""The cache on the command line: shown and cleared, and what short commands need it for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_lines import run_command

import matlens.models.loading


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_short_commands_build_a_model_once(
    cache: Path,
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ["--model", model_folder("llama"), "--device", "cpu"]
    clusters = ["values", "cluster", "L1D3", *model, "--clusters", 20, "--out", cache.parent / "out"]
    commands: list[list[Any]] = [
        ["values", "show", "L1D3", *model],
        ["values", "show", "L1D3", "--read", "head", *model],
        ["values", "search", "w3", "--top-k", 5, *model],
        ["values", "promoting", "w3", *model],
        clusters,
    ]
    first = [run_command(command, capsys) for command in commands]
    assert [outcome.code for outcome in first] == [0] * len(commands)

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("the model is loaded, or top tokens are worked out again")

    monkeypatch.setattr("matlens.ffn.catalogue.load", refuse)
    monkeypatch.setattr("matlens.ffn.projection.Projection.top_of_all", refuse)
    assert [run_command(command, capsys).out for command in commands] == [outcome.out for outcome in first]
    assert matlens.models.loading.load is not refuse


def test_the_cache_is_shown_and_cleared(
    cache: Path, model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder("gpt2")
    assert "0 entries" in run_command(["cache", "show"], capsys).out
    run_command(["values", "search", "w3", "--top-k", 5, "--model", folder, "--device", "cpu"], capsys)
    shown = run_command(["cache", "show"], capsys).out
    assert "2 entries" in shown
    assert "top 5 tokens" in shown
    assert folder.name in shown
    assert "freed" in run_command(["cache", "clear"], capsys).out
    assert not cache.exists()
    assert "0 entries" in run_command(["cache", "show"], capsys).out
