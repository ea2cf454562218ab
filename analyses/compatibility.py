"""Tries every feature on a small random model of each architecture.

The models have three layers of width 32 and a vocabulary of 60 words; what works depends on how their blocks
are wired, not on their size. A row for each architecture: how its blocks are wired, its sites, and for each
feature ``yes`` or the reason why it is refused. `--type` takes any model type of transformers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import pandas as pd
import torch
import transformers
import typer
from studies import Model, Report, Study, run_study
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from matlens import (
    InputError,
    MapSet,
    Readout,
    collect,
    jump,
    load,
    make_token_examples,
    mat_attn,
    mat_ffn,
    mat_ln1_ln2,
    patched,
)
from matlens.data import Examples, make_image_examples
from matlens.ffn import Updates, ValueVectors, controlled
from matlens.models import ModelLayout, Stack
from matlens.parallel import Bar
from matlens.patching import submodule_pairs

NAME = "compatibility"

_SIZES: dict[str, Any] = {
    "vocab_size": 60, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None, "hidden_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 48,
}  # fmt: skip
_NARROW = _SIZES | {"intermediate_size": 48}
_GROUPED = _NARROW | {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = _GROUPED | {
    "num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16,
}  # fmt: skip
_DEEPSEEK = (
    _EXPERTS
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 16}
    | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"num_key_value_heads": 4}  # latent attention is not grouped
)
_STACKS = _SIZES | {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
_PICTURES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 12, "patch_size": 4, "num_labels": 5,
}  # fmt: skip
# Settings of each type's configuration, in addition to its defaults; a type whose settings wire its blocks
# in several ways has a row for each, named by the type and a word.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "openai-gpt": _SIZES,
    "gpt2": _SIZES,
    "gpt_bigcode": _SIZES,
    "gpt_neo": _SIZES | {"attention_types": [[["global"], 3]]},
    "gpt_neox": _NARROW,
    "gptj": _SIZES | {"rotary_dim": 4},
    "opt": _SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": _SIZES,
    "falcon": _SIZES | {"new_decoder_architecture": False},
    "falcon alibi": _SIZES | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "falcon new": _SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "codegen": _SIZES | {"rotary_dim": 4},
    "xglm": _SIZES | {"ffn_dim": 48},
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _GROUPED),
    **dict.fromkeys(("phi", "phi3", "olmo", "olmo2", "olmo3"), _NARROW),
    "stablelm": _NARROW | {"num_key_value_heads": 4},
    "cohere": _NARROW,
    "cohere2": _GROUPED,
    "granite": _GROUPED | {"residual_multiplier": 0.5},
    "starcoder2": _NARROW | {"num_key_value_heads": 2},
    **dict.fromkeys(("glm", "glm4", "smollm3", "nemotron", "exaone4", "apertus", "arcee"), _GROUPED),
    **dict.fromkeys(("seed_oss", "ministral3", "hunyuan_v1_dense", "vaultgemma", "ernie4_5"), _GROUPED),
    "qwen3_next": _EXPERTS
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "lfm2": _GROUPED | {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 48},
    "granitemoe": _EXPERTS | {"residual_multiplier": 0.5},
    "phimoe": _EXPERTS,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK | {"first_k_dense_replace": 1},
    "glm4_moe": _EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": _EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "lfm2_moe": _EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_text": _EXPERTS | {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 48},
    **dict.fromkeys(("flex_olmo", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss"), _EXPERTS),
    "mamba": _SIZES,
    "rwkv": _SIZES | {"attention_hidden_size": 32},
    "bert": _NARROW,
    "roberta": _NARROW,
    "distilbert": _SIZES | {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48},
    "electra": _NARROW,
    "albert": _NARROW | {"embedding_size": 32},
    "ernie": _NARROW,
    **dict.fromkeys(("bart", "mbart", "m2m_100", "pegasus", "blenderbot", "marian"), _STACKS),
    "mt5": _SIZES | {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_heads": 4},
    "vit": _PICTURES,
    "deit": _PICTURES,
    "t5": _SIZES | {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_heads": 4},
}
_CLASSES = (  # the first that has the type: BART and its kin are in several
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
)
_REPLACEMENTS = {"mat_attn": mat_attn, "mat_ffn": mat_ffn, "mat_ln1_ln2": mat_ln1_ln2}
FEATURES = ("readout", "mat", *_REPLACEMENTS, "value vectors", "sub-updates", "control")


def main(
    study: Study, report: Report, model_type: Annotated[list[str] | None, typer.Option("--type")] = None
) -> None:
    """Try every feature on a small random model of each architecture.

    Parameters
    ----------
    model_type
        A model type of transformers; by default all of the list.
    """
    chosen = model_type or list(CONFIGURATIONS)
    rows = []
    for name in Bar(chosen, unit="architecture", desc="trying"):
        stacks: tuple[Any, ...] = get_args(Stack) if small_configuration(name).is_encoder_decoder else (None,)
        for stack in stacks:
            with tempfile.TemporaryDirectory() as folder:
                row = attempt(name, Path(folder), study.seed, stack)
            rows.append({"model_type": f"{name} {stack}" if stack else name} | row)
    report.write(NAME, pd.DataFrame(rows), {"seed": study.seed, "model_types": chosen})


def attempt(name: str, folder: Path, seed: int, stack: Stack | None = None) -> dict[str, str]:
    """Features that work with an architecture, or the reason why it cannot be loaded."""
    save_small_model(name, folder, seed)
    try:
        offered = compatibility(load(str(folder), stack=stack), stack)
    except InputError as error:
        reason = str(error).replace(str(folder), name)
        return {"wiring": "", "sites": ""} | dict.fromkeys(FEATURES, reason)
    return offered | {feature: offered[feature] or "yes" for feature in FEATURES}


def small_configuration(name: str) -> Any:
    """The configuration of a row's model."""
    return transformers.AutoConfig.for_model(name.split()[0], **CONFIGURATIONS.get(name, _GROUPED))


def save_small_model(name: str, folder: Path, seed: int) -> None:
    """Write a small model with random weights and a tokenizer of whole words."""
    configuration = small_configuration(name)
    known = (getattr(transformers, kind) for kind in _CLASSES)
    auto = next(kind for kind in known if type(configuration) in kind._model_mapping)
    configuration.architectures = configuration.architectures or []  # some classes look into the list
    torch.manual_seed(seed)
    auto.from_config(configuration).save_pretrained(folder)
    words = ["[UNK]", "[PAD]", "[MASK]", *(f"w{number}" for number in range(57))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    if auto is transformers.AutoModelForMaskedLM:
        special["mask_token"] = "[MASK]"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def compatibility(model: Model, stack: Stack | None = None) -> dict[str, str]:
    """What matlens can do with a model, found by doing it on a few tokens."""
    layout = ModelLayout.from_model(model)
    probe = torch.arange(1, 22).view(3, 7)
    if model.tokenizer is None:  # it reads images
        probe = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    examples = _examples(model, probe, stack)
    stream = collect(model, examples, progress=False)

    def read_out() -> None:
        Readout(model).logits(stream[layout.stream[-1]])

    def run_patched(pairs: Callable[[], Any], replace: Callable[..., Any]) -> None:
        sites = sorted({site for pair in pairs() for site in pair})
        inside = collect(model, examples, sites=sites, progress=False)
        with patched(model, replace(MapSet.fit(inside, pairs=pairs()), 0, layout.n_layers)):
            model(probe, return_type=None)

    def set_coefficient() -> None:
        with controlled(model, [ValueVectors(model).at(0)]):
            model(probe, return_type=None)

    attempts: dict[str, Callable[[], Any]] = {
        "readout": read_out,
        "mat": partial(run_patched, lambda: [("h.0", str(layout.stream[-1]))], jump),
        **{
            name: partial(run_patched, partial(_pairs_of, layout, name), replace)
            for name, replace in _REPLACEMENTS.items()
        },
        "value vectors": lambda: ValueVectors(model).layer(0),
        "sub-updates": lambda: Updates.run(model, examples, progress=False).dominant(0, 1),
        "control": set_coefficient,
    }
    return {
        "wiring": layout.wiring.name,
        "sites": ", ".join(("h", *layout.kinds)),
        **{name: _refusal(attempts[name]) for name in FEATURES},
    }


def _examples(model: Model, probe: Tensor, stack: Stack | None) -> Examples:
    if model.tokenizer is None:
        return make_image_examples(model, probe)
    every = torch.ones_like(probe, dtype=torch.bool)
    sources = probe.tolist() if stack == "decoder" else None
    return make_token_examples(model, probe, attention_mask=every.long(), positions=every, sources=sources)


def _pairs_of(layout: ModelLayout, name: str) -> list[tuple[str, str]]:
    parts = name.split("_")[1:]
    pairs = submodule_pairs(layout, parts)
    if not pairs:
        raise InputError(
            f"Not every block of this model has a module for {' and '.join(parts)} whose input and output "
            "are known: some have another one in its place, such as linear attention or a convolution. "
            f"The sites of all its blocks are {', '.join(layout.kinds)}."
        )
    return pairs


def _refusal(attempt: Callable[[], Any]) -> str:
    try:
        with torch.inference_mode():
            attempt()
    except InputError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    run_study(main, model=None, corpus=None)
