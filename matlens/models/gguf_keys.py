"""Keys and tensors of GGUF files that transformers ignores: applied to the configuration, or InputError.

The reference for their meaning is llama.cpp, which writes these files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from matlens.errors import InputError

# Keys after the architecture's name, and the configuration's names for them: the first that it has is set.
# Those of `_SHAPES` need none, since tensors of other shapes do not load.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("ffn_hidden_size", "n_inner", "intermediate_size"),
    "use_parallel_residual": ("use_parallel_residual",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_kv_heads", "num_key_value_heads"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
}
_OFF_AT_ZERO = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_SHAPES = ("vocab_size", "context_length", "block_count", "embedding_length", "feed_forward_length")
_HEAD = ("attention.key_length", "attention.value_length", "attention.scale")
_ROPE = (
    "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)  # fmt: skip
_HARMLESS = ("tensor_data_layout", "rope.scaling.finetuned", "pooling_type")
# Keys that only transformers reads, by architecture: it computes several settings from them.
_COMPUTED = {
    "mamba": ("ssm.",),
    "lfm2": ("shortconv.", "attention.head_count_kv"),
    "qwen35": ("ssm.", "full_attention_interval", "rope.dimension_sections", "nextn_predict_layers"),
    "qwen35moe": ("ssm.", "full_attention_interval", "rope.dimension_sections", "nextn_predict_layers"),
}
_FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")
_SPACE = "▁"  # as SentencePiece writes it
# Vocabularies, by how llama.cpp splits texts for them: as GPT-2, which is what transformers does with names
# that it does not know, or digits first. Files without a name are of 2023 or hand-made.
_LIKE_GPT2 = (
    None, "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum",
    "modern-bert", "roberta-bpe", "granite-docling", "a.x-4.0",
)  # fmt: skip
_DIGITS_FIRST = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_OLD_FREQUENCIES = "rot_embd"  # unscaled, in files of 2023; llama.cpp skips them too


def apply_keys(config: Any, path: Path) -> None:
    """Set what the file's keys and rotary factors say; raise InputError for what has no equivalent."""
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, tensors = read_gguf_metadata(str(path))
    architecture = metadata["general.architecture"]
    keys = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    unknown = [
        f"{architecture}.{key} = {value}"
        for key, value in keys.items()
        if not key.startswith(_COMPUTED.get(architecture, ()))
        and key not in (*_HEAD, *_ROPE, *_HARMLESS)
        and not (key in _SETTINGS and _set(config, _SETTINGS[key], _scalar(value)))
        and not _is_neutral(key, value)
        and key not in _SHAPES
        and not (key == "attention.head_count_kv" and value == keys.get("attention.head_count"))
    ]
    _check(not unknown, path, f"{len(unknown)} keys without an equivalent in transformers: {unknown[:5]}")
    if "attention.head_count_kv" not in keys:
        _set(config, _SETTINGS["attention.head_count_kv"], getattr(config, "num_attention_heads", None))
    if "attention.sliding_window" not in keys and config.model_type == "mistral":
        config.sliding_window = None  # transformers' default is the window of the first Mistral
    _apply_head(config, keys, path)
    _apply_rope(config, keys, _read_factors(path, tensors), path)


def check_tensors(model: Any, path: Path) -> None:
    """Raise InputError if a tensor of the file was not loaded into the model."""
    from transformers.integrations.gguf import read_gguf_metadata
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    metadata, tensors = read_gguf_metadata(str(path))
    architecture = metadata["general.architecture"]
    if architecture in _COMPUTED and architecture != "mamba":
        return  # loaded as other checkpoints are, see `check_complete`
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    known = get_gguf_hf_weights_map(model, processor)
    unread = [
        name
        for name in tensors
        if not {name, name.removesuffix(".weight")} & {*known}
        and name.removesuffix(".weight") not in _FACTORS
        and _OLD_FREQUENCIES not in name
    ]
    _check(not unread, path, f"{len(unread)} tensors that {type(model).__name__} does not have: {unread[:5]}")


def apply_splits(tokenizer: Any, path: Path) -> None:
    """Split a text before its merges as the file says; raise InputError for splits that are not known."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(path))
    backend, kind = tokenizer.backend_tokenizer, metadata.get("tokenizer.ggml.pre")
    known = metadata.get("tokenizer.ggml.model") != "gpt2" or kind in _LIKE_GPT2
    if known or not isinstance(backend.pre_tokenizer, ByteLevel):  # or applied by transformers
        return
    _check(kind in _DIGITS_FIRST, path, f"tokenizer.ggml.pre = {kind!r}")
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])


def check_space_prefix(tokenizer: Any, path: Path) -> None:
    """Raise InputError if the file and its tokenizer disagree about a space before the first word."""
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(path))
    stated = metadata.get("tokenizer.ggml.add_space_prefix")
    if metadata.get("tokenizer.ggml.model") == "llama" and stated is not None:
        added = tokenizer.tokenize("a")[0].startswith(_SPACE)
        _check(added == stated, path, f"tokenizer.ggml.add_space_prefix = {stated}")


def _apply_head(config: Any, keys: Mapping[str, Any], path: Path) -> None:
    heads, width = getattr(config, "num_attention_heads", None), config.hidden_size
    if not isinstance(heads, int) or heads == 0:
        return
    size = keys.get("attention.key_length", width // heads)
    if "attention.key_length" not in keys and config.model_type in ("llama", "mistral"):
        size = keys.get("rope.dimension_count", size)  # which then is the size of a head
    values = keys.get("attention.value_length", size)
    _check(values == size, path, f"attention.value_length = {values} and keys of width {size}")
    if size != getattr(config, "head_dim", width // heads):
        _check(hasattr(config, "head_dim"), path, f"heads of width {size}, got a model of width {width}")
        config.head_dim = size
    scale = keys.get("attention.scale") or None
    if hasattr(config, "query_pre_attn_scalar"):
        # llama.cpp, which writes no key: only the 27B models divide by the width over the heads.
        largest = config.num_hidden_layers == {"gemma2": 46, "gemma3_text": 62}.get(config.model_type)
        config.query_pre_attn_scalar = round(scale**-2) if scale else width // heads if largest else size
    elif scale is not None:
        _check(math.isclose(scale, size**-0.5, rel_tol=1e-5), path, f"attention.scale = {scale}")


def _apply_rope(config: Any, keys: Mapping[str, Any], factors: Mapping[str, list[float]], path: Path) -> None:
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        used = [key for key in keys if key.startswith("rope.scal")]
        _check(not used and not factors, path, f"{used or [*factors]} in a model without rotary embeddings")
        return
    by_layer = "full_attention" in parameters
    old = parameters["full_attention"] if by_layer else parameters
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = keys.get("rope.dimension_count", size)
    partial = {"partial_rotary_factor": rotated / size} if "partial_rotary_factor" in old else {}
    _check(rotated == size or bool(partial), path, f"rope.dimension_count = {rotated} in heads of {size}")
    kept = {key: value for key, value in old.items() if key.startswith("mrope")}
    base = {"rope_theta": float(keys.get("rope.freq_base", 10000.0))}
    new = kept | partial | base | _scaling(config, keys, factors, path)
    if by_layer:
        local = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base_swa", 10000.0))}
        new = {"full_attention": new, "sliding_attention": local}
    else:
        _check("rope.freq_base_swa" not in keys, path, "rope.freq_base_swa")
    config.rope_parameters = new
    if hasattr(config, "original_max_position_embeddings"):  # Phi-3 reads it here
        config.original_max_position_embeddings = _original_context(config, keys)


def _scaling(
    config: Any, keys: Mapping[str, Any], factors: Mapping[str, list[float]], path: Path
) -> dict[str, Any]:
    """The rotary scaling, with the defaults of llama.cpp."""
    kind = keys.get("rope.scaling.type", "linear")
    _check(kind in ("none", "linear", "yarn", "longrope"), path, f"rope.scaling.type = {kind!r}")
    factor = float(keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0.0))) or 1.0
    factor = 1.0 if kind == "none" else factor
    attention = float(keys.get("rope.scaling.attn_factor", 1.0))
    if kind == "yarn":
        _check(not factors, path, f"YaRN and {[*factors]}")
        _check(keys.get("rope.scaling.yarn_ext_factor", 1.0) in (1.0, -1.0), path, "yarn_ext_factor")
        attention *= float(keys.get("rope.scaling.yarn_attn_factor", 1.0))
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": _original_context(config, keys),
            "attention_factor": attention * (1 + 0.1 * math.log(max(factor, 1.0))),
            "beta_fast": float(keys.get("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(keys.get("rope.scaling.yarn_beta_slow", 1.0)),
        }
    if not factors and attention == 1:
        return {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    # The one type of transformers with a factor for each frequency; with equal sets it depends on no length.
    both = [factors.get(name, factors.get("rope_freqs")) for name in _FACTORS[1:]]
    if not factors:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        both = [[1.0] * (int(keys.get("rope.dimension_count", size)) // 2)] * 2
    _check(None not in both, path, f"only {[*factors]} of short and long factors")
    short, long = ([factor * number for number in numbers or ()] for numbers in both)
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": 1.0,
        "original_max_position_embeddings": _original_context(config, keys), "attention_factor": attention,
    }  # fmt: skip


def _original_context(config: Any, keys: Mapping[str, Any]) -> int:
    return int(keys.get("rope.scaling.original_context_length", config.max_position_embeddings))


def _read_factors(path: Path, tensors: Iterable[str]) -> dict[str, list[float]]:
    """The rotary factors of a file, by the tensor's name."""
    if not {f"{name}.weight" for name in _FACTORS} & {*tensors}:
        return {}
    from gguf import GGUFReader, dequantize

    return {
        tensor.name.removesuffix(".weight"): dequantize(tensor.data, tensor.tensor_type)
        .astype(np.float64)
        .ravel()
        .tolist()
        for tensor in GGUFReader(str(path)).tensors
        if tensor.name.removesuffix(".weight") in _FACTORS
    }


def _is_neutral(key: str, value: Any) -> bool:
    """True for values that change nothing: llama.cpp's default is 0, and of scales 1 is the same."""
    if key == "attention.causal":
        return bool(value)
    return not value or (key.endswith("_scale") and value == 1)


def _set(config: Any, names: tuple[str, ...], value: Any) -> bool:
    """Set the first of the names that a configuration has; False if it has none, or cannot mean the value."""
    name = next((name for name in names if hasattr(config, name)), None)
    if name is None or value is None:
        return False
    if name == "sliding_window" and getattr(config, "use_sliding_window", True) is False:
        return False
    if name in _OFF_AT_ZERO and value == 0:
        value = None
    if getattr(config, name) != value:
        setattr(config, name, value)
    return True


def _scalar(value: Any) -> Any:
    """A value, or the one value of all layers; None if layers differ."""
    if not isinstance(value, list):
        return value
    return value[0] if len({*value}) == 1 else None


def _check(condition: bool, path: Path, problem: str) -> None:
    if not condition:
        raise InputError(
            f"{path.name} must be a GGUF file that transformers can represent, got {problem}. Load the model "
            "from the Hugging Face folder that the file was made from."
        )
