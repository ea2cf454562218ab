"""Attention replaced by maps, for single vectors (paper A, appendix A)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, checked
from matlens.linear.mapsets import MapSet
from matlens.models.layout import ModelLayout, probe_inputs
from matlens.models.sites import CROSS, STREAM, Site, check_finite
from matlens.patching.replacements import Replacement, mat_attn, resolve_replacements
from matlens.patching.variants import run_to_layers

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@checked
@torch.inference_mode()
def attend_nowhere(
    model: TransformerBridge, maps: MapSet, h: Float[Tensor, "n d_model"], first: int, last: int
) -> Float[Tensor, "n d_model"]:
    """``mat_attn`` from layer ``first`` to ``last`` for single vectors.

    The map of attention reads no other token, so each vector is run as a sentence of one token. The blocks
    before ``first`` are skipped.
    """
    if ModelLayout.from_model(model).wiring is CROSS:
        raise InputError("These blocks also read the encoder. Use matlens.patched with mat_attn.")
    check_finite(h, str(Site(STREAM, first)))
    vectors = Replacement(lambda _: h[:, None], Site(STREAM, 0), Site(STREAM, first))
    replacements = resolve_replacements(model, [vectors, *mat_attn(maps, first, last)])
    inputs = probe_inputs(model)[0][:1, :1].repeat(len(h), 1), {"use_cache": False}
    return run_to_layers(model, inputs, replacements, [last])[last][:, 0].float()
