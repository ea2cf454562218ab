"""The commands `matlens prune` and `matlens linearity`."""

from __future__ import annotations

import json
from typing import get_args

import numpy as np
import pytest
import transformers
from command_lines import run_command
from conftest import WORDS

from matlens import pruning
from matlens.cli import parts
from matlens.linearity import atlas_seconds


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    generator = np.random.default_rng(4)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(" ".join(generator.choice(WORDS, 20)) for _ in range(80)))
    return path


def test_options_offer_what_the_library_does():
    """The command line has copies of the names, since --help is shown without importing torch."""
    assert get_args(parts.Method) == get_args(pruning.Method)
    assert get_args(parts.Choice) == get_args(pruning.Choice)


def test_a_folder_is_written_that_transformers_loads(corpus, model_folder, tmp_path, capsys):
    asked = [
        "prune", "--model", model_folder("llama"), "--device", "cpu", "--corpus", corpus, "--blocks", "1",
        "--window", "24", "--heal", "48", "--out", tmp_path / "pruned",
    ]  # fmt: skip
    outcome = run_command(asked, capsys)
    assert outcome.code == 0, outcome.err
    for part in ("agreement", "seconds ratio", "s per token", "kB per token", "Healed on 1,008 tokens"):
        assert part in outcome.out
    assert "with the method `chain` (penalty 0.3)" in (tmp_path / "pruned" / "README.md").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pruned")
    assert loaded.config.num_hidden_layers == 2
    again = run_command(asked, capsys)
    assert again.code == 2
    assert "must be a new or empty folder" in " ".join(again.err.split())


def test_an_atlas_is_written_and_drawn(corpus, model_folder, tmp_path, capsys):
    asked = [
        "linearity", "--model", model_folder("llama"), "--device", "cpu", "--corpus", corpus,
        "--window", "20",
        "--windows", "20", "--eval-windows", "4", "--out", tmp_path,
    ]  # fmt: skip
    outcome = run_command(asked, capsys)
    assert outcome.code == 0, outcome.err
    assert "Rank correlation" in outcome.out
    assert "Parts replaced together" in outcome.out
    assert {path.name for path in tmp_path.iterdir()} == {
        "atlas", "linearity.csv", "linearity.json", "linearity.png", "linearity.pdf",
        "linearity_correlations.csv", "linearity_correlations.json",
    }  # fmt: skip
    origin = json.loads((tmp_path / "linearity.json").read_text())
    assert origin["atlas_seconds"] == atlas_seconds(tmp_path / "atlas")
    few = run_command([*asked[:-1], tmp_path / "few", "--windows", "2", "--window", "12"], capsys)
    assert few.code == 2
    assert "must have more than 32 tokens" in " ".join(few.err.split())
    assert not (tmp_path / "few").exists() or not list((tmp_path / "few").glob("*.csv"))


def test_attention_is_removed(corpus, model_folder, tmp_path, capsys):
    asked = [
        "prune", "--model", model_folder("llama"), "--device", "cpu", "--corpus", corpus, "--window", "24",
        "--out", tmp_path / "fewer",
    ]  # fmt: skip
    assert run_command([*asked, "--attention", "1", "--blocks", "1"], capsys).code == 2
    outcome = run_command([*asked, "--attention", "1"], capsys)
    assert outcome.code == 0, outcome.err
    assert "Without the attention of the blocks" in outcome.out
    assert "with the method `refit` (penalty 0.1)" in (tmp_path / "fewer" / "README.md").read_text()
