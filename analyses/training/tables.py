"""Tables of training runs: losses by update, and perplexity compared with n-grams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from torch import nn

from matlens import metrics
from matlens.io import result_row, result_table
from matlens.metrics import Estimate
from training.ngrams import NgramModel
from training.running import TrainingRun, sequence_losses

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
