"""Who a model is: its name, the fingerprint of its weights, and whether they are as they were published."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from matlens.errors import InputError

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
_SAMPLED = 1024  # values of each parameter that enter a fingerprint


def describe_model(model: TransformerBridge) -> dict[str, Any]:
    """Name, revision and fingerprint of a model, and what shapes its stream has."""
    return {
        "base_model_name_or_path": model.cfg.model_name,
        "base_model_revision": getattr(model, "matlens_revision", None),
        "architecture": model.cfg.architecture,
        "fingerprint": fingerprint(model),
        "unembed_hash": unembed_hash(model),
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "n_layers": model.cfg.n_layers,
        "d_model": model.cfg.d_model,
    }


def require_raw(model: TransformerBridge) -> None:
    """Refuse a bridge in compatibility mode.

    Raises
    ------
    InputError
        Folded norms and centred weights change what the hooks carry: a map fitted on them would
        belong to another model than the one that was published.
    """
    if model.compatibility_mode:
        raise InputError(
            "This bridge is in compatibility mode: its norms are folded and its weights centred, so "
            "its vectors are not those of the published model. Load it again with matlens.load() and "
            "do not call enable_compatibility_mode()."
        )


def fingerprint(model: TransformerBridge) -> str:
    """Sixteen hex digits that change with the weights, their precision and names, and the configuration.

    Values are sampled evenly from every parameter, so that it takes a moment for large models too; an
    edit of a few numbers in a large matrix can go unseen.
    """
    config = model.original_model.config.to_dict()
    told = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for name, parameter in model.original_model.named_parameters():
        flat = parameter.detach().reshape(-1)
        values = flat[_taken(flat.numel()).to(flat.device)].float().cpu().numpy()
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]


@cache
def _taken(size: int) -> torch.Tensor:
    """Which values of a parameter of this size are looked at."""
    return torch.from_numpy(np.unique(np.linspace(0, size - 1, min(_SAMPLED, size), dtype=np.int64)))


def unembed_hash(model: TransformerBridge) -> str | None:
    """Sixteen hex digits of the unembedding matrix, ``None`` where there is none.

    Models that share it, with their final norm, can share a read-out.
    """
    if not hasattr(model, "unembed"):
        return None
    weight = model.unembed.original_component.weight.detach().cpu().contiguous()
    return hashlib.sha256(weight.view(torch.uint8).numpy().data).hexdigest()[:16]
