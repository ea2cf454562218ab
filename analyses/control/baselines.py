"""Baselines of steering, as logits processors: WordFilter and Self-Debiasing.

WordFilter (Gehman et al. 2020) bans words. Self-Debiasing (Schick et al. 2021, arXiv 2103.00453) prefixes the
text with a description of toxic text, and lowers the probability of tokens that the prefix makes likelier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from studies import Model
from torch import Tensor
from transformers import LogitsProcessor, NoBadWordsLogitsProcessor

from control.graders import ATTRIBUTES
from matlens import InputError
from matlens.data import Examples
from matlens.errors import check_choice, short
from matlens.ffn import TextLosses
from matlens.numerics import in_float64, log_softmax

DECAY, FLOOR = 50.0, 0.01  # the authors' defaults
_TEMPLATE = "The following text contains {}:\n"


class SelfDebiasing(LogitsProcessor):
    """Lower the probability of tokens that a prefix describing toxic text makes likelier.

    With ``p`` the model's distribution after ``x`` and ``p_y`` that after ``x`` with the prefix of ``y``,
    ``Delta(w) = min_y p(w) - p_y(w)`` and ``p~(w) ∝ alpha(Delta(w)) p(w)``, where ``alpha`` is 1 for
    ``Delta >= 0`` and ``max(exp(decay * Delta), floor)`` otherwise. (The floor is in the authors' code, not
    in their paper.)

    The processor takes a batch whose first rows are the prompts, followed by the same prompts after each of
    `prefixes`, and gives all rows of one prompt the same logits, so that they continue alike.
    `continue_prompts` makes such batches.
    """

    def __init__(
        self, attributes: Sequence[str] = tuple(ATTRIBUTES), *, decay: float = DECAY, floor: float = FLOOR
    ) -> None:
        for name in attributes:
            check_choice(name, ATTRIBUTES, "attribute")
        self.prefixes = tuple(_TEMPLATE.format(ATTRIBUTES[name]) for name in attributes)
        self.decay, self.floor = decay, floor

    def log_probs(
        self, plain: Float[Tensor, "... d_vocab"], announced: Float[Tensor, "... d_vocab"]
    ) -> Float[Tensor, "... d_vocab"]:
        """``ln p~`` from the logits of a text, and the largest probability after any prefix."""
        log_p = log_softmax(plain.float())
        delta = (log_p.exp() - announced).clamp(max=0)
        return log_softmax(log_p + (self.decay * delta).clamp(min=math.log(self.floor)))

    def max_tokens(self, model: Model) -> int:
        """Number of tokens of a text that fit into the context after the longest prefix."""
        longest = max(len(_encode(model.tokenizer, prefix)) for prefix in self.prefixes)
        return max(min(model.cfg.n_ctx, model.tokenizer.model_max_length) - longest, 0)

    def __call__(
        self, input_ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows d_vocab"]
    ) -> Float[Tensor, "rows d_vocab"]:
        """Give all rows of a prompt its logits ``ln p~``."""
        groups = scores.unflatten(0, (1 + len(self.prefixes), -1))
        announced = log_softmax(groups[1:].float()).amax(0).exp()
        return self.log_probs(groups[0], announced).repeat(len(groups), 1)


def word_filter(tokenizer: Any, words: Sequence[str]) -> NoBadWordsLogitsProcessor:
    """Ban words, with or without a leading space, in any usual case.

    A word, or phrase, is banned as a sequence of tokens; if it is a single token, longer words that begin
    with that token are banned too. Raises InputError if the tokenizer has no tokens for a word.
    """
    banned: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.strip()
        forms = (bare, bare.lower(), bare.capitalize(), bare.upper())
        variants = [_encode(tokenizer, space + form) for form in forms for space in ("", " ")]
        known = [tokens for tokens in variants if tokens and tokenizer.unk_token_id not in tokens]
        if not bare or not known:
            raise InputError(f"words must have tokens in the vocabulary, got {short(word)}.")
        banned |= dict.fromkeys(known)
    return NoBadWordsLogitsProcessor([list(tokens) for tokens in banned])


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def prefixed_tokens(tokenizer: Any, prefix: str, tokens: Sequence[int]) -> list[int]:
    """Tokens of a text after a prefix, with the BOS token first if the text has it."""
    start = 1 if len(tokens) and tokens[0] == tokenizer.bos_token_id else 0
    return [*tokens[:start], *_encode(tokenizer, prefix), *tokens[start:]]


# Losses under Self-Debiasing


@torch.inference_mode()
def debiased_losses(
    model: Model, texts: Examples, debiasing: SelfDebiasing, *, batch_tokens: int = 512
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


def _logits(model: Model, tokens: Tensor, mask: Tensor) -> Float[Tensor, "batch places d_vocab"]:
    """Logits after every token but the last."""
    device = model.cfg.device
    return model(tokens.to(device), attention_mask=mask.to(device), return_type="logits")[:, :-1].float()


def _likeliest(model: Model, batch: Any, debiasing: SelfDebiasing) -> Float[Tensor, "batch places d_vocab"]:
    """The largest probability of each token after any prefix, at every position but the first."""
    likeliest = torch.zeros(())
    for prefix in debiasing.prefixes:
        rows = [prefixed_tokens(model.tokenizer, prefix, row) for row in batch.tokens.tolist()]
        added = len(rows[0]) - batch.tokens.shape[1]
        mask = torch.cat([torch.ones(len(rows), added, dtype=batch.mask.dtype), batch.mask], 1)
        p = log_softmax(_logits(model, torch.tensor(rows), mask)[:, added:]).exp()
        likeliest = torch.maximum(p, likeliest.to(p.device), out=p)
    return likeliest
