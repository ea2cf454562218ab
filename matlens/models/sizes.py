"""Sizes of a model as its configuration says them, kept so that the next time they are known at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matlens.errors import InputError, checked
from matlens.io.contents import hash_contents
from matlens.io.entries import Cache, default_cache
from matlens.io.files import read_json, write_json
from matlens.models.gguf import software
from matlens.models.loading import read_configuration
from matlens.models.places import CHECKPOINT, locate

SIZES = "sizes"
"""What entries of sizes are called."""
_FILE = "sizes.json"
_LAYOUT = 2  # of what is kept; what was kept in another is not found
# What configurations call the layers of a stack, the coefficients of an FFN, and experts.
_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
_WIDTHS = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED = ("n_shared_experts", "moe_num_shared_experts")
_NAMES = ("n_layers", "d_model", "d_mlp", "d_vocab", "n_parameters")


@checked
def read_sizes(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> dict[str, int | None]:
    """Say how large a model is: ``n_layers, d_model, d_mlp, d_vocab`` and ``n_parameters``.

    Of two stacks the layers of the longer are meant, of experts the coefficients of all together, and where
    images are read the classes instead of a vocabulary.

    Reading a configuration and building a model without weights takes all of transformers, and seconds.
    So what they say is kept, by the content of the file that says it and the libraries that read it.

    Returns
    -------
    sizes
        ``None`` for what the configuration does not say; ``d_mlp`` and ``n_parameters`` are 0 then.

    Raises
    ------
    InputError
        There is no such model, or its configuration is not usable.
    """

    def read() -> dict[str, int | None]:
        config, n_parameters = read_configuration(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
        return _said(config, n_parameters)

    cache = None if trust_remote_code else default_cache()
    if cache is None:
        return read()
    key = _key(cache, *locate(name, revision))
    return read() if key is None else _kept(cache, key, read, name)


def _said(config: Any, n_parameters: int) -> dict[str, int | None]:
    pictures = hasattr(config, "image_size")  # whose vocabulary are classes
    return {
        "n_layers": max(_numbers(config, _LAYERS), default=None),
        "d_model": next(_numbers(config, ("hidden_size",)), None),
        "d_mlp": _coefficients(config),
        "d_vocab": next(_numbers(config, ("num_labels",) if pictures else ("vocab_size",)), None),
        "n_parameters": n_parameters,
    }


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
    """Numbers that a configuration gives under some names, 0 and what is no number left out."""
    said = (getattr(config, name, None) for name in names)
    return (number for number in said if type(number) is int and number > 0)


def _key(cache: Cache, folder: str, file: str | None, commit: str | None) -> dict[str, Any] | None:
    """What the sizes depend on; ``None`` where they are not kept."""
    if file and file.lower().endswith(CHECKPOINT):
        return None
    if commit:
        return {"layout": _LAYOUT, "of": folder, "commit": commit, "software": software()}
    path = Path(folder, file or "config.json")
    if not os.path.isfile(path):  # a name on a hub that was not reached
        return None
    content = hash_contents(cache, [path])[path.name]
    return {"layout": _LAYOUT, "content": content, "software": software()}


def _kept(
    cache: Cache, key: dict[str, Any], read: Callable[[], dict[str, int | None]], name: str
) -> dict[str, int | None]:
    entry = cache.find(SIZES, key)
    if entry is not None:
        try:
            sizes = read_json(entry.folder / _FILE)
        except (InputError, OSError):  # cleared meanwhile
            return read()
        if isinstance(sizes, dict) and all(type(sizes.get(key)) is int for key in _NAMES):
            return {key: sizes[key] for key in _NAMES}
        cache.discard(entry.folder, "it does not say the sizes of a model")
    sizes = read()
    if None not in sizes.values():
        about = {"what": "sizes of the model", "of": name}
        cache.keep(SIZES, key, lambda folder: write_json(folder / _FILE, sizes), about=about)
    return sizes
