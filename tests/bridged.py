"""A batch of two texts, and what a bridge or a plain model makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge

TOKENS = torch.tensor([[7, 3, 41, 12, 12, 59, 30, 22, 8, 17], [9, 5, 2, 2, 44, 31, 6, 1, 1, 1]])
MASK = torch.tensor([[1] * 10, [1] * 7 + [0] * 3])


def boot(folder: Path) -> TransformerBridge:
    return TransformerBridge.boot_transformers(str(folder), device="cpu")


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    """Of a batch in which one text is shorter, at the tokens of both."""
    given = {"attention_mask": MASK}
    if isinstance(model, TransformerBridge):
        return model(TOKENS, return_type="logits", **given)[MASK.bool()]
    return model(TOKENS, **given).logits[MASK.bool()]
