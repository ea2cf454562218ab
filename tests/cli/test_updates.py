"""The command that takes apart what FFNs write for a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_lines import FfnCommands, cells
from conftest import N_LAYERS

from matlens import make_prompts
from matlens.ffn.projection import Projection
from matlens.ffn.updates import Updates, dominant_table


@pytest.fixture
def commands(model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> FfnCommands:
    return FfnCommands(model_folder, capsys)


def test_help_names_the_options(commands: FfnCommands) -> None:
    commands.assert_help("update")


@pytest.mark.parametrize(
    ("name", "prompt"), [("gpt2", "w1 w2 w3"), ("llama", "w4"), ("bert", "w1 [MASK] w3")]
)
def test_update_has_a_line_for_each_layer(
    name: str,
    prompt: str,
    commands: FfnCommands,
    small_model: Callable[[str], Any],
) -> None:
    model = small_model(name)
    printed = commands.run("update", prompt, "--tokens", 2, model=name)
    updates = Updates.run(model, make_prompts(model, [prompt]), progress=False)
    expected = dominant_table(updates, Projection.from_model(model), n_tokens=2)
    assert [int(row[0]) for row in cells(printed)] == list(range(N_LAYERS))
    for layer, row in enumerate(cells(printed)):
        part = expected[expected["layer"] == layer]
        assert row[1] == f"{part['share'].sum():.1%}"
        assert row[2] == part["value"].iloc[0]
        assert row[5] == part["promoted"].iloc[0]
    assert prompt.replace("[", "").split()[0] in printed


def test_update_shows_the_sub_updates_of_a_layer_at_a_position(
    commands: FfnCommands, small_model: Callable[[str], Any]
) -> None:
    model = small_model("gpt2")
    given = ["--layer", -1, "--layer", 0, "--dominant", 4, "--position", -3]
    printed = commands.run("update", "w1 w2 w3 w4 w5", *given, model="gpt2")
    # A decoder's third token knows nothing of those after it.
    updates = Updates.run(model, make_prompts(model, ["w1 w2 w3"]), [0, 2], progress=False)
    expected = dominant_table(updates, Projection.from_model(model), k=4)
    assert [row[1] for row in cells(printed)] == expected["value"].tolist()
    assert [row[2] for row in cells(printed)] == [f"{value:.3f}" for value in expected["coefficient"]]
    assert [row[4] for row in cells(printed)] == expected["promoted"].tolist()
    assert "At token 2, 'w3', layer 2" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["update", ""], "The prompt '' cannot be read out"),
        (["update", "w1", "--layer", "3"], "Layer 3 is out of range: the FFNs of this model"),
        (["update", "w1", "--position", "1"], "Position 1 is out of range: the prompt has the tokens 0 to 0"),
        (["update", "w1", "--dominant", "129"], "129 sub-updates were asked for. Expected 1 to 128"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(
    arguments: list[str], message: str, commands: FfnCommands, tmp_path: Path
) -> None:
    commands.assert_refused(*arguments, message=message, folder=tmp_path)


@pytest.mark.parametrize("command", [("update", "w1")])
def test_models_that_cannot_be_read_are_told(
    command: tuple[str, ...], commands: FfnCommands, tmp_path: Path
) -> None:
    commands.assert_models_refused(*command, absent=tmp_path / "absent")
