"""Models whose rotary embedding is in float32 in half precision: OLMo, FlexOLMo, CodeGen.

Their attention in transformers rounds rotated queries and keys to the precision of the model before it uses
them. TransformerLens 4.3 does not, and multiplies float32 attention weights with values in half precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from matlens.models.registry import Family, Repair, register
from matlens.models.sites import ROTATED_HOOKS

_CODEGEN = "CodeGenAttentionBridge"  # the class of TransformerLens


@register
class FloatRotation(Family):
    """Models in half precision whose cosines and sines are float32."""

    def repairs(self, model: Any) -> list[Repair]:
        """Rotated queries and keys are rounded to the precision of the projections."""
        if getattr(model.cfg, "dtype", None) not in (torch.bfloat16, torch.float16):
            return []
        parts: list[Any] = [getattr(block, "attn", None) for block in getattr(model, "blocks", ())]
        # A cache stores CodeGen's values in the precision of its keys.
        repairs = [Repair(part.o, _RoundInput(part.o)) for part in parts if type(part).__name__ == _CODEGEN]
        if _rotates_in_float32(model):
            rotating = [part for part in parts if hasattr(part, ROTATED_HOOKS[0]) and hasattr(part, "v")]
            repairs += [
                Repair(getattr(part, name), _RoundOutput(part.v), after=True)
                for part in rotating
                for name in ROTATED_HOOKS
            ]
        return repairs


def _rotates_in_float32(model: Any) -> bool:
    rotary = getattr(model, "rotary_emb", None)
    if rotary is None or rotary.original_component is None:
        return False
    given = rotary.get_random_inputs(1, 1, torch.device(model.cfg.device), model.cfg.dtype)["args"]
    try:
        with torch.no_grad():
            returned = rotary.original_component(*given)
    except Exception:  # its arguments are others, and so are its attention's
        return False
    return any(part.dtype == torch.float32 for part in _tensors(returned))


def _tensors(value: Any) -> Iterator[Tensor]:
    for part in value if isinstance(value, tuple | list) else (value,):
        if isinstance(part, Tensor) and part.is_floating_point():
            yield part


@dataclass(frozen=True)
class _Rounding:
    """Rounds to the precision of a linear layer's weight, where that is a plain one."""

    layer: nn.Module

    def rounded(self, value: Tensor) -> Tensor:
        """The tensor in the layer's precision; packed weights have none."""
        dtype = next(self.layer.parameters()).dtype
        return value.to(dtype) if dtype in (torch.bfloat16, torch.float16) else value


class _RoundOutput(_Rounding):
    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self.rounded(output)


class _RoundInput(_Rounding):
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (self.rounded(args[0]), *args[1:]), kwargs
