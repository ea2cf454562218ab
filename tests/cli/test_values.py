"""Value vectors shown and searched: what is printed, and what is said of input that cannot be used."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_lines import FfnCommands, cells

from matlens.ffn.projection import (
    Projection,
    token_table,
    top_tokens_of_all,
    values_promoting,
    values_with_tokens,
)
from matlens.ffn.values import ValueVectors


@pytest.fixture
def commands(model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> FfnCommands:
    return FfnCommands(model_folder, capsys)


@pytest.mark.parametrize("command", ["show", "search", "promoting"])
def test_help_names_the_options(command: str, commands: FfnCommands) -> None:
    commands.assert_help("values", command)


@pytest.mark.parametrize("read", ["plain", "norm", "head"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_show_prints_both_ends_of_each_vector(
    name: str,
    read: str,
    commands: FfnCommands,
    small_model: Callable[[str], Any],
) -> None:
    model = small_model(name)
    printed = commands.run("values", "show", "L1D7", "L-1D0", "--tokens", 4, "--read", read, model=name)
    made = {"plain": Projection.from_model, "norm": Projection.after_norm, "head": Projection.through_head}
    projection = made[read](model)
    expected = token_table(ValueVectors(model), projection, ["L1D7", "L2D0"], k=4)
    rows = []
    for _, scores in expected.groupby("value", sort=False):
        sides = (scores[scores["side"] == side].itertuples() for side in ("top", "bottom"))
        for up, down in zip(*sides, strict=True):
            rows.append([str(up.rank), up.token, f"{up.score:.3f}", down.token, f"{down.score:.3f}"])
    assert cells(printed) == rows
    assert re.findall(r"^(L\d+D\d+)", printed, re.MULTILINE) == ["L1D7", "L2D0"]


def test_search_prints_what_has_the_words_and_how_many_there_are(
    commands: FfnCommands, small_model: Callable[[str], Any]
) -> None:
    model = small_model("gpt2")
    values, projection = ValueVectors(model), Projection.from_model(model)
    among = ["--among", 6, "--limit", 5, "--tokens", 2]
    printed = commands.run("values", "search", "w7", "w30", *among, model="gpt2")
    expected = values_with_tokens(
        values, projection, top_tokens_of_all(values, projection, k=6), ["w7", "w30"]
    )
    assert [row[0] for row in cells(printed)] == expected["value"].tolist()[:5]
    assert [row[1:3] for row in cells(printed)] == expected[["words", "rank"]].astype(str).values.tolist()[:5]
    assert f"{len(expected)} of {len(values)} value vectors" in printed
    assert all(len(row[-1].split(", ")) == 2 for row in cells(printed))


def test_a_search_that_finds_nothing_says_so(commands: FfnCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matlens.ffn.projection.values_with_tokens", lambda *_: pd.DataFrame({"value": []}))
    printed = commands.run("values", "search", "w7", "--among", 3, model="gpt2")
    assert "No value vector has w7 among its 3 top tokens" in printed


def test_promoting_prints_those_that_raise_the_words_most(
    commands: FfnCommands, small_model: Callable[[str], Any]
) -> None:
    model = small_model("llama")
    printed = commands.run("values", "promoting", "w7", "w9", "--limit", 3, model="llama")
    expected = values_promoting(
        ValueVectors(model), Projection.from_model(model), ["w7", "w9"], n=3, progress=False
    )
    wanted = [[row.value, f"{row.score:.3f}", f"{row.lift:.3f}"] for row in expected.itertuples()]
    assert [row[:3] for row in cells(printed)] == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["values", "show", "3D4"], "'3D4' is not a value vector. Expected L{layer}D{index}"),
        (["values", "show", "L3D0"], "Layer 3 is out of range: the FFNs of this model are in the"),
        (["values", "show", "L0D128"], "Index 128 of L0D128 is out of range"),
        (["values", "show", "L0D1", "--tokens", "61"], "tokens must be an integer from 1 to 60, got 61"),
        (["values", "search", "w1 w2"], "The word 'w1 w2' is 2 tokens: 'w1', 'w2'"),
        (["values", "promoting", "tea"], "The word 'tea' is not in the model's vocabulary"),
        (["values", "show", "L0D1", "--read", "other"], "Invalid value for '--read'"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(
    arguments: list[str], message: str, commands: FfnCommands, tmp_path: Path
) -> None:
    commands.assert_refused(*arguments, message=message, folder=tmp_path)


@pytest.mark.parametrize("command", [("values", "show", "L0D1"), ("values", "search", "w1")])
def test_models_that_cannot_be_read_are_told(
    command: tuple[str, ...], commands: FfnCommands, tmp_path: Path
) -> None:
    commands.assert_models_refused(*command, absent=tmp_path / "absent")
