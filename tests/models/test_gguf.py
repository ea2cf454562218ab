"""A GGUF file gives the model that it was made from, or InputError for what transformers cannot represent."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import assert_near
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

import matlens
from matlens import InputError
from matlens.models.families.gguf import read_gguf

KIND = gguf.GGUFValueType
CONTEXT, EPSILON, THETA = 64, 0.01, 300.0
SIZES = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": CONTEXT,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
IDS = torch.arange(3, 63)[None]
FREQUENCIES = np.linspace(1, 6, 4).astype(np.float32)
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}


def rope(kind: str = "default", **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": THETA, **settings}


LONGROPE = rope(
    "longrope", short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 3.0, 4.0], attention_factor=1.25,
    original_max_position_embeddings=16, partial_rotary_factor=0.75, factor=4.0,
)  # fmt: skip
NORM = "attention.layer_norm_rms_epsilon"
LAYER_NORM = "attention.layer_norm_epsilon"


class Case(NamedTuple):
    """A model, the architecture of its file, and the keys and tensors that llama.cpp writes for it."""

    config: transformers.PretrainedConfig
    architecture: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, Any] = {}


CASES = {
    "llama": Case(
        transformers.LlamaConfig(**SIZES, rms_norm_eps=EPSILON, rope_parameters=rope()), "llama", {}
    ),
    "llama, linear": Case(
        transformers.LlamaConfig(**SIZES, rms_norm_eps=EPSILON, rope_parameters=rope("linear", factor=4.0)),
        "llama",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama, linear in an old file": Case(
        transformers.LlamaConfig(**SIZES, rms_norm_eps=EPSILON, rope_parameters=rope("linear", factor=4.0)),
        "llama",
        {"rope.scale_linear": 4.0},
    ),
    "llama, a factor that is off": Case(
        transformers.LlamaConfig(**SIZES, rms_norm_eps=EPSILON, rope_parameters=rope()),
        "llama",
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    ),
    "llama, llama3": Case(
        transformers.LlamaConfig(
            **SIZES, rms_norm_eps=EPSILON,
            rope_parameters=rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=32),
        ),
        "llama", {}, {"rope_freqs.weight": "from the model"},
    ),
    "qwen2, yarn": Case(
        transformers.Qwen2Config(
            **SIZES, rms_norm_eps=EPSILON,
            rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16),
        ),
        "qwen2",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    ),
    "qwen3": Case(
        transformers.Qwen3Config(**SIZES, head_dim=16, rms_norm_eps=EPSILON, rope_parameters=rope()), "qwen3",
        {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16},
    ),
    "phi3, longrope on a part of each head": Case(
        transformers.Phi3Config(
            **SIZES, rms_norm_eps=EPSILON, sliding_window=24, rope_parameters=LONGROPE,
            original_max_position_embeddings=16,
        ),
        "phi3",
        {"rope.dimension_count": 6, "rope.scaling.original_context_length": 16,
         "rope.scaling.attn_factor": 1.25, "attention.sliding_window": 24},
        {f"rope_factors_{name}.weight": np.array(LONGROPE[f"{name}_factor"], np.float32)
         for name in ("short", "long")},
    ),
    "gemma2": Case(
        transformers.Gemma2Config(
            **SIZES | {"tie_word_embeddings": True}, head_dim=8, rms_norm_eps=EPSILON, sliding_window=20,
            query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=0.5,
            rope_parameters=rope(),
        ),
        "gemma2",
        {"attention.key_length": 8, "attention.value_length": 8, "attention.sliding_window": 20,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.5},
    ),
    "gemma3, linear": Case(
        transformers.Gemma3TextConfig(
            **SIZES | {"tie_word_embeddings": True, "num_hidden_layers": 6}, head_dim=8, rms_norm_eps=EPSILON,
            sliding_window=20, query_pre_attn_scalar=8,
            rope_parameters={"full_attention": rope("linear", factor=8.0), "sliding_attention": LOCAL},
        ),
        "gemma3",
        {"attention.key_length": 8, "attention.value_length": 8, "attention.sliding_window": 20,
         "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "stablelm": Case(
        transformers.StableLmConfig(
            **SIZES, layer_norm_eps=EPSILON, rope_parameters=rope(partial_rotary_factor=0.5)
        ),
        "stablelm", {"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "starcoder2": Case(
        transformers.Starcoder2Config(**SIZES, norm_epsilon=EPSILON, rope_parameters=rope()), "starcoder2", {}
    ),
    "nemotron": Case(
        transformers.NemotronConfig(
            **SIZES, head_dim=8, norm_eps=EPSILON, rope_parameters=rope(partial_rotary_factor=0.75)
        ),
        "nemotron", {"rope.dimension_count": 6},
    ),
    "falcon": Case(
        transformers.FalconConfig(
            **SIZES | {"tie_word_embeddings": True}, ffn_hidden_size=48, multi_query=True,
            layer_norm_epsilon=EPSILON, rope_parameters=rope(),
        ),
        "falcon", {"attention.head_count_kv": 1, "tensor_data_layout": "jploski"},
    ),
    "qwen2moe": Case(
        transformers.Qwen2MoeConfig(
            **SIZES, rms_norm_eps=EPSILON, rope_parameters=rope(), num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=24, shared_expert_intermediate_size=40,
        ),
        "qwen2moe",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24,
         "expert_shared_feed_forward_length": 40},
    ),
    "gpt2": Case(
        transformers.GPT2Config(
            vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, bos_token_id=1,
            eos_token_id=2, layer_norm_epsilon=EPSILON,
        ),
        "gpt2", {},
    ),
}  # fmt: skip


def random_model(config: transformers.PretrainedConfig) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights large enough that attention is sharp, and that every setting shows.
            parameter.add_((0.3 if parameter.ndim == 1 else 0.15) * torch.randn_like(parameter))
    return model


def written(name: str, weight: Tensor, case: Case) -> np.ndarray:
    """A tensor as llama.cpp's converter writes it."""
    if case.architecture == "llama" and ("attn_q." in name or "attn_k." in name):
        heads = case.config.num_attention_heads if "attn_q." in name else case.config.num_key_value_heads
        weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
    if (case.architecture.startswith("gemma") or case.architecture == "nemotron") and "norm.weight" in name:
        weight = weight + 1
    if case.architecture == "gpt2" and name.startswith("blk") and weight.ndim == 2:
        weight = weight.T
    return weight.squeeze().contiguous().numpy()


def write(path: Path, model: Any, case: Case, **more: Any) -> Path:
    """A GGUF file of a model; ``more`` has further keys and tensors, those with None are left out."""
    config, writer = case.config, gguf.GGUFWriter(str(path), case.architecture)
    heads = config.num_attention_heads
    keys = {
        "context_length": CONTEXT, "embedding_length": 32, "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 128), "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads), "vocab_size": 256,
        NORM if "rms_norm_eps" in vars(config) else LAYER_NORM: EPSILON,
    }  # fmt: skip
    if case.architecture != "gpt2":
        keys |= {"rope.freq_base": THETA, "rope.dimension_count": 8}
    tensors: dict[str, np.ndarray] = {}
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture),
        config.num_hidden_layers,
    )
    for name, weight in model.state_dict().items():
        if "experts.gate_up_proj" in name:
            block = name.split(".")[2]
            for part, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                tensors[f"blk.{block}.ffn_{part}_exps.weight"] = half.contiguous().numpy()
            continue
        if "experts.down_proj" in name:
            tensors[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = weight.numpy()
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is not None and not (known == "output.weight" and config.tie_word_embeddings):
            tensors[known] = written(known, weight, case)
    for name, value in (keys | dict(case.keys) | more.get("keys", {})).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        if value is not None:
            add.get(type(value), writer.add_float32)(f"{case.architecture}.{name}", value)
    if "space_prefix" in more:
        bytes_ = [f"<0x{byte:02X}>" for byte in range(240)]
        writer.add_string("tokenizer.ggml.model", "llama")
        writer.add_array("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "▁", *"abcdefghijkl", *bytes_])
        writer.add_array("tokenizer.ggml.scores", [0.0] * 256)
        writer.add_bool("tokenizer.ggml.add_space_prefix", more["space_prefix"])
    else:
        writer.add_string("tokenizer.ggml.model", "gpt2")
        writer.add_array("tokenizer.ggml.tokens", [*[*bytes_to_unicode().values()][:-3], "he", "1.", "ĊĊ"])
        writer.add_array("tokenizer.ggml.merges", ["h e", "1 .", "Ċ Ċ"])
        if "splits" in more:
            writer.add_string("tokenizer.ggml.pre", more["splits"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.padding_token_id", 0)
    for name, values in (tensors | dict(case.tensors) | more.get("tensors", {})).items():
        if name == "rope_freqs.weight" and isinstance(values, str):
            plain = THETA ** -(np.arange(4) / 4)
            values = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_model_it_was_made_from(name, tmp_path, monkeypatch):
    """The second time too, when the model is read from the cache, and for texts of every length."""
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    case = CASES[name]
    plain = random_model(case.config)
    path = write(tmp_path / "model.gguf", plain, case)
    for _ in range(2):
        _, model = read_gguf(path, torch.float32)
        model.set_attn_implementation("eager")
        for ids in (IDS, IDS[:, :12]):
            assert_near(logits(model, ids), logits(plain, ids), 2e-5)


def test_rotary_factors_divide_the_frequencies(tmp_path):
    case, factors = CASES["llama"], FREQUENCIES
    plain = random_model(case.config)
    path = write(
        tmp_path / "model.gguf", plain, case,
        tensors={"rope_freqs.weight": factors}, keys={"rope.scaling.factor": 2.0},
    )  # fmt: skip
    before = logits(plain)
    plain.model.rotary_emb.inv_freq /= 2 * torch.from_numpy(factors)
    assert not torch.allclose(before, logits(plain), atol=1e-2)
    assert_near(logits(read_gguf(path, torch.float32)[1]), logits(plain), 2e-5)


def test_a_missing_key_has_the_default_of_llama_cpp(tmp_path):
    case = CASES["llama"]
    absent = dict.fromkeys(("rope.freq_base", "rope.dimension_count", "vocab_size"))
    path = write(tmp_path / "model.gguf", random_model(case.config), case, keys=absent)
    plain = random_model(transformers.LlamaConfig(**SIZES, rms_norm_eps=EPSILON, rope_parameters=LOCAL))
    assert_near(logits(read_gguf(path, torch.float32)[1]), logits(plain), 2e-5)


NEUTRAL = {"attention.clamp_kqv": 0.0, "logit_scale": 1.0, "expert_count": 0, "attention.causal": True}
UNKNOWN = {
    "residual_scale": 0.5, "embedding_scale": 12.0, "logit_scale": 0.25, "attention.clamp_kqv": 8.0,
    "attention.scale": 0.5, "attention.sliding_window": 16, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "expert_count": 4, "attention.max_alibi_bias": 8.0,
    "rope.dimension_count": 6, "attention.value_length": 16, "rope.scaling.type": "su",
    "rope.scaling.yarn_log_multiplier": 0.1, "attention.causal": False, "a_setting_of_tomorrow": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("key", UNKNOWN)
def test_a_key_that_transformers_cannot_represent_is_named(key, tmp_path):
    case = CASES["llama"]
    more = {"attention.key_length": 8} | {key: UNKNOWN[key]}
    path = write(tmp_path / "model.gguf", random_model(case.config), case, keys=more)
    with pytest.raises(InputError, match=key.rpartition(".")[2]):
        read_gguf(path, torch.float32)


def test_keys_that_change_nothing_are_accepted(tmp_path):
    case = CASES["llama"]
    plain = random_model(case.config)
    path = write(tmp_path / "model.gguf", plain, case, keys=NEUTRAL)
    assert_near(logits(read_gguf(path, torch.float32)[1]), logits(plain), 2e-5)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.attn_q_norm.weight", "blk.0.ffn_up.bias", "x"])
def test_a_tensor_that_would_be_left_out_is_named(name, tmp_path):
    case = CASES["llama"]
    values = np.ones(48 if "ffn" in name else 32, np.float32)
    path = write(tmp_path / "model.gguf", random_model(case.config), case, tensors={name: values})
    with pytest.raises(InputError, match=name):
        read_gguf(path, torch.float32)


@pytest.mark.parametrize("absent", ["rope_factors_short.weight", "rope_factors_long.weight"])
def test_half_of_the_rotary_factors_raises(absent, tmp_path):
    case = CASES["phi3, longrope on a part of each head"]
    half = case._replace(tensors={name: values for name, values in case.tensors.items() if name != absent})
    path = write(tmp_path / "model.gguf", random_model(case.config), half)
    with pytest.raises(InputError, match="rope_factors"):
        read_gguf(path, torch.float32)


def test_a_space_before_the_first_word_is_that_of_the_file(tmp_path):
    case = CASES["llama"]
    spaced, plain = (
        write(tmp_path / f"{prefix}.gguf", random_model(case.config), case, space_prefix=prefix)
        for prefix in (True, False)
    )
    assert read_gguf(spaced, torch.float32)[0].tokenize("a") == ["▁", "a"]
    with pytest.raises(InputError, match="add_space_prefix"):
        read_gguf(plain, torch.float32)


def test_texts_are_split_as_the_file_says(tmp_path):
    case, path = CASES["llama"], tmp_path / "model.gguf"
    for splits, expected in (("gpt-2", ["he", "Ċ", "Ċ", "1"]), ("smollm", ["he", "ĊĊ", "1"])):
        write(path, random_model(case.config), case, splits=splits)
        assert matlens.load(path).tokenizer.tokenize("he\n\n1") == expected
    write(path, random_model(case.config), case, splits="falcon")
    with pytest.raises(InputError, match="falcon"):
        read_gguf(path, torch.float32)


def test_zero_switches_a_cap_off(tmp_path):
    case = CASES["gemma2"]
    keys = {"final_logit_softcapping": 0.0, "attn_logit_softcapping": 0.0}
    path = write(tmp_path / "model.gguf", random_model(case.config), case, keys=keys)
    config = deepcopy(case.config)
    config.final_logit_softcapping = config.attn_logit_softcapping = None
    model = read_gguf(path, torch.float32)[1]
    model.set_attn_implementation("eager")
    assert_near(logits(model), logits(random_model(config)), 2e-5)


@pytest.mark.parametrize(("blocks", "scalar"), [(2, 8), (46, 16)])
def test_gemma2_scales_queries_as_llama_cpp_does(blocks, scalar, tmp_path):
    """By the size of a head, in the model of 46 blocks by the width over the heads."""
    case = CASES["gemma2"]
    config = deepcopy(case.config)
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = blocks, 2, 1
    config.layer_types = transformers.Gemma2Config(num_hidden_layers=blocks).layer_types
    path = write(tmp_path / "model.gguf", random_model(config), case._replace(config=config))
    assert read_gguf(path, torch.float32)[1].config.query_pre_attn_scalar == scalar
