"""Loss of pruned models on running text, and seconds and bytes of a generated token."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from matlens import metrics
from matlens.data.examples import Examples
from matlens.data.overlap import sentence_keys, warn_of_overlap
from matlens.data.readers import check_own_tokens
from matlens.errors import InputError, PositiveInt, checked
from matlens.ffn.perplexity import TextLosses, warn_of_few
from matlens.io.tables import result_row, result_table
from matlens.metrics import Estimate
from matlens.models.identity import ModelIdentity
from matlens.models.randomness import is_random
from matlens.numerics import in_float64, log_softmax
from matlens.parallel import Bar
from matlens.pruning.layouts import full_windows, plain_copy
from matlens.pruning.pruned import Pruned

if TYPE_CHECKING:
    import pandas as pd
    from transformer_lens.model_bridge import TransformerBridge

EXPERIMENT = "pruning"
_TOKENS = 1024  # of a batch, each with its distribution over the vocabulary
_PROMPT, _WRITTEN = 8, 32
_FIRST_ID = 3  # of the prompt, after ids that are mostly special


class ReadText(NamedTuple):
    """Losses of a model on texts, and its top token after each token but the last."""

    losses: TextLosses
    top: Int[Tensor, "n length_less_1"]

    def compare(self, original: ReadText) -> dict[str, Estimate]:
        """``perplexity``, its ``ratio`` to the original's, and ``agreement`` of the top tokens."""
        return {
            "perplexity": self.losses.perplexity(),
            "ratio": self.losses.ratio(original.losses),
            "agreement": metrics.proportion((self.top == original.top).flatten()),
        }


@checked
def compare_pruned(
    model: TransformerBridge, pruned: Pruned, windows: Examples, *, progress: bool = True
) -> pd.DataFrame:
    """Perplexity of the original and the pruned model on the same windows, and their agreement.

    One row each: ``perplexity`` of the methods ``original`` and ``pruned``, the ``ratio`` of the two, and
    ``agreement``, the fraction of positions with the same top token; with 95% intervals. The windows are of
    running text that was not used for calibration, at least two; those shorter than the first are not read.
    """
    check_made_of(pruned, model)
    check_own_tokens(model, windows)
    warn_of_few(len(full_windows(windows)))
    warn_of_overlap([pruned.provenance], windows, "The pruned model's matrices")
    original = read_text(plain_copy(model), windows, desc="original model", progress=progress)
    shorter = read_text(pruned.model, windows, desc="pruned model", progress=progress)
    estimates = [("original", "perplexity", original.losses.perplexity())]
    estimates += [("pruned", *estimate) for estimate in shorter.compare(original).items()]
    return _table(pruned, str(windows.provenance.get("corpus", "unnamed")), estimates)


def check_made_of(pruned: Pruned, model: TransformerBridge) -> None:
    """Refuse a pruned model that was made from another model."""
    identity = ModelIdentity.from_model(model)
    pruned.provenance.check_same(identity, ours="the pruned model", theirs="the model")


def _table(pruned: Pruned, corpus: str, estimates: Iterable[tuple[str, str, Estimate]]) -> pd.DataFrame:
    """A row for each method, metric and estimate of one pruned model on a corpus, ``""`` for none."""
    rows = [
        result_row(
            EXPERIMENT, model=pruned.provenance.identity.name, corpus=corpus, method=method, layer=None,
            target=None, metric=metric, estimate=estimate, n_removed=len(pruned.blocks),
            fold=pruned.method,
        )
        for method, metric, estimate in estimates
    ]  # fmt: skip
    return result_table(rows, "n_removed", "fold")


def evaluation_tokens(windows: Examples) -> Int[Tensor, "n length"]:
    """The tokens of the full windows of a text to evaluate on, at least two."""
    tokens = full_windows(windows)
    if len(tokens) < 2:
        raise InputError(
            f"The evaluation text must have at least two windows of {tokens.shape[1]} tokens, got one. Use "
            "more text, or shorter windows."
        )
    return tokens


@checked
@torch.no_grad()
def read_text(model: Any, windows: Examples, *, desc: str = "reading", progress: bool = True) -> ReadText:
    """Losses and top tokens of a plain model on the full windows of a text, two or more."""
    if is_random(model.modules()):
        raise InputError("model must be in eval mode, got training mode with dropout. Call model.eval().")
    tokens = evaluation_tokens(windows)
    losses, top = [], []
    with Bar(total=len(tokens), desc=desc, unit="window", disable=not progress) as bar:
        for part in tokens.split(max(1, _TOKENS // tokens.shape[1])):
            part = part.to(model.device)
            log_p = log_softmax(model(part, use_cache=False).logits[:, :-1].float())
            of_next = log_p.gather(2, part[:, 1:, None])[..., 0]
            if not bool(of_next.isfinite().all()):
                raise InputError(
                    "The model must give finite probabilities, got others. Prune it with a larger penalty."
                )
            losses.append(-in_float64(of_next).sum(1).cpu())
            top.append(log_p.argmax(-1).cpu())
            bar.update(len(part))
    total = torch.cat(losses).numpy()
    texts = sentence_keys(windows)[windows.lengths == tokens.shape[1]]
    losses_of = TextLosses(total, np.full(len(total), tokens.shape[1] - 1), texts)
    return ReadText(losses_of, torch.cat(top))


class Timed(NamedTuple):
    """Seconds per token in each round, and bytes of the weights and of the cache per token."""

    rounds: list[float]
    weights: int
    cache: int

    def estimates(self, reference: Timed | None = None) -> dict[str, Estimate]:
        """Medians and bytes by metric; ``reference`` was timed in the same rounds."""
        medians = {"seconds": median(self.rounds)}
        if reference is not None:
            medians["seconds ratio"] = median(
                ours / theirs for ours, theirs in zip(self.rounds, reference.rounds, strict=True)
            )
        return {
            **{name: Estimate.without_interval(value, len(self.rounds)) for name, value in medians.items()},
            "weights": Estimate.without_interval(self.weights, 1),
            "cache": Estimate.without_interval(self.cache, 1),
        }


@checked
def compare_costs(model: TransformerBridge, pruned: Pruned, *, rounds: PositiveInt = 5) -> pd.DataFrame:
    """Time and memory per generated token of the original and the pruned model, timed in turns.

    Rows of the methods ``original`` and ``pruned``, of no corpus: ``seconds`` per token, the median over
    rounds of 32 tokens; ``weights`` and ``cache`` (per token), in bytes; and of the pruned model the
    ``seconds ratio``, the median over rounds of its time relative to the original model's.
    """
    check_made_of(pruned, model)
    original, shorter = time_in_turns([plain_copy(model), pruned.model], rounds=rounds)
    estimates = (
        (method, metric, estimate)
        for method, of_method in (("original", original.estimates()), ("pruned", shorter.estimates(original)))
        for metric, estimate in of_method.items()
    )
    return _table(pruned, "", estimates)


@checked
@torch.no_grad()
def time_in_turns(models: Sequence[Any], *, rounds: PositiveInt = 5) -> list[Timed]:
    """Time several plain models in turns, so that a slow machine slows all of them."""
    timed = [Timed([], sum(w.numel() * w.element_size() for w in model.parameters()), 0) for model in models]
    for _ in range(rounds):
        for i, model in enumerate(models):
            config = model.config.get_text_config()
            context = getattr(config, "max_position_embeddings", None) or _PROMPT + _WRITTEN
            length = min(_PROMPT, context // 2)
            count = min(_WRITTEN, context - length)
            prompt = ((torch.arange(length)[None] + _FIRST_ID) % config.vocab_size).to(model.device)
            took, stored = _written(model, prompt, count)
            timed[i].rounds.append(took / count)
            timed[i] = timed[i]._replace(cache=stored // (length + count))
    return timed


def _written(model: Any, prompt: torch.Tensor, n_tokens: int) -> tuple[float, int]:
    """Seconds of generation after a prompt, and bytes of the cache at the end."""
    given = model(prompt, use_cache=True)
    cache: Any = getattr(given, "past_key_values", None)
    token = given.logits[:, -1:].argmax(-1)
    if not hasattr(cache, "layers"):
        raise InputError(f"{type(model).__name__} must have a cache of keys and values, as GPT-2 has.")
    int(token)  # wait for the device
    start = time.perf_counter()
    for _ in range(n_tokens):
        given = model(token, past_key_values=cache, use_cache=True)
        cache, token = given.past_key_values, given.logits[:, -1:].argmax(-1)
    int(token)
    took = time.perf_counter() - start
    stored = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return took, sum(each.numel() * each.element_size() for each in stored if each is not None)
