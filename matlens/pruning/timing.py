"""What a token costs where one is written after the other: time, taken by turns, and bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from matlens.errors import InputError, PositiveInt, checked
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
def compare_costs(model: TransformerBridge, pruned: Pruned, *, rounds: PositiveInt = 5) -> pd.DataFrame:
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
        The pruned model was made of another, or keeps no cache.
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
def by_turns(models: Sequence[Any], *, rounds: int) -> list[Timed]:
    """Time several plain models, each once in every round, so that what slows the machine slows them all."""
    sizes = [_lengths(model) for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    caches = [0 for _ in models]
    for _ in range(rounds):
        for place, (model, (length, count)) in enumerate(zip(models, sizes, strict=True)):
            vocab_size = model.config.get_text_config().vocab_size
            prompt = ((torch.arange(length)[None] + _FIRST_ID) % vocab_size).to(model.device)
            took, held = _written(model, prompt, count)
            seconds[place].append(took / count)
            caches[place] = held // (length + count)
    weights = [sum(each.numel() * each.element_size() for each in model.parameters()) for model in models]
    return [Timed(*of_model) for of_model in zip(seconds, weights, caches, strict=True)]


def _lengths(model: Any) -> tuple[int, int]:
    """Tokens of the prompt, and tokens written after it; both fit into the context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return _PROMPT, _WRITTEN
    if context < 2:
        raise InputError(f"{type(model).__name__} has a context of {context} token, which cannot be timed.")
    prompt = min(_PROMPT, context // 2)
    return prompt, min(_WRITTEN, context - prompt)


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
