"""Weights and tokenizers are those of the files, also from the cache; incomplete files are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import load_plain, make_tokenizer
from safetensors.torch import load_file, save_file

import matlens
from matlens import InputError
from matlens.io.cache import default_cache
from matlens.models.families import gguf


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_without_its_head_is_refused(model_folder, tmp_path):
    """An encoder saved alone would get a head of random numbers."""
    load_plain("bert", model_folder("bert")).bert.save_pretrained(tmp_path)
    make_tokenizer(bert=True).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"cls\.predictions.*Expected a complete checkpoint"):
        matlens.load(str(tmp_path), device="cpu")


def _with_config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def _with_weight(value: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.1.mlp.down_proj.weight"][3, 4] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


CAUSES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (_truncate, "could not be loaded"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "could not be loaded"),
    "incomplete": (_drop_a_tensor, r"lack 1 tensors, including model\.layers\.1\.mlp\.down_proj"),
    "no tokenizer": (lambda folder: [p.unlink() for p in folder.glob("*token*")], "(?si)loaded.*tokenizer"),
    "NaN": (_with_weight(float("nan")), r"not finite, including model\.layers\.1\.mlp\.down_proj"),
    "a million layers": (_with_config(num_hidden_layers=10**6), "more than 1,000 layers.*MATLENS_MAX_LAYERS"),
    "fewer layers": (_with_config(num_hidden_layers=2), r"hold 9 tensors of blocks that its configuration"),
    "audio": (_with_config(model_type="hubert", architectures=["HubertModel"]), "could not be loaded"),
    "more layers": (_with_config(num_hidden_layers=4), r"lack 9 tensors, including model\.layers\.3\."),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_a_damaged_folder_is_refused_for_its_true_cause(case, model_folder, tmp_path, no_network):
    damage, cause = CAUSES[case]
    shutil.copytree(model_folder("llama"), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(InputError, match=cause) as caught:
        matlens.load(str(tmp_path / "model"), device="cpu")
    assert len(str(caught.value)) < 2000
    assert no_network == []


@pytest.fixture
def source(tmp_path, model_folder, monkeypatch):
    """A file that stands for a model, with the precisions in which it was read."""
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    path, folder, dtypes = tmp_path / "model.gguf", model_folder("llama"), list[torch.dtype]()
    path.write_bytes(b"a model")

    def read(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        dtypes.append(dtype)
        return transformers.AutoTokenizer.from_pretrained(folder), load_plain("llama", folder, dtype=dtype)

    monkeypatch.setattr(gguf, "_dequantize", read)
    return SimpleNamespace(path=path, read=read, dtypes=dtypes)


def assert_same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    (tokens, model), (plain_tokens, plain) = ours, theirs
    assert type(model) is type(plain)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert model.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(model.state_dict()[name], tensor), name
    assert tokens.get_vocab() == plain_tokens.get_vocab()
    text = "w1 w2 nothing w49"
    assert tokens(text)["input_ids"] == plain_tokens(text)["input_ids"]


def test_the_second_time_the_cache_is_read_unless_it_is_damaged(source, capsys):
    plain, cache = source.read(source.path, torch.bfloat16), default_cache()
    source.dtypes.clear()
    for _ in range(2):
        assert_same(gguf.read_gguf(source.path, torch.bfloat16), plain)
        assert source.dtypes == [torch.float32]
    assert cache is not None
    (entry,) = cache.entries()
    weights = entry.folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.unlink()  # a model that is loaded still reads the old file
    weights.write_bytes(content)
    for _ in range(2):
        assert_same(gguf.read_gguf(source.path, torch.bfloat16), plain)
        assert len(source.dtypes) == 2
    assert "damaged and recomputed" in capsys.readouterr().err


def test_what_does_not_come_back_as_it_was_is_not_stored(source, monkeypatch, capsys):
    load, plain, cache = gguf._load, source.read(source.path, torch.float32), default_cache()

    def rounded(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        tokenizer, model = load(folder, dtype)
        next(model.parameters()).data[0, 0] += 1
        return tokenizer, model

    monkeypatch.setattr(gguf, "_load", rounded)
    for _ in range(2):
        assert_same(gguf.read_gguf(source.path, torch.float32), plain)
        assert "what is read back is not what was written" in capsys.readouterr().err
    assert cache is not None
    assert cache.entries() == []
