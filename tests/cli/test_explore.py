"""The commands that make pages for a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_lines import FfnCommands
from conftest import make_sentences

import matlens
from matlens.explorer import explore, write_value_pages


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
        (["w1", "--out", tmp_path / "page.pdf"], ".html or .htm"),
        (["w1", "--out", page, "--lens", tmp_path / "none"], "must be a folder of lens"),
        (["w1", "--out", page, "--pin", "nobody"], "not in the model's vocabulary"),
        (["w1", "--out", page, "--read", "norm"], "norm"),
    ):
        assert message in commands.run("explore", *options, model="gpt2", code=2)
    assert not list(tmp_path.glob("page.*"))


def test_value_pages_are_those_of_the_library(
    commands: FfnCommands, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("\n".join(make_sentences().sentences[:9]))
    printed = commands.run(
        "values", "explore", "--out", tmp_path / "pages", "--corpus", tmp_path / "words.txt",
        "--sentences", 5, "--neighbours", 2, model="gpt2",
    )  # fmt: skip
    assert "pages/index.html" in printed.replace("\n", "")
    corpus, _ = matlens.load_corpus(tmp_path / "words.txt").split(n_train=5, n_validation=2)
    model = small_model("gpt2")
    write_value_pages(model, tmp_path / "same", corpus=corpus, neighbours=2, progress=False)
    names = {path.name for path in (tmp_path / "pages").iterdir()} - {"config.json"}
    assert len(names) > 6
    for name in names:
        assert (tmp_path / "pages" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    assert "is a folder" not in commands.run("values", "explore", "--out", tmp_path, model="gpt2", code=2)


def test_serve_prints_an_address_with_a_secret_and_listens_on_this_machine_alone(
    commands: FfnCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("uvicorn.run", lambda application, **options: calls.append(options))
    printed = commands.run("serve", "--port", 9876, model="gpt2")
    assert re.search(r"http://127\.0\.0\.1:9876/[\w-]{32}/", printed)
    assert (calls[0]["host"], calls[0]["port"]) == ("127.0.0.1", 9876)
    monkeypatch.setattr("matlens.explorer.server.find_spec", lambda name: None)
    assert "pip install" in commands.run("serve", model="gpt2", code=2)
