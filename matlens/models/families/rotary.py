"""Rotary embeddings whose frequencies depend on the length of the input: LongRoPE and dynamic NTK.

LongRoPE (Phi-3, Phi-4-mini) has two sets of frequencies, one for inputs up to the original context and one
for longer ones. Dynamic NTK computes frequencies for each length past the context. transformers takes the
length from the longest text of a batch, so texts of different `length_groups` must not share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from matlens.models.registry import Family, Repair, register

_LONGROPE, _DYNAMIC = "longrope", "dynamic"


class _Scaling(NamedTuple):
    """The part of a rotary embedding whose frequencies depend on the length."""

    module: nn.Module
    kind: str
    context: int  # longest text with the original frequencies


@register
class DynamicRotary(Family):
    """Models with dynamic NTK."""

    def repairs(self, model: Any) -> list[Repair]:
        """Start each input from the original frequencies; transformers keeps those of a longer one before."""
        modules = [scaling.module for scaling in _scalings(model) if scaling.kind == _DYNAMIC]
        return [Repair(module, forget_earlier_inputs) for module in dict.fromkeys(modules)]


def length_groups(model: Any, lengths: np.ndarray) -> np.ndarray:
    """A number per text length; lengths with the same number have the same rotary frequencies."""
    groups = np.zeros(len(lengths), dtype=np.int64)
    for scaling in _scalings(model):
        past = np.maximum(lengths - scaling.context, 0)
        groups += past if scaling.kind == _DYNAMIC else past > 0
    return groups  # no term ever falls with the length, so equal sums have equal terms


def forget_earlier_inputs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Restore the original frequencies unless the input continues a cache."""
    given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    if given["position_ids"].min() > 0:
        return
    layer_type = given.get("layer_type")
    prefix = "" if layer_type is None else f"{layer_type}_"
    original = getattr(module, f"{prefix}original_inv_freq", None)
    if original is not None:
        setattr(module, f"{prefix}inv_freq", original.to(given["x"].device))
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _scalings(model: Any) -> Iterator[_Scaling]:
    for module in model.original_model.modules():
        kinds, config = vars(module).get("rope_type"), vars(module).get("config")
        if kinds is None or config is None:
            continue
        of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in of_layers.items():
            settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
            if kind == _LONGROPE and settings["long_factor"] != settings["short_factor"]:
                yield _Scaling(module, kind, int(settings["original_max_position_embeddings"]))
            elif kind is not None and _DYNAMIC in kind:
                yield _Scaling(module, _DYNAMIC, int(module.original_max_seq_len))
