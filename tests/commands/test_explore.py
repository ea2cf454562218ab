"""The commands that make pages for a browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_lines import FfnCommands
from conftest import make_sentences

import matlens
from matlens.explorer import explore


@pytest.fixture
def commands(model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> FfnCommands:
    return FfnCommands(model_folder, capsys)


def test_explore_writes_the_page_of_a_prompt(
    commands: FfnCommands, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    model = small_model("gpt2")
    samples = matlens.collect(
        model, matlens.make_examples(model, make_sentences()), positions="all", progress=False
    )
    maps = matlens.MapSet.fit(samples, pairs="last", progress=False)
    maps.save(tmp_path / "maps")
    page = tmp_path / "pages" / "page.html"
    options = ["--lens", tmp_path / "maps", "--out", page, "--pin", "w5", "--dominant", 4, "--read", "head"]
    printed = commands.run("explore", "w1 w2 w3", *options, model="gpt2")
    assert "3 tokens, 4 layers" in printed
    expected = explore(model, "w1 w2 w3", [maps], pins=["w5"], dominant=4, read="head", progress=False)
    name = expected.model  # the folder's, which the command writes as it was given
    assert page.read_text(encoding="utf-8") == expected.to_html(), name
    commands.run("explore", "w1 w2", "--out", page, model="gpt2")  # a page is written over


def test_what_cannot_be_explored_is_refused(commands: FfnCommands, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for options, message in (
        (["w1", "--out", tmp_path], "is a folder"),
        (["w1", "--out", page, "--lens", tmp_path / "none"], "holds no finished lens"),
        (["w1", "--out", page, "--pin", "nobody"], "not in the model's vocabulary"),
        (["w1", "--out", page, "--read", "norm"], "norm"),
    ):
        assert message in commands.run("explore", *options, model="gpt2", code=2)
    assert not page.exists()
