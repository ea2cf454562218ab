"""The cache on the command line: used by short commands, shown and cleared."""

from __future__ import annotations

from typing import Any

import pytest
from command_lines import run_command


def test_short_commands_use_the_cache_which_is_shown_and_cleared(
    commands, model_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    assert "0 entries" in run_command(["cache", "show"], capsys).out
    words: list[list[Any]] = [["search", "w3", "--top-k", 5], ["show", "L1D3", "--read", "head"]]
    printed = [commands.run("values", *command, model="llama") for command in words]

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("the model is loaded, or top tokens are computed again")

    monkeypatch.setattr("matlens.ffn.catalogue.load", refuse)
    monkeypatch.setattr("matlens.ffn.projection.Projection.top_of_all", refuse)
    assert [commands.run("values", *command, model="llama") for command in words] == printed
    shown = run_command(["cache", "show"], capsys).out
    for part in ("2 entries", "top 5 tokens", model_folder("llama").name):
        assert part in shown
    assert "freed" in run_command(["cache", "clear"], capsys).out
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("MATLENS_CACHE", "off")
    assert "switched off" in run_command(["cache", "clear"], capsys).out
