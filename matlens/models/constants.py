"""Numbers that a model computes with and that no checkpoint holds, so that its fingerprint does not see them.

Such are buffers that are worked out from the configuration, as the frequencies of rotary embeddings, and the
settings that a bridge's own attention reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from matlens.models.weights import is_quantized, modules_below, plain_model, plain_place

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_CHANGING = ("dynamic", "longrope")  # rotary embeddings whose frequencies follow the length of a text
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_KEPT = "matlens_settings"  # an attribute, so that a copy of the bridge has it too
_SETTINGS = (
    "n_heads", "n_key_value_heads", "d_head", "d_model", "n_layers", "eps", "act_fn", "attention_dir",
    "positional_embedding_type", "rotary_adjacent_pairs", "rotary_interleaved_cos_sin", "gated_q_proj",
    "qk_norm_after_rope", "rmsnorm_uses_offset", "uses_rms_norm", "parallel_attn_mlp",
    "scale_attn_by_inverse_layer_idx", "attn_scale",
)  # fmt: skip
_PLAIN: WeakKeyDictionary[Any, dict[str, Tensor]] = WeakKeyDictionary()


def remember_settings(model: TransformerBridge) -> None:
    """Take the settings that a bridge has now for its own."""
    setattr(model, _KEPT, _settings(model))


def other_constants(model: TransformerBridge) -> Iterator[str]:
    """Name buffers with other numbers than the configuration gives, and settings that were changed."""
    buffers = dict(_buffers(model.original_model))
    if buffers and model not in _PLAIN:
        _PLAIN[model] = _plain_buffers(model, buffers)
    for name, values in buffers.items():
        plain = _PLAIN[model].get(name)
        if plain is not None and not _agree(values, plain):
            yield f"other numbers in the buffer {name} ({_described(values)})"
    if not hasattr(model, _KEPT):
        remember_settings(model)
    kept, now = getattr(model, _KEPT), _settings(model)
    for name in _SETTINGS:
        if now[name] != kept[name]:
            yield f"the setting {name}={now[name]!r:.60} of the bridge, which was {kept[name]!r:.60}"


def _settings(model: TransformerBridge) -> dict[str, Any]:
    return {name: getattr(model.cfg, name, None) for name in _SETTINGS}


def _buffers(inner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint does not hold, by their places in the model without a bridge."""
    for path, module in modules_below("", inner):
        names = module._non_persistent_buffers_set
        if names and not any(kind in str(vars(module).get("rope_type")) for kind in _CHANGING):
            place = plain_place(path)
            for name in sorted(names):
                values = module._buffers.get(name)
                if values is not None and not values.is_meta and values.dtype != torch.bool:
                    yield f"{place}.{name}" if place else name, values


def _plain_buffers(model: TransformerBridge, there: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the configuration makes of each buffer; where it does not alone, what is there now."""
    made: dict[str, Tensor] = {}
    plain = None if is_quantized(model) else plain_model(model)
    initialize: Any = getattr(plain, "_init_weights", None)
    for path, module in () if plain is None or initialize is None else plain.named_modules():
        names = [name for name in module._non_persistent_buffers_set if f"{path}.{name}" in there]
        for name in names:
            module._buffers[name] = torch.full_like(module._buffers[name], -1, device="cpu")
        if names:
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    initialize(module)
            except Exception:  # code that came with a model can ask for anything
                continue
            filled = {f"{path}.{name}": module._buffers[name] for name in names}
            made |= {name: values for name, values in filled.items() if not bool((values == -1).all())}
    alike = {name: values for name, values in made.items() if values.shape == there[name].shape}
    return {name: alike.get(name, values.detach().cpu().clone()) for name, values in there.items()}


def _agree(values: Tensor, plain: Tensor) -> bool:
    if values.shape != plain.shape:
        return False
    now = values.detach().cpu()
    if not now.is_floating_point():
        return torch.equal(now, plain.to(now.dtype))
    # Rounded to another precision, or worked out on another device, they are the same.
    return torch.allclose(now.double(), plain.double(), rtol=_TOLERANCE.get(now.dtype, 1e-5), atol=0)


def _described(values: Tensor) -> str:
    numbers = values.detach().double().flatten().cpu()
    places = torch.arange(1, len(numbers) + 1, dtype=torch.float64)
    return f"{len(numbers)} of {str(values.dtype).removeprefix('torch.')}, in all {numbers @ places:.17g}"
