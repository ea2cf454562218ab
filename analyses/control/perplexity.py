"""Losses of a model under Self-Debiasing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from control.baselines import SelfDebiasing, announced_tokens
from matlens import InputError
from matlens.data import Examples
from matlens.data.examples import Batch
from matlens.ffn import TextLosses
from matlens.ffn.perplexity import BATCH_TOKENS, next_token_logits, sum_losses
from matlens.numerics import log_softmax

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@torch.inference_mode()
def debiased_losses(
    model: TransformerBridge, texts: Examples, debiasing: SelfDebiasing, *, batch_tokens: int = BATCH_TOKENS
) -> TextLosses:
    """`matlens.ffn.text_losses` under Self-Debiasing.

    Raises InputError if a text and an announcement are longer than the model's context.
    """
    longest, room = int(texts.lengths.max()), debiasing.room(model)
    if longest > room:
        raise InputError(
            f"A text has {longest} tokens, and after an announcement there is room for {room} in the "
            "model's context. Expected shorter texts or windows."
        )
    total = np.zeros(len(texts))
    for batch in texts.batches(batch_tokens):
        plain = next_token_logits(model, batch.tokens, batch.mask)
        log_probs = partial(_log_probs, debiasing, plain, _likeliest(model, batch, debiasing))
        total[batch.index] = sum_losses(batch, log_probs).cpu().numpy()
    return TextLosses(total, texts.lengths - 1)


def _log_probs(debiasing: SelfDebiasing, plain: Tensor, likeliest: Tensor, places: slice) -> Tensor:
    return debiasing.log_probs(plain[:, places], likeliest[:, places])


def _likeliest(
    model: TransformerBridge, batch: Batch, debiasing: SelfDebiasing
) -> Float[Tensor, "batch length_less_1 d_vocab"]:
    """The largest probability that each token has after any announcement, at every place but the first."""
    likeliest = torch.zeros(())
    for prefix in debiasing.prefixes:
        rows = [announced_tokens(model.tokenizer, prefix, row) for row in batch.tokens.tolist()]
        added = len(rows[0]) - batch.tokens.shape[1]
        mask = torch.cat([torch.ones(len(rows), added, dtype=batch.mask.dtype), batch.mask], 1)
        p = log_softmax(next_token_logits(model, torch.tensor(rows), mask)[:, added:]).exp()
        likeliest = torch.maximum(p, likeliest.to(p.device), out=p)
    return likeliest
