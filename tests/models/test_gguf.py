"""Models that are kept: what is read back is what was read, or it is read anew."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import load_plain

from matlens.io.entries import default_cache
from matlens.models import gguf
from matlens.models.gguf import kept_configuration, read_kept


class Source:
    """A file that stands for a model, and how often it was read."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder, self.dtypes = path, folder, list[torch.dtype]()
        path.write_bytes(b"a model")

    def read(self, path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        assert path == self.path
        self.dtypes.append(dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        return tokenizer, load_plain("llama", self.folder, dtype=dtype)

    def kept(self, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        return read_kept(self.path, dtype, self.read)


@pytest.fixture
def source(tmp_path: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    return Source(tmp_path / "model.gguf", model_folder("llama"))


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
    with torch.inference_mode():
        inputs = torch.tensor([tokens(text)["input_ids"]])
        assert torch.equal(model(inputs).logits, plain(inputs).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_time_the_file_is_not_read(dtype: torch.dtype, source: Source) -> None:
    plain = source.read(source.path, dtype)
    source.dtypes.clear()
    assert_same(source.kept(dtype), plain)
    assert source.dtypes == [torch.float32]
    assert_same(source.kept(dtype), plain)
    assert source.dtypes == [torch.float32]


def test_the_configuration_of_a_kept_model_is_known(source: Source) -> None:
    assert kept_configuration(source.path) is None
    _, model = source.kept()
    config = kept_configuration(source.path)
    plain = {key: value for key, value in model.config.to_dict().items() if key not in gguf._ORIGIN}
    assert {key: config.to_dict()[key] for key in plain} == plain
    source.path.write_bytes(b"another model")
    assert kept_configuration(source.path) is None


def test_a_switched_off_cache_keeps_nothing(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATLENS_CACHE", "off")
    for _ in range(2):
        source.kept()
    assert len(source.dtypes) == 2
    assert not (tmp_path / "cache").exists()


def test_another_content_is_another_model(source: Source) -> None:
    source.kept()
    source.path.write_bytes(b"another")
    source.kept()
    assert len(source.dtypes) == 2


def test_damage_is_noticed_and_mended(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    plain = source.kept()
    cache = default_cache()
    assert cache is not None
    (entry,) = cache.entries()
    weights = entry.folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.unlink()  # the model that is loaded still reads the old file
    weights.write_bytes(content)
    assert_same(source.kept(), plain)
    assert "damaged and recomputed" in capsys.readouterr().err
    assert len(source.dtypes) == 2
    source.kept()
    assert len(source.dtypes) == 2


@pytest.mark.parametrize("room", [200, 20_000])
def test_a_disk_without_room_keeps_nothing_and_the_model_is_read(
    room: int, source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = source.read(source.path, torch.bfloat16)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
        made = source.kept(torch.bfloat16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        signal.signal(signal.SIGXFSZ, before)
    assert_same(made, plain)
    cache = default_cache()
    assert cache is not None
    assert f"Nothing is kept in the cache {cache.root}: File too large." in capsys.readouterr().err
    assert cache.entries() == []
    assert_same(source.kept(), source.kept())
    assert len(cache.entries()) == 1


def test_what_does_not_come_back_as_it_was_is_not_kept(
    source: Source, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = gguf._load

    def rounded(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        tokenizer, model = load(folder, dtype)
        next(model.parameters()).data[0, 0] += 1
        return tokenizer, model

    plain = source.read(source.path, torch.float32)

    def unreadable(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        raise ValueError("a model that transformers cannot read back")

    reasons = ("what is read back is not what was written", "ValueError: a model that transformers cannot")
    for reader, reason in zip((rounded, unreadable), reasons, strict=True):
        monkeypatch.setattr(gguf, "_load", reader)
        for _ in range(2):
            assert_same(source.kept(), plain)
            said = capsys.readouterr().err
            assert f"Nothing is kept of {source.path.name}" in said
            assert reason in said
        cache = default_cache()
        assert cache is not None
        assert cache.entries() == []
