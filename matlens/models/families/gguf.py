"""GGUF files, whose weights are dequantized once and then read from the cache."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from matlens.io.cache import default_cache, file_states
from matlens.io.files import print_to_stderr
from matlens.models.checkpoints import (
    check_complete,
    check_supported,
    check_vocabulary,
    read_tokenizer,
    software,
)
from matlens.models.gguf_keys import apply_keys, apply_splits, check_space_prefix, check_tensors
from matlens.models.places import GGUF
from matlens.models.registry import Family, register
from matlens.models.weights import tensor_digest

MODEL = "model"
"""Name of the cache entries of models."""
# Settings about a model's origin, not its content.
_ORIGIN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_READING = 3  # what is applied of a file; a new number makes stored models invalid
_TEXTS = ("a", " The naïve café, 1,000  times\n", "don't Привет 日本語 🙂 <|endoftext|></s>")


@register
class GGUFFile(Family):
    """Models in a single ``.gguf`` file."""

    def read_file(self, path: Path, dtype: torch.dtype) -> tuple[Any, Any] | None:
        """The tokenizer and the model, from the cache if they are there."""
        if path.suffix.lower() != GGUF:
            return None
        with warnings.catch_warnings(action="ignore"):  # about quantized weights, which are dequantized here
            return read_gguf(path, dtype)


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The tokenizer and the model of a file, from the cache if they are there."""
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
    return {"file": file_states([path]), "software": software(), "reading": _READING}


def _dequantize(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # In a folder of its own, where no other model's configuration or tokenizer comes before the file's.
    with tempfile.TemporaryDirectory() as alone:
        Path(alone, path.name).symlink_to(path.resolve())
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=path.name)
        apply_splits(tokenizer, path)
        config = AutoConfig.from_pretrained(alone, gguf_file=path.name)
        apply_keys(config, path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            alone, gguf_file=path.name, config=config, dtype=dtype, output_loading_info=True
        )
    model = check_complete(str(path), *loaded)
    check_tensors(model, path)
    check_space_prefix(tokenizer, path)
    model.hf_quantizer = None  # its weights are plain by now
    vars(model.config).pop("quantization_config", None)
    # transformers does not always record the class, and the bridge does not support every class.
    model.config.architectures = [type(model).__name__]
    check_supported(str(path), model.config)
    return check_vocabulary(tokenizer, str(path)), model


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    import transformers

    tokenizer = read_tokenizer(str(folder))
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
    state = model.state_dict()
    weights = [*state, tensor_digest(*state.values())]
    return [type(tokenizer), type(model), config, *weights, tokenizer.get_vocab(), *parts, encoded, *special]
