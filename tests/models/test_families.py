"""Architectures that TransformerLens computes otherwise run as in transformers, or raise when loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_tokenizer
from torch import nn
from transformer_lens.model_bridge import TransformerBridge

import matlens
from matlens import InputError, Lens, Readout, ffn, pruning
from matlens.activations import default_batch_tokens
from matlens.data import make_windows
from matlens.models import active_hooks, registry
from matlens.models.registry import Family, missing_repairs, register

HALF = (torch.bfloat16, torch.float16)
IDS = [list(range(5, 14))]
SIZES: dict[str, Any] = {
    "vocab_size": len(make_tokenizer()), "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
    "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_NEWER = ("intermediate_size", "num_key_value_heads", "head_dim")
OLD = {key: value for key, value in SIZES.items() if key not in _NEWER}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}
GRANITE = SIZES | MAMBA | {
    "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2, "num_experts_per_tok": 1,
    "shared_intermediate_size": 8, "position_embedding_type": None, "logits_scaling": 3.0,
}  # fmt: skip
OPT = OLD | {"ffn_dim": 24, "word_embed_proj_dim": 16}
RECURRENT = SIZES | {"lru_width": 16, "block_types": ["recurrent", "recurrent", "attention"]}
GEMMA = SIZES | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
VISION = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


def save_model(kind: str, sizes: dict[str, Any], folder: Path) -> Any:
    """Save a model with random weights, also in norms, and return its class."""
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(sizes))
    known = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    auto = next(kind for kind in known if type(config) in kind._model_mapping)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.5 * torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return auto


def collected(model: Any, layer: int) -> torch.Tensor:
    examples = matlens.make_token_examples(model, IDS, positions=[[True] * len(row) for row in IDS])
    return matlens.collect(model, examples, [layer], progress=False)[layer]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("olmo", SIZES),
        ("olmo2", SIZES),
        ("flex_olmo", SIZES | {"num_experts": 2, "num_experts_per_tok": 1}),
        ("codegen", OLD | {"rotary_dim": 4, "num_attention_heads": 4}),
    ],
)
def test_float32_rotations_are_rounded_as_in_transformers(kind, sizes, dtype, tmp_path):
    auto = save_model(kind, sizes, tmp_path)
    plain = auto.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        truth = plain(input_ids=torch.tensor(IDS), output_hidden_states=True, use_cache=False)
    model = matlens.load(tmp_path, dtype=dtype, device="cpu")
    expected = truth.hidden_states[2][0].float()
    assert (collected(model, 2) - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert active_hooks(model) == ()
    assert not missing_repairs(copy.deepcopy(model))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("granitemoehybrid", GRANITE),
        ("granitemoehybrid", GRANITE | {"position_embedding_type": "rope"}),
        ("opt", OPT | {"do_layer_norm_before": False}),
        ("opt", OPT | {"_remove_final_layer_norm": True}),
    ],
)
def test_a_model_without_a_module_runs_without_it(kind, sizes, tmp_path):
    auto = save_model(kind, sizes, tmp_path)
    plain = auto.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        truth = plain(input_ids=torch.tensor(IDS), output_hidden_states=True)
    model = matlens.load(tmp_path, device="cpu")
    assert (collected(model, 2) - truth.hidden_states[2][0]).abs().max() < 1e-5
    logits = Readout(model).logits(collected(model, 3))
    assert (logits - truth.logits[0]).abs().max() <= 1e-5 * truth.logits.abs().max()
    assert active_hooks(model) == ()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("falcon_h1", SIZES | MAMBA | {"mamba_d_ssm": 32, "lm_head_multiplier": 0.2}),
        ("recurrent_gemma", RECURRENT | {"logits_soft_cap": 0.5}),
        ("gemma3_text", GEMMA | {"final_logit_softcapping": 0.5}),
        ("cohere", SIZES | {"logit_scale": 0.3}),
        ("gemma3", {"text_config": GEMMA | {"final_logit_softcapping": 0.5}, "image_token_index": 40,
                    "mm_tokens_per_image": 4, "vision_config": VISION | {"image_size": 8, "patch_size": 4}}),
    ],
)  # fmt: skip
def test_factor_and_cap_of_logits_are_found_wherever_configured(kind, sizes, tmp_path):
    auto = save_model(kind, sizes, tmp_path)
    plain = auto.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        truth = plain(input_ids=torch.tensor(IDS)).logits[0]
    model = matlens.load(tmp_path, device="cpu")
    logits = Readout(model).logits(collected(model, 3))
    assert (logits - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize("dtype", HALF)
def test_float32_streams_of_half_precision_models_are_read_out(dtype, tmp_path):
    sizes = {key: OLD[key] for key in OLD if key != "num_attention_heads"} | {"state_size": 4}
    save_model("mamba", sizes, tmp_path)
    model = matlens.load(tmp_path, dtype=dtype, device="cpu")
    assert collected(model, 3).shape == (9, 16)
    Readout(model)


def test_words_past_the_embeddings_are_refused_by_every_reader(tmp_path):
    save_model("llama", SIZES, tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    model = matlens.load(tmp_path, device="cpu")
    values, projection = ffn.ValueVectors(model), ffn.Projection.from_model(model)
    top = projection.top_of_all(values, k=3, progress=False)
    word = next(word for word, number in tokenizer.get_vocab().items() if number == 7)
    trajectory = Lens.identity(model).trajectory(word)
    for read in (
        lambda: projection.promoting(values, ["<extra>"], n=2, progress=False),
        lambda: projection.search(values, top, ["<extra>"]),
        lambda: trajectory.rank("<extra>"),
        lambda: trajectory.to_dataframe(["<extra>"]),
    ):
        with pytest.raises(InputError, match="<extra>"):
            read()


def test_a_folder_with_only_an_adapter_is_named_as_one(tmp_path):
    record = {"peft_type": "LORA", "base_model_name_or_path": "some/model"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"PEFT adapter.*some/model"):
        matlens.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bridge_with_other_logits_than_the_model_is_refused(dtype, tmp_path, monkeypatch):
    save_model("llama", SIZES, tmp_path)
    monkeypatch.setattr(registry, "_REGISTERED", [*registry.families()])

    @register
    class Wrong(Family):
        def repairs(self, model: Any) -> list[registry.Repair]:
            return [registry.Repair(model.blocks[1].mlp, negative, after=True)]

    def negative(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return -output

    with pytest.raises(InputError, match="as transformers does"):
        matlens.load(tmp_path, dtype=dtype, device="cpu")


@pytest.mark.parametrize("entrance", ["load", "wrap"])
def test_a_pass_that_fails_is_refused_when_the_model_enters(entrance, tmp_path, monkeypatch):
    save_model("llama", SIZES, tmp_path)
    bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    attention = type(bridge.blocks[0].attn)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a shape does not match")

    monkeypatch.setattr(attention, "forward", fail)
    with pytest.raises(InputError, match="a shape does not match"):
        matlens.load(tmp_path, device="cpu") if entrance == "load" else matlens.wrap(bridge)


def test_logits_that_overflow_in_transformers_are_refused_when_loaded(tmp_path):
    auto = save_model("llama", SIZES, tmp_path)
    model = auto.from_pretrained(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.mul_(6e4 / model.lm_head.weight.abs().max())
        model.model.norm.weight.fill_(100)
    model.save_pretrained(tmp_path)
    assert matlens.load(tmp_path, device="cpu")
    with pytest.raises(InputError, match="finite"):
        matlens.load(tmp_path, device="cpu", dtype=torch.float16)


def test_fp8_weights_are_refused_or_run_but_never_fail_raw(tmp_path):
    auto = save_model("llama", SIZES, tmp_path)
    plain = auto.from_pretrained(tmp_path)
    plain.model.layers[0].mlp.down_proj.weight.data = torch.zeros(16, 24, dtype=torch.float8_e4m3fn)
    bridge = TransformerBridge.boot_transformers(
        str(tmp_path), hf_model=plain, tokenizer=make_tokenizer(), device="cpu"
    )
    with pytest.raises(InputError, match="does not run"):
        matlens.wrap(bridge)


def test_default_batch_on_a_gpu_follows_the_free_memory(small_model):
    model, gib = small_model("llama"), 2**30
    assert default_batch_tokens(model) == 2048
    few, many = 33 * 4096, 4096
    for free in (1 * gib, 8 * gib, 60 * gib):
        size = default_batch_tokens(model, few, longest=512, free=free)
        assert 4 * few * size <= free / 2
        assert size <= default_batch_tokens(model, many, longest=512, free=free) <= 32768
    assert default_batch_tokens(model, few, free=8 * gib) == default_batch_tokens(
        model, few, free=8 * gib + 2**20
    )
    assert default_batch_tokens(model, few, longest=2048, free=gib) <= default_batch_tokens(
        model, few, longest=8, free=gib
    )
    assert default_batch_tokens(model, few, free=0) > 0


def test_an_interrupted_run_keeps_its_batches(small_model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"request": {"batch_tokens": 384}}))
    assert default_batch_tokens(small_model("llama"), 32, folder=tmp_path, free=2**30) == 384


MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WINDOW = SIZES | {"sliding_window": 4, "num_hidden_layers": 4, "layer_types": MIXED}


@pytest.mark.parametrize(
    ("kind", "sizes", "removed"),
    [
        ("gemma3_text", WINDOW, [1]),
        ("gemma3_text", WINDOW | {"num_hidden_layers": 3, "layer_types": MIXED[:3]}, [1]),
        ("olmo3", WINDOW | {"num_hidden_layers": 3, "layer_types": MIXED[:3]}, [1]),
        ("falcon_h1", SIZES | MAMBA | {"mamba_d_ssm": 32}, [1]),
        ("recurrent_gemma", RECURRENT, [2]),
    ],
)
def test_pruned_models_keep_what_each_block_is(kind, sizes, removed, tmp_path):
    auto = save_model(kind, sizes, tmp_path)
    model = matlens.load(tmp_path, device="cpu")
    words = [word for word, number in model.tokenizer.get_vocab().items() if number > 4]
    windows = make_windows(model, [" ".join(words[i * i % len(words)] for i in range(64))], size=32)
    pruned = pruning.prune(model, windows, removed, method="out", progress=False).model
    pruned.save_pretrained(tmp_path / "pruned")
    plain = auto.from_pretrained(tmp_path, attn_implementation="eager").eval()
    again = auto.from_pretrained(tmp_path / "pruned", attn_implementation="eager").eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        for block in (plain.model.layers[index] for index in removed):
            block.register_forward_hook(skip, with_kwargs=True)
        truth = plain(input_ids=ids, use_cache=False).logits
        for made in (pruned, again):
            assert (made(input_ids=ids, use_cache=False).logits - truth).abs().max() < 1e-4


def skip(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A block that returns what it gets."""
    given = args[0] if args else kwargs["hidden_states"]
    return (given, *output[1:]) if isinstance(output, tuple) else given


def test_a_configuration_that_cannot_say_what_blocks_are_is_refused(tmp_path):
    sizes = SIZES | MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]}
    save_model("bamba", sizes, tmp_path)
    model = matlens.load(tmp_path, device="cpu")
    words = [word for word, number in model.tokenizer.get_vocab().items() if number > 4]
    windows = make_windows(model, [" ".join(words[:20] * 2)], size=20)
    with pytest.raises(InputError, match="layers_block_type"):
        pruning.prune(model, windows, [2], method="out", progress=False)
