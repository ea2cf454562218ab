"""Losses of a model under Self-Debiasing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from control.baselines import SelfDebiasing, prefixed_tokens
from matlens import InputError
from matlens.data import Examples
from matlens.ffn import TextLosses
from matlens.numerics import in_float64, log_softmax

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@torch.inference_mode()
def debiased_losses(
    model: TransformerBridge, texts: Examples, debiasing: SelfDebiasing, *, batch_tokens: int = 512
) -> TextLosses:
    """`matlens.ffn.text_losses` under Self-Debiasing.

    Raises InputError if a text with a prefix is longer than the model's context.
    """
    longest, max_tokens = int(texts.lengths.max()), debiasing.max_tokens(model)
    if longest > max_tokens:
        raise InputError(
            f"texts must have at most {max_tokens} tokens to fit into the context with a prefix, got "
            f"{longest}. Use shorter texts or windows."
        )
    total = np.zeros(len(texts))
    for batch in texts.batches(batch_tokens):
        plain = _logits(model, batch.tokens, batch.mask)
        log_p = debiasing.log_probs(plain, _likeliest(model, batch, debiasing))
        of_next = log_p.gather(2, batch.tokens[:, 1:, None].to(log_p.device))[..., 0]
        real = batch.mask[:, 1:].bool().to(log_p.device)
        if not bool(of_next[real].isfinite().all()):
            raise InputError(
                "The model must give finite probabilities, got NaN or infinity. Load it in float32."
            )
        lost = -in_float64(of_next.where(real, torch.zeros_like(of_next))).sum(1)
        total[batch.index] = lost.cpu().numpy()
    return TextLosses(total, texts.lengths - 1)


def _logits(model: TransformerBridge, tokens: Tensor, mask: Tensor) -> Float[Tensor, "batch places d_vocab"]:
    """Logits after every token but the last."""
    device = model.cfg.device
    return model(tokens.to(device), attention_mask=mask.to(device), return_type="logits")[:, :-1].float()


def _likeliest(
    model: TransformerBridge, batch: Any, debiasing: SelfDebiasing
) -> Float[Tensor, "batch places d_vocab"]:
    """The largest probability of each token after any prefix, at every position but the first."""
    likeliest = torch.zeros(())
    for prefix in debiasing.prefixes:
        rows = [prefixed_tokens(model.tokenizer, prefix, row) for row in batch.tokens.tolist()]
        added = len(rows[0]) - batch.tokens.shape[1]
        mask = torch.cat([torch.ones(len(rows), added, dtype=batch.mask.dtype), batch.mask], 1)
        p = log_softmax(_logits(model, torch.tensor(rows), mask)[:, added:]).exp()
        likeliest = torch.maximum(p, likeliest.to(p.device), out=p)
    return likeliest
