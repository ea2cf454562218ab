"""Weights and tokenizers are those of the files, also from the cache; incomplete files are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import N_CTX, WORDS, assert_near, load_plain, make_tokenizer
from safetensors.torch import load_file, save_file

import matlens
from matlens import InputError
from matlens.io.cache import default_cache
from matlens.models import checkpoints

TEXT = " ".join(WORDS[3:15])


@pytest.fixture(scope="module")
def gguf_file(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama as a GGUF file in float32, with a byte-level tokenizer of a few words."""
    folder = model_folder("llama")
    weights, config = load_file(folder / "model.safetensors"), load_plain("llama", folder).config
    path = tmp_path_factory.mktemp("alone") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    characters = [chr(ord("a") + i) for i in range(26)] + [chr(ord("A") + i) for i in range(26)]
    tokens = ["<s>", "</s>", "Ġ", *characters, "th", "the", "Ġthe", "in", "er"]
    assert len(tokens) == config.vocab_size
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["t h", "th e", "Ġ the", "i n", "e r"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def turned(weight: torch.Tensor, heads: int) -> torch.Tensor:
        """Order the rows of queries and keys as llama.cpp does, which rotates neighbours."""
        half = weight.shape[0] // heads // 2
        return weight.view(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)

    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for i in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = weights[f"model.layers.{i}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if ours == "attn_q" else config.num_key_value_heads
                weight = turned(weight, heads)
            writer.add_tensor(f"blk.{i}.{ours}.weight", weight.numpy().astype(np.float32))
    for theirs, ours in {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    }.items():  # fmt: skip
        writer.add_tensor(f"{ours}.weight", weights[f"{theirs}.weight"].numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_TOKENS = ["the", "Ġ", "in"]


def test_a_gguf_file_gives_the_logits_of_the_weights_in_it_without_network(
    gguf_file: Path, plain_model: Callable[[str], Any], no_network: list[str]
) -> None:
    model = matlens.load(str(gguf_file), device="cpu")
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        assert_near(model(tokens, return_type="logits"), plain_model("llama")(tokens).logits)
    assert no_network == []
    assert not model.training
    assert model.tokenizer.convert_ids_to_tokens(model.tokenizer("the in")["input_ids"]) == GGUF_TOKENS
    matlens.Readout(model)


def test_a_corrupt_gguf_file_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    whole = gguf_file.read_bytes()
    path = tmp_path / "broken.gguf"
    for content in (whole[: len(whole) * 2 // 3], b"GGUF" + b"\x07" * 999):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"broken\.gguf.*could not be loaded"):
            matlens.load(str(path), device="cpu")


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_without_its_head_is_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
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
    "incomplete": (_drop_a_tensor, r"lack 1 tensors, model\.layers\.1\.mlp\.down_proj"),
    "no tokenizer": (lambda folder: [p.unlink() for p in folder.glob("*token*")], "(?si)loaded.*tokenizer"),
    "NaN": (_with_weight(float("nan")), r"not finite: model\.layers\.1\.mlp\.down_proj.* holds NaN"),
    "no layers": (_with_config(num_hidden_layers=0), r"says 0 layers\. Expected at least 1"),
    "a million layers": (_with_config(num_hidden_layers=10**6), "more than 1,000 layers.*MATLENS_MAX_LAYERS"),
    "fewer layers": (_with_config(num_hidden_layers=2), r"hold 9 tensors of blocks that its configuration"),
    "more layers": (_with_config(num_hidden_layers=4), r"weights lack 9 tensors, model\.layers\.3\."),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_a_damaged_folder_is_refused_for_its_true_cause(
    case: str, model_folder: Callable[[str], Path], tmp_path: Path, no_network: list[str]
) -> None:
    damage, cause = CAUSES[case]
    shutil.copytree(model_folder("llama"), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(InputError, match=cause) as caught:
        matlens.load(str(tmp_path / "model"), device="cpu")
    assert len(str(caught.value)) < 2000
    assert no_network == []


@pytest.fixture
def source(tmp_path: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file that stands for a model, with the precisions in which it was read."""
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    path, folder, dtypes = tmp_path / "model.gguf", model_folder("llama"), list[torch.dtype]()
    path.write_bytes(b"a model")

    def read(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        dtypes.append(dtype)
        return transformers.AutoTokenizer.from_pretrained(folder), load_plain("llama", folder, dtype=dtype)

    monkeypatch.setattr(checkpoints, "_dequantize", read)
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


def test_the_second_time_the_cache_is_read_unless_it_is_damaged(
    source: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, cache = source.read(source.path, torch.bfloat16), default_cache()
    source.dtypes.clear()
    for _ in range(2):
        assert_same(checkpoints.read_gguf(source.path, torch.bfloat16), plain)
        assert source.dtypes == [torch.float32]
    assert cache is not None
    (entry,) = cache.entries()
    weights = entry.folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.unlink()  # a model that is loaded still reads the old file
    weights.write_bytes(content)
    for _ in range(2):
        assert_same(checkpoints.read_gguf(source.path, torch.bfloat16), plain)
        assert len(source.dtypes) == 2
    assert "damaged and recomputed" in capsys.readouterr().err


def test_what_does_not_come_back_as_it_was_is_not_stored(
    source: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load, plain, cache = checkpoints._load, source.read(source.path, torch.float32), default_cache()

    def rounded(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        tokenizer, model = load(folder, dtype)
        next(model.parameters()).data[0, 0] += 1
        return tokenizer, model

    monkeypatch.setattr(checkpoints, "_load", rounded)
    for _ in range(2):
        assert_same(checkpoints.read_gguf(source.path, torch.float32), plain)
        assert "what is read back is not what was written" in capsys.readouterr().err
    assert cache is not None
    assert cache.entries() == []
