"""Sizes of a model from its configuration, cached because reading takes seconds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from matlens.errors import InputError, checked
from matlens.io.cache import default_cache, file_states
from matlens.io.files import read_json, write_files
from matlens.models.checkpoints import auto_class, naming, read_configuration, software
from matlens.models.places import EXPECTED, GGUF, locate
from matlens.models.registry import Family, ask, family_adapters

SIZES = "sizes"
"""Name of the cache entries of sizes."""
_FILE = "sizes.json"
_LAYOUT = 3  # version of the cache entries
# What configurations call the layers of a stack, the coefficients of an FFN, and experts.
_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
_WIDTHS = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED = ("n_shared_experts", "moe_num_shared_experts")


@checked
def read_sizes(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> dict[str, int | None]:
    """How large a model is: ``n_layers, d_model, d_mlp, d_vocab`` and ``n_parameters``.

    The longer of two stacks, coefficients of all experts, classes of images. What the configuration does not
    say is None, or 0 for ``d_mlp`` and ``n_parameters``.
    """
    folder, file, commit = locate(name, revision)
    # A family may read more files than the one that is named.
    cached = not trust_remote_code and (file is None or file.lower().endswith(GGUF))
    cache = default_cache() if cached else None
    key: dict[str, Any] = {"layout": _LAYOUT, "software": software(), "of": folder, "commit": commit}
    if cache is not None:
        if commit is None:
            key["of"] = file_states([Path(folder, file or "config.json")])
        if entry := cache.find(SIZES, key):
            return read_json(entry.folder / _FILE)
    problem = f"The configuration of {name!r} in {folder} is not usable."
    with naming(problem), warnings.catch_warnings(action="ignore"):
        sizes = _sizes(_configuration(folder, file, trust_remote_code=trust_remote_code, revision=commit))
    if cache is not None:
        about = {"what": "sizes of the model", "of": name}
        cache.store(SIZES, key, lambda place: write_files({place / _FILE: sizes}), about=about)
    return sizes


def _configuration(folder: str, file: str | None, **options: Any) -> Any:
    if file is None:
        return read_configuration(folder, **options)
    if file.lower().endswith(GGUF):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(folder, gguf_file=file)
    loaded = ask(Family.read_file, Path(folder, file), torch.float32)
    if loaded is None:
        raise InputError(f"{Path(folder, file)} has an unknown file format. {EXPECTED}")
    return loaded[1].config


def _sizes(config: Any) -> dict[str, int | None]:
    text = config.get_text_config()
    pictures = hasattr(text, "image_size")  # whose vocabulary are classes
    return {
        "n_layers": max(_numbers(text, _LAYERS), default=None),
        "d_model": next(_numbers(text, ("hidden_size",)), None),
        "d_mlp": _coefficients(text),
        "d_vocab": next(_numbers(text, ("num_labels",) if pictures else ("vocab_size",)), None),
        "n_parameters": _count_parameters(config),
    }


def _count_parameters(config: Any) -> int:
    """How many parameters a model of this configuration has, from one without memory; 0 if none is made."""
    try:
        with torch.device("meta"), family_adapters():
            return sum(weight.numel() for weight in auto_class(config).from_config(config).parameters())
    except Exception:  # of code that is not here, for example; the blocks' sizes tell nearly as much
        return 0


def _coefficients(config: Any) -> int:
    """How many coefficients an FFN has; in a mixture all experts together, with those that tokens share."""
    width = next(_numbers(config, _WIDTHS), 0)
    n_experts = next(_numbers(config, _EXPERTS), 1)
    if n_experts == 1:
        return width
    of_expert = next(_numbers(config, ("moe_intermediate_size",)), width)
    shared = of_expert * next(_numbers(config, _SHARED), 0)
    return n_experts * of_expert + next(_numbers(config, ("shared_expert_intermediate_size",)), shared)


def _numbers(config: Any, names: Sequence[str]) -> Iterator[int]:
    """Values of a configuration that are integers above 0."""
    said = (getattr(config, name, None) for name in names)
    return (number for number in said if type(number) is int and number > 0)
