"""Masked-LM models (BERT, RoBERTa), with a dense layer and a norm in the head."""

from __future__ import annotations

from typing import Any

from torch import nn

from matlens.models.registry import Family, register


@register
class MaskedLM(Family):
    """Models with TransformerLens' ``mlm_head``."""

    def head(self, model: Any) -> list[nn.Module] | None:
        """The whole head."""
        if not hasattr(model, "mlm_head"):
            return None
        # BERT keeps its activation next to the dense layer; RoBERTa's is GELU.
        predictions = getattr(getattr(model.original_model, "cls", None), "predictions", None)
        activation = getattr(getattr(predictions, "transform", None), "transform_act_fn", nn.GELU())
        dense, norm, decoder = (
            part.original_component for part in (model.mlm_head, model.ln_final, model.unembed)
        )
        return [dense, activation, norm, decoder]
