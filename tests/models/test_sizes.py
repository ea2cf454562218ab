"""Sizes are those of the model that is built, and are not worked out twice."""

from __future__ import annotations

import json
import shutil
from unittest.mock import Mock

import pytest
from conftest import load_plain

from matlens.models import sizes
from matlens.models.sizes import read_sizes


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2-moe"])
def test_sizes_are_those_of_the_model_and_read_once(kind, model_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    read = Mock(wraps=sizes.read_configuration)
    monkeypatch.setattr(sizes, "read_configuration", read)
    plain, folder = load_plain(kind, model_folder(kind)), tmp_path / "model"
    shutil.copytree(model_folder(kind), folder)
    first = read_sizes(str(folder))
    assert first["n_parameters"] == sum(weight.numel() for weight in plain.parameters())
    assert (first["n_layers"], first["d_model"]) == (plain.config.num_hidden_layers, plain.config.hidden_size)
    d_mlp = {"llama": 48, "gpt2": 0, "qwen2-moe": 88}[kind]  # GPT-2 does not say it
    assert (first["d_vocab"], first["d_mlp"]) == (plain.config.vocab_size, d_mlp)
    assert read_sizes(str(folder)) == first
    assert read.call_count == 1
    assert read_sizes(str(folder), trust_remote_code=True) == first  # code that is not here may say otherwise
    assert read.call_count == 2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 77}))
    assert read_sizes(str(folder))["d_vocab"] == 77
