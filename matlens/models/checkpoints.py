"""Configurations, tokenizers and weights from files; dequantized GGUF files are cached."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from matlens.errors import InputError
from matlens.io.bounds import LAYERS
from matlens.io.cache import default_cache, file_states
from matlens.io.files import print_to_stderr
from matlens.models.registry import families
from matlens.models.weights import fast_checksum

MODEL = "model"
"""Name of the cache entries of models."""
_READERS = ("gguf", "torch", "transformers", "tokenizers")
# Settings about a model's origin, not its content.
_ORIGIN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_TEXTS = ("a", " The naïve café, 1,000  times\n", "don't Привет 日本語 🙂 <|endoftext|></s>")


def read_configuration(folder: str, **options: Any) -> Any:
    """The configuration of a model, as the bridge reads it."""
    from transformer_lens.utilities.hf_utils import autoconfig_with_remote_post_init_compat
    from transformers import AutoConfig

    families()  # some let transformers know their configuration
    return autoconfig_with_remote_post_init_compat(
        folder, auto_config=AutoConfig, output_attentions=True, **options
    )


def modality(config: Any) -> str:
    """Input types and stacks of a model, such as ``"vision"`` and ``"seq2seq"``."""
    from transformer_lens.utilities.architectures import classify_model_config

    return str(classify_model_config(config))


def check_supported(name: str, config: Any, stack: str | None = None) -> None:
    """Raise InputError for models without a TransformerLens adapter or without blocks."""
    from transformer_lens.model_bridge.sources._hf_format import (
        determine_architecture_from_hf_config,
        get_effective_text_config,
    )

    kind, said = getattr(config, "model_type", "unknown"), f"The model {name!r} cannot be used"
    reads = modality(config)
    if reads == "seq2seq" and stack is None:
        raise InputError(
            f"{said}: stack must be 'encoder' or 'decoder' for {kind}, an encoder-decoder, got None."
        )
    if reads != "seq2seq" and stack is not None:
        raise InputError(f"stack must be None for {name!r}, which has one stack, got {stack!r}.")
    if reads == "audio":
        raise InputError(f"{said}: {kind} is an audio model. Use a text model or a vision transformer.")
    try:
        determine_architecture_from_hf_config(config)
    except ValueError:
        classes = ", ".join(map(str, getattr(config, "architectures", None) or ())) or "no class"
        raise InputError(
            f"{said}: TransformerLens has no adapter for it (model type {kind!r}, {classes!r}). "
            "Expected a model that TransformerLens 4 supports."
        ) from None
    layers = getattr(get_effective_text_config(config), "num_hidden_layers", None)
    if isinstance(layers, int):
        LAYERS.check(layers, f"The model {name!r}")
        if layers < 1:
            raise InputError(f"{said}: its configuration says {layers} layers. Expected at least 1.")


def check_vocabulary(tokenizer: Any, name: str) -> Any:
    """Refuse a tokenizer that transformers made of nothing, since its files are not there."""
    if not {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}:
        raise InputError(
            f"The model {name!r} has no tokenizer next to its weights. Save it there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    return tokenizer


class CompleteModel:
    """In place of the class that the bridge loads: refuses missing tensors, which would be initialized."""

    @staticmethod
    def from_pretrained(name: str, *, config: Any, **options: Any) -> Any:
        """The model of a folder or of the hub, with every tensor out of its checkpoint."""
        loaded = auto_class(config).from_pretrained(name, config=config, output_loading_info=True, **options)
        return _complete(name, *loaded)


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model of this configuration."""
    from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config
    from transformer_lens.model_bridge.sources.transformers.helpers import get_hf_model_class_for_architecture

    return get_hf_model_class_for_architecture(determine_architecture_from_hf_config(config))


def _complete(name: str, model: Any, report: dict[str, Any]) -> Any:
    lacking = sorted(report["missing_keys"]) + sorted(map(str, report.get("mismatched_keys", ())))
    if lacking:
        raise InputError(
            f"The model {name!r} could not be loaded: its weights lack {len(lacking)} tensors, including "
            f"{lacking[0]}. Expected a complete checkpoint with its language-model head."
        )
    places = {re.sub(r"\d+", "#", key) for key, _ in model.named_parameters()}
    more = sorted(key for key in report.get("unexpected_keys", ()) if re.sub(r"\d+", "#", key) in places)
    if more:
        raise InputError(
            f"The model {name!r} could not be loaded: its weights hold {len(more)} tensors of blocks that "
            f"its configuration does not have, including {more[0]}. Expected the config.json of "
            "these weights."
        )
    return model


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The tokenizer and the model of a GGUF file, from the cache if they are there."""
    with warnings.catch_warnings(action="ignore"):  # about quantized weights, which are dequantized here
        return _read_gguf(path, dtype)


def _read_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    cache = default_cache()
    if cache is None:
        return _dequantize(path, dtype)
    key = gguf_key(path)
    entry = cache.find(MODEL, key)
    if entry is None:
        loaded = _dequantize(path, torch.float32)

        def fill(folder: Path) -> None:
            for part in loaded:
                part.save_pretrained(folder)
            if _contents(*loaded) != _contents(*_load(folder, torch.float32)):
                raise ValueError("what is read back is not what was written")

        try:
            entry = cache.store(MODEL, key, fill, about={"what": path.name, "of": str(path.absolute())})
        except Exception as error:  # other libraries cannot write it, or read it back, or not as it was
            print_to_stderr(f"{path.name} is not stored in the cache. {type(error).__name__}: {error}")
        if entry is None:
            return loaded if dtype == torch.float32 else _dequantize(path, dtype)
    return _load(entry.folder, dtype)


def gguf_key(path: Path) -> dict[str, Any]:
    """Cache key of a GGUF file: the file, and the libraries that read it."""
    return {"file": file_states([path]), "software": software()}


def software() -> dict[str, str]:
    """Versions of the libraries that read models."""
    return {name: version(name) for name in _READERS}


def _dequantize(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # In a folder of its own, where no other model's configuration or tokenizer comes before the file's.
    with tempfile.TemporaryDirectory() as alone:
        Path(alone, path.name).symlink_to(path.resolve())
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=path.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            alone, gguf_file=path.name, dtype=dtype, output_loading_info=True
        )
    model = _complete(str(path), *loaded)
    model.hf_quantizer = None  # its weights are plain by now
    vars(model.config).pop("quantization_config", None)
    # transformers does not always record the class, and the bridge does not support every class.
    model.config.architectures = [type(model).__name__]
    check_supported(str(path), model.config)
    return check_vocabulary(tokenizer, str(path)), model


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    return tokenizer, model_class.from_pretrained(folder, config=config, dtype=dtype)


def _contents(tokenizer: Any, model: Any) -> list[Any]:
    """All that decides what a text becomes, what tokens become again, and what the model computes."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _ORIGIN}
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = [backend.get(part) for part in ("model", "normalizer", "pre_tokenizer", "decoder")]
    encoded = [tokenizer(text)["input_ids"] for text in _TEXTS]
    special = tokenizer.special_tokens_map, tokenizer.model_max_length
    weights = fast_checksum(model.state_dict().items())
    return [type(tokenizer), type(model), config, weights, tokenizer.get_vocab(), *parts, encoded, *special]
