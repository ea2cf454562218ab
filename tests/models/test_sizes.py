"""Sizes are those of the model that is built, and are not worked out twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import load_plain

from matlens.io.cache import default_cache
from matlens.models import sizes
from matlens.models.sizes import SIZES, read_sizes


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of models whose configurations were read."""
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    names: list[str] = []
    read = sizes.read_configuration

    def counting(folder: str, **options: Any) -> Any:
        names.append(folder)
        return read(folder, **options)

    monkeypatch.setattr(sizes, "read_configuration", counting)
    return names


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sizes_are_read_once(kind: str, model_folder: Callable[[str], Path], reads: list[str]) -> None:
    folder = model_folder(kind)
    plain = load_plain(kind, folder)
    first = read_sizes(str(folder))
    assert first["n_parameters"] == sum(weight.numel() for weight in plain.parameters())
    assert (first["n_layers"], first["d_model"]) == (plain.config.num_hidden_layers, plain.config.hidden_size)
    assert first["d_vocab"] == plain.config.vocab_size
    assert read_sizes(str(folder)) == first
    assert len(reads) == 1
    assert read_sizes(str(folder), trust_remote_code=True) == first  # code that is not here may say otherwise
    assert len(reads) == 2


def test_another_configuration_and_a_damaged_entry_are_read_anew(
    model_folder: Callable[[str], Path], reads: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    first = read_sizes(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    assert read_sizes(str(folder))["n_layers"] == 7 != first["n_layers"]
    cache = default_cache()
    assert cache is not None
    entries = [entry for entry in cache.entries() if entry.kind == SIZES]
    assert len(entries) == 2
    for entry in entries:
        (entry.folder / "sizes.json").write_text("{}")
    assert read_sizes(str(folder))["n_layers"] == 7
    assert len(reads) == 3
