"""Attention replaced by maps, for single vectors (paper A, appendix A)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from matlens import InputError, MapSet, mat_attn, patched
from matlens.models import ModelLayout, Site
from matlens.patching import Replacement

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

_ROWS = 256  # vectors per batch


@torch.inference_mode()
def attend_nowhere(
    model: TransformerBridge, maps: MapSet, h: Float[Tensor, "n d_model"], first: int, last: int
) -> Float[Tensor, "n d_model"]:
    """``mat_attn`` from layer ``first`` to ``last`` for single vectors.

    The map of attention does not read other tokens, so each vector is run as a sentence of one token. The
    blocks before ``first`` are skipped.
    """
    layout = ModelLayout.from_model(model)
    if layout.wiring.name == "cross-attention":
        raise InputError(
            "model must have blocks without cross-attention, got a decoder that reads an encoder. Use "
            "matlens.patched with mat_attn."
        )
    parts, outputs = iter(h.split(_ROWS)), list[Tensor]()
    vectors = Replacement(lambda _: next(parts)[:, None], Site("h", 0), Site("h", first))

    def store(value: Tensor, hook: Any) -> None:
        outputs.append(value[:, 0].float().cpu())

    with (
        patched(model, [vectors, *mat_attn(maps, first, last)]),
        model.hooks(fwd_hooks=[(layout.hook(layout.stream[last]), store)]),
    ):
        for part in h.split(_ROWS):
            tokens = torch.ones(len(part), 1, dtype=torch.int64, device=model.cfg.device)
            model(tokens, return_type=None, use_cache=False)
    return torch.cat(outputs)
