"""What a token costs where one is written after the other: time, taken by turns, and bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from matlens.errors import InputError, check_int, checked, short
from matlens.metrics import Estimate
from matlens.pruning.evaluation import check_made_of, trial_table
from matlens.pruning.layouts import plain_copy
from matlens.pruning.pruned import Pruned

if TYPE_CHECKING:
    import pandas as pd
    from transformer_lens.model_bridge import TransformerBridge

COSTS = ("seconds", "seconds ratio", "weights", "cache")
"""Metrics of rows that are about no text."""
_PROMPT, _WRITTEN = 8, 32
_FIRST_ID = 3  # of the prompt, behind the ids that are mostly special


class Speed(NamedTuple):
    """What a token costs where one is written after the other, with the key-value cache.

    Attributes
    ----------
    seconds
        For a token, the median of several rounds.
    weights
        Bytes of the weights.
    cache
        Bytes of the cache for a token.
    """

    seconds: float
    weights: int
    cache: int


class Timed(NamedTuple):
    """Seconds a token in each round, and bytes of the weights and of the cache for a token."""

    rounds: list[float]
    weights: int
    cache: int

    def estimates(self, beside: Timed | None = None) -> dict[str, Estimate]:
        """Medians and bytes by the name of the metric; ``beside`` is what was timed in the same rounds."""
        medians = {"seconds": median(self.rounds)}
        if beside is not None:
            medians["seconds ratio"] = median(
                ours / theirs for ours, theirs in zip(self.rounds, beside.rounds, strict=True)
            )
        return {
            **{name: Estimate.without_interval(value, len(self.rounds)) for name, value in medians.items()},
            "weights": Estimate.without_interval(self.weights, 1),
            "cache": Estimate.without_interval(self.cache, 1),
        }


@checked
def speed(model: Any, *, n_tokens: int | None = None, rounds: int = 3) -> Speed:
    """Time the writing of tokens one by one, after a prompt of eight.

    Parameters
    ----------
    model
        A plain model.
    n_tokens
        How many are written in a round, by default 32, or as many as the context has room for. The prompt is
        shorter in a context of fewer than sixteen tokens: it takes half of it.
    rounds
        How often; the median counts.

    Raises
    ------
    InputError
        It is no plain model that writes tokens with a cache, or its context has no room for so many.
    """
    (timed,) = by_turns([model], n_tokens=n_tokens, rounds=rounds)
    return Speed(median(timed.rounds), timed.weights, timed.cache)


@checked
def compare_costs(model: TransformerBridge, pruned: Pruned, *, rounds: int = 5) -> pd.DataFrame:
    """What a token costs the whole and the pruned model, timed by turns.

    Rows of the methods ``whole`` and ``pruned``, of no corpus: ``seconds`` of a token, the median of the
    rounds; ``weights`` and ``cache`` (for a token), in bytes; and of the pruned model the ``seconds ratio``,
    the median of what it took of the whole model's time in the same round.

    Parameters
    ----------
    model
        The whole model.
    pruned
        What was made of it.
    rounds
        How often each of them writes 32 tokens.

    Raises
    ------
    InputError
        The pruned model was made of another, or see `speed`.
    """
    check_made_of(pruned, model)
    whole, rest = by_turns([plain_copy(model), pruned.model], rounds=rounds)
    estimates = (
        (method, metric, estimate)
        for method, of_method in (("whole", whole.estimates()), ("pruned", rest.estimates(whole)))
        for metric, estimate in of_method.items()
    )
    return trial_table(pruned, "", estimates)


@torch.inference_mode()
def by_turns(models: Sequence[Any], *, n_tokens: int | None = None, rounds: int) -> list[Timed]:
    """Time several plain models, each once in every round, so that what slows the machine slows them all."""
    check_int(rounds, "rounds", min=1)
    prompts = [_prompt(model) for model in models]
    counts = [_n_tokens(model, n_tokens) for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    caches = [0 for _ in models]
    for _ in range(rounds):
        for place, (model, prompt, count) in enumerate(zip(models, prompts, counts, strict=True)):
            took, held = _written(model, prompt, count)
            seconds[place].append(took / count)
            caches[place] = held // (prompt.shape[1] + count)
    weights = [sum(each.numel() * each.element_size() for each in model.parameters()) for model in models]
    return [Timed(*of_model) for of_model in zip(seconds, weights, caches, strict=True)]


def _prompt(model: Any) -> torch.Tensor:
    """Tokens for a model to write after."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise InputError(f"model is {short(model)}. Expected a plain model of transformers.")
    name, config = type(model).__name__, model.config.get_text_config()
    if model.get_output_embeddings() is None or getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{name} does not write one token after the other: it has no head that predicts the next token, "
            "or reads a source too. Expected a decoder with its head, such as GPT2LMHeadModel."
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and context < 2:
        raise InputError(
            f"{name} has a context of {context} token, which leaves no room to write one. Expected 2 or more."
        )
    length = _PROMPT if context is None else min(_PROMPT, context // 2)
    return ((torch.arange(length)[None] + _FIRST_ID) % config.vocab_size).to(model.device)


def _n_tokens(model: Any, wanted: int | None) -> int:
    """How many tokens a model writes in a round."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = math.inf if context is None else context - min(_PROMPT, context // 2)
    return check_int(min(_WRITTEN, room) if wanted is None else wanted, "n_tokens", min=1, max=room)


def _written(model: Any, prompt: torch.Tensor, n_tokens: int) -> tuple[float, int]:
    """Seconds that tokens take after a prompt, and bytes of the cache then."""
    given = model(prompt, use_cache=True)
    cache: Any = getattr(given, "past_key_values", None)
    token = given.logits[:, -1:].argmax(-1)
    if not hasattr(cache, "layers"):
        raise InputError(
            f"{type(model).__name__} keeps no cache of keys and values. Expected a decoder that does, such "
            "as GPT-2 or Llama."
        )
    int(token)  # a device is done with all before it
    start = time.perf_counter()
    for _ in range(n_tokens):
        given = model(token, past_key_values=cache, use_cache=True)
        cache, token = given.past_key_values, given.logits[:, -1:].argmax(-1)
    int(token)
    took = time.perf_counter() - start
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return took, sum(each.numel() * each.element_size() for each in held if each is not None)
