"""Tables of training runs: losses by update, and perplexity compared with n-grams."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from torch import nn

from matlens import metrics
from matlens.io import result_row, result_table
from matlens.metrics import Estimate
from training.running import TrainingRun, sequence_losses

# N-grams


class NgramModel:
    """An n-gram model with interpolated Kneser-Ney smoothing (Chen and Goodman 1999).

    ``p(w | h) = (c(h w) - D)+ / c(h) + D n(h) / c(h) * p(w | shorter h)``, where ``n(h)`` is how many
    different tokens follow ``h``. At the longest ``h``, ``c`` counts how often; at shorter ones,
    behind how many different tokens. Below that stands the uniform distribution. For each length
    ``D = n1 / (n1 + 2 n2)``, of how many n-grams are there once and twice.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], *, d_vocab: int, order: int = 3) -> None:
        self.order, self.d_vocab = order, d_vocab
        # Per length, from 1 on: counts of tokens behind each context.
        self._counts: list[dict[tuple[int, ...], Counter[int]]] = [
            defaultdict(Counter) for _ in range(self.order)
        ]
        preceded: list[set[tuple[int, ...]]] = [set() for _ in range(self.order)]
        for tokens in sequences:
            for i in range(1, len(tokens)):
                for length in range(1, self.order + 1):
                    if i - length + 1 < 0:
                        continue
                    gram = tuple(tokens[i - length + 1 : i + 1])
                    if length == self.order or i - length < 0:
                        # The longest, or one at the beginning, which nothing stands before.
                        self._counts[length - 1][gram[:-1]][gram[-1]] += 1
                    elif (longer := tuple(tokens[i - length : i + 1])) not in preceded[length - 1]:
                        preceded[length - 1].add(longer)
                        self._counts[length - 1][gram[:-1]][gram[-1]] += 1
        self._totals = [
            {context: sum(c.values()) for context, c in counts.items()} for counts in self._counts
        ]
        self._discounts = [_discount(counts.values()) for counts in self._counts]

    def probability(self, context: Sequence[int], token: int) -> float:
        """Probability of a token after the last ``order - 1`` tokens."""
        p = 1 / self.d_vocab
        for length in range(1, min(self.order, len(context) + 1) + 1):
            given = tuple(context[len(context) - length + 1 :])
            behind = self._counts[length - 1].get(given)
            if behind is None:
                break
            total, discount = self._totals[length - 1][given], self._discounts[length - 1]
            p = max(behind[token] - discount, 0) / total + discount * len(behind) / total * p
        return p

    def perplexity(self, sequences: Sequence[Sequence[int]]) -> tuple[float, int]:
        """Perplexity of all tokens but the first of each sequence, and how many these are."""
        logs = [
            math.log(self.probability(tokens[max(i - self.order + 1, 0) : i], tokens[i]))
            for tokens in sequences
            for i in range(1, len(tokens))
        ]
        return math.exp(-math.fsum(logs) / len(logs)), len(logs)


def _discount(counts: object) -> float:
    """``n1 / (n1 + 2 n2)``; a half where nothing is there once or nothing twice."""
    times: Counter[int] = Counter()
    for behind in counts:  # type: ignore[attr-defined]
        times.update(behind.values())
    once, twice = times[1], times[2]
    return once / (once + 2 * twice) if once and twice else 0.5


# Tables

TRAINING, ORDERS = "training", {"unigrams": 1, "bigrams": 2, "trigrams": 3}


def compare_with_ngrams(
    model: nn.Module, sequences: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]]
) -> dict[str, Estimate]:
    """Held-out perplexity of a model and of n-grams of its training text.

    The model's interval is that of its mean loss over tokens.
    """
    loss = metrics.mean(sequence_losses(model, held_out))
    value, low, high = (math.exp(nats) for nats in loss[:3])
    d_vocab = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    table = {"model": Estimate(value, low, high, loss.n)}
    for name, order in ORDERS.items():
        estimate = NgramModel(sequences, d_vocab=d_vocab, order=order).perplexity(held_out)
        table[name] = Estimate.without_interval(*estimate)
    return table


def training_table(
    run: TrainingRun, perplexities: Mapping[str, Any], *, model: str, corpus: str, n_held_out: int
) -> pd.DataFrame:
    """Rows of ``loss`` by update (``k``), of training and held-out text, and of ``perplexity``."""
    named: dict[str, Any] = {"model": model, "corpus": corpus, "layer": None, "target": None}
    rows = [
        result_row(
            TRAINING, **named, method=method, metric="loss", k=update,
            estimate=Estimate.without_interval(loss, n_held_out),
        )
        for update, trained, held_out in run.curve
        for method, loss in (("training", trained), ("held-out", held_out))
    ]  # fmt: skip
    rows += [
        result_row(TRAINING, **named, method=method, metric="perplexity", estimate=estimate)
        for method, estimate in perplexities.items()
    ]
    return result_table(rows)
