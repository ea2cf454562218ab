"""Continuations of prompts by a pruned model, and measures of them.

Sampled continuations have the same random numbers for every model (Gumbel's trick), so models are compared
prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens import metrics
from matlens.data import Examples
from matlens.ffn import TextLosses
from matlens.metrics import Estimate
from matlens.numerics import log_softmax

N_GRAM = 4  # whose repetitions are counted


def beginnings(texts: Iterable[Examples], n_tokens: int) -> Int[Tensor, "n n_tokens"]:
    """The first tokens of each full window of texts, or its first half if it is too short."""
    tokens = [each for text in texts for each in np.split(text.tokens, text.offsets[1:-1])]
    longest = max(map(len, tokens))
    full = [each[: min(n_tokens, longest // 2)] for each in tokens if len(each) == longest]
    return torch.from_numpy(np.stack(full)).long()


@torch.inference_mode()
def continue_prompts(
    model: Any, prompts: Int[Tensor, "n length"], n_tokens: int, *, seed: int | None = None
) -> Int[Tensor, "n n_tokens"]:
    """Continue prompts by a fixed number of tokens: the top ones, or with a seed sampled at temperature 1."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    ids, cache, written = prompts.to(model.device), None, []
    for _ in range(n_tokens):
        given = model(ids, past_key_values=cache, use_cache=True)
        cache, logits = given.past_key_values, given.logits[:, -1].double().cpu()
        if generator is not None:
            uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
            logits -= (-uniform.log()).log()
        ids = logits.argmax(-1, keepdim=True).to(model.device)
        written.append(ids.cpu())
    return torch.cat(written, dim=1)


@torch.inference_mode()
def continuation_losses(
    original: Any, prompts: Int[Tensor, "n length"], written: Int[Tensor, "n n_tokens"]
) -> Float[Tensor, "n n_tokens"]:
    """``-ln p`` of each written token by the original model, which reads the prompt and the tokens before."""
    tokens = torch.cat([prompts, written], dim=1).to(original.device)
    log_p = log_softmax(original(tokens, use_cache=False).logits[:, prompts.shape[1] - 1 : -1].float())
    return -log_p.gather(2, tokens[:, prompts.shape[1] :, None])[..., 0].double().cpu()


def measures(
    written: Int[Tensor, "n n_tokens"], losses: Float[Tensor, "n n_tokens"], ends: Collection[int]
) -> dict[str, Float[Tensor, " n"]]:
    """Measures of each continuation up to its first end-of-text token, which counts as a token.

    ``loss``, the mean in nats; ``distinct-1`` to ``distinct-3``, the fraction of n-grams that are different;
    ``repeated 4-grams``, the fraction that occurred before; and ``length``.
    """
    lists = [tokens[: _length(tokens, ends)] for tokens in written.tolist()]
    found = {
        "loss": [float(loss[: len(tokens)].mean()) for loss, tokens in zip(losses, lists, strict=True)],
        **{f"distinct-{n}": [distinct(tokens, n) for tokens in lists] for n in range(1, N_GRAM)},
        f"repeated {N_GRAM}-grams": [1 - distinct(tokens, N_GRAM) for tokens in lists],
        "length": [float(len(tokens)) for tokens in lists],
    }
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def _length(tokens: list[int], ends: Collection[int]) -> int:
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))


def distinct(tokens: list[int], n: int) -> float:
    """The fraction of n-grams that are different; 1 if there are none."""
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def compare(metric: str, ours: Tensor, theirs: Tensor | None = None) -> Estimate:
    """The mean over continuations, or the mean difference to others of the same prompts.

    Of the ``loss`` its exponential: perplexity, or a ratio of perplexities.
    """
    if metric != "loss":
        return metrics.mean(ours if theirs is None else ours - theirs)
    alone, others = (
        None if each is None else TextLosses(each.numpy(), np.ones(len(each), int)) for each in (ours, theirs)
    )
    assert alone is not None
    return alone.perplexity() if others is None else alone.ratio(others)
