"""Models of GGUF files, kept as plain folders of transformers, which load in a moment.

Turning a GGUF file into numbers and building its tokenizer anew takes many times as long as reading both
back. What is kept is compared with what was read, number by number, before it is kept.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from matlens.io.contents import hash_contents
from matlens.io.entries import Cache, default_cache, tell

MODEL = "model"
"""What entries of whole models are called."""
_READERS = ("gguf", "torch", "transformers", "tokenizers")
# What says where a model came from, and not what it is.
_ORIGIN = ("quantization_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype")
_SPECIAL = ("unk", "mask", "bos", "eos", "pad", "cls", "sep")
_TEXTS = ("a", " The naïve café, 1,000  times\n", "don't Привет 日本語 🙂 <|endoftext|></s>")

Reader = Callable[[Path, torch.dtype], tuple[Any, Any]]


def read_kept(path: Path, dtype: torch.dtype, read: Reader) -> tuple[Any, Any]:
    """The tokenizer and the model of a GGUF file, from the cache where they are there.

    Parameters
    ----------
    path
        The file.
    dtype
        The precision of the model.
    read
        Reads the file itself, and refuses one that is not complete.
    """
    cache = default_cache()
    if cache is None:
        return read(path, dtype)
    key = model_key(cache, path)
    entry = cache.find(MODEL, key)
    if entry is None:
        loaded = read(path, torch.float32)

        def fill(folder: Path) -> None:
            _write(folder, *loaded)
            _check_equal(loaded, _load(folder, torch.float32))

        try:
            entry = cache.keep(MODEL, key, fill, about={"what": path.name, "of": str(path.absolute())})
        except Exception as error:  # other libraries cannot write it, or read it back, or not as it was
            reason = f"{type(error).__name__}: {error}"
            tell(f"Nothing is kept of {path.name} in the cache {cache.root}: {reason}.")
        if entry is None:
            return loaded if dtype == torch.float32 else read(path, dtype)
    try:
        return _load(entry.folder, dtype)
    except Exception as error:  # other libraries read it, and it may have been cleared meanwhile
        if entry.folder.exists():
            cache.discard(entry.folder, f"it could not be loaded, {type(error).__name__}")
        return read(path, dtype)


def kept_configuration(path: Path) -> Any:
    """The configuration of a GGUF file whose model is in the cache, ``None`` where it is not."""
    cache = default_cache()
    entry = None if cache is None else cache.find(MODEL, model_key(cache, path))
    if entry is None:
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(entry.folder)
    except Exception:  # it may have been cleared meanwhile
        return None


def model_key(cache: Cache, path: Path) -> dict[str, Any]:
    """What the model of a GGUF file depends on: its content, and the libraries that read it."""
    return {"content": hash_contents(cache, [path])[path.name], "software": software()}


def software() -> dict[str, str]:
    """Versions of the libraries that read models."""
    return {name: version(name) for name in _READERS}


def _write(folder: Path, tokenizer: Any, model: Any) -> None:
    config, quantizer = model.config, getattr(model, "hf_quantizer", None)
    quantization = vars(config).pop("quantization_config", None)
    model.hf_quantizer = None  # its numbers are plain by now
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    finally:
        model.hf_quantizer = quantizer
        if quantization is not None:
            config.quantization_config = quantization


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        model_class = getattr(transformers, config.architectures[0])
        model = model_class.from_pretrained(folder, config=config, dtype=dtype)
    return tokenizer, model


def _check_equal(written: tuple[Any, Any], read: tuple[Any, Any]) -> None:
    """Refuse a model or a tokenizer that is not what was written."""
    ours, theirs = (model.state_dict() for _, model in (written, read))
    same = ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and _same_bits(ours[name], theirs[name]) for name in ours
    )
    classes = [[type(part) for part in pair] for pair in (written, read)]
    tokens = [tokenization(tokenizer) for tokenizer, _ in (written, read)]
    configs = [_shape(model.config.to_dict()) for _, model in (written, read)]
    if not same or classes[0] != classes[1] or tokens[0] != tokens[1] or configs[0] != configs[1]:
        raise ValueError("what is read back is not what was written")


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(*(values.contiguous().reshape(-1).view(torch.uint8) for values in (first, second)))


def tokenization(tokenizer: Any) -> list[Any]:
    """All that decides what a text becomes, and what tokens become again."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = [backend.get(part) for part in ("model", "normalizer", "pre_tokenizer", "decoder")]
    special = [getattr(tokenizer, f"{name}_token_id") for name in _SPECIAL]
    encoded = [tokenizer(text)["input_ids"] for text in _TEXTS]
    return [*parts, tokenizer.get_vocab(), special, encoded, tokenizer.model_max_length]


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _ORIGIN}
