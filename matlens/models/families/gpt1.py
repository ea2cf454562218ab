"""OpenAI's first GPT, whose blocks return lists and apply their own causal mask.

A bridge does not send a list through the hook for a block's output, and its attention adds nothing to the
mask that it is given, which hides padding alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from matlens.models.registry import Family, Repair, register

_BLOCKS = "transformers.models.openai.modeling_openai"


@register
class FirstGPT(Family):
    """OpenAI's first GPT."""

    def repairs(self, model: Any) -> list[Repair]:
        """Masks hide later tokens, and blocks return tuples."""
        blocks = getattr(model, "blocks", ())
        ours = [block for block in blocks if type(block.original_component).__module__ == _BLOCKS]
        return [
            *(Repair(block.attn, hide_later) for block in ours),
            *(Repair(block, return_tuple, after=True) for block in ours),
        ]


def hide_later(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Let a mask that hides the same from every token hide later ones too."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape[-2] != 1:
        return None
    length = mask.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return args, {**kwargs, "attention_mask": mask.masked_fill(later, torch.finfo(mask.dtype).min)}


def return_tuple(module: Any, args: Any, output: Any) -> Any:
    """Send the first part of a list through the block's hook, and return the list as other blocks do."""
    return (module.hook_out(output[0]), *output[1:]) if isinstance(output, list) else None
