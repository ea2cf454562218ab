"""The vectors of attention heads, which maps from the input of attention can replace."""

from __future__ import annotations

from matlens.errors import InputError
from matlens.models.layout import ModelLayout


def head_pairs(layout: ModelLayout) -> list[tuple[str, str]]:
    """What enters attention, and what its heads give, in every block; refused where unknown."""
    if "attn_in" not in layout.kinds:
        raise InputError(f"The attention of these blocks ({layout.wiring.name}) is not known.")
    pairs = []
    for layer in range(layout.n_layers):
        target = layout.resolve(f"z.{layer}")
        if len(layout.hooks[layout.hook(target)].shape) != 2:
            raise InputError(f"{target} does not carry a vector for each head. Expected [heads, width].")
        pairs.append((f"attn_in.{layer}", str(target)))
    return pairs


def head_outputs(layout: ModelLayout) -> list[str]:
    """What the heads give in every block; nothing where that cannot be seen."""
    try:
        return [target for _, target in head_pairs(layout)]
    except InputError:
        return []
