"""Lenses of a budget: the sentences and passages of so many tokens, and tuned lenses that are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from studies import Model

from lenses import mean_jacobian
from matlens import Lens, LinearMap, Readout
from matlens.activations import Activations
from matlens.data import Corpus
from matlens.lens import trained

FALLING = 0.01  # share of the KL that a round takes off, or it has stopped falling


def sentences_of(offsets: Int[np.ndarray, " n"], budgets: Sequence[int]) -> list[int]:
    """How many first sentences have the tokens of each budget; the last number is all of them."""
    ends = offsets[1:]
    return sorted({*(int(np.searchsorted(ends, n)) + 1 for n in budgets if n < ends[-1]), len(ends)})


def passages_of(model: Model, corpus: Corpus, n: int, longest: int) -> dict[str, int]:
    """The longest sentences, which Jacobians are taken on, and the tokens up to the end of each."""
    texts = trained.longest_sentences(corpus.sentences, n)
    lengths = [min(longest, len(model.to_tokens(text)[0])) for text in texts]
    return dict(zip(texts, np.cumsum(lengths).tolist(), strict=True))


def fit_jacobian(
    model: Model,
    corpus: Corpus,
    passages: Mapping[str, int],
    budget: int,
    before: tuple[Lens, int] | None = None,
    **options: Any,
) -> Lens:
    """The mean Jacobian over the passages within a budget of tokens, one or more.

    ``before`` is that of a smaller budget, and the budget; its passages are not computed again.
    """
    shortest = next(iter(passages.values()))
    low, high = max(before[1], shortest) if before else 0, max(budget, shortest)
    new = tuple(text for text, end in passages.items() if low < end <= high)
    if before and not new:
        return before[0]
    part = replace(corpus, sentences=new)
    lens = Lens.fit(model, part, method="jacobian", n_prompts=len(new), **options)
    return mean_jacobian(before[0], lens) if before else lens


def tune_further(
    model: Model, rows: Activations, layer: int, *, batch: int, seed: int, begin: LinearMap | None = None
) -> Lens:
    """Train a tuned lens of one layer by its default schedule, from the identity or a map."""
    last = f"h.{model.cfg.n_layers}"
    residual = None if begin is None else replace(begin, weight=begin.matrix - torch.eye(len(begin.weight)))
    readout = Readout(model)
    training = trained.LayerTraining(readout, rows[layer], rows[last], start=residual, seed=seed)
    training.tune(batch=batch)
    parts = training.result()
    provenance = rows.provenance.with_details(method="tuned", n_fitted=rows.n_rows, seed=seed, batch=batch)
    linear = LinearMap(parts["weight"], parts["bias"], f"h.{layer}", last, provenance)
    return Lens({layer: linear}, "tuned", provenance, readout=readout, model=model)


def is_falling(values: Sequence[float]) -> bool:
    """Whether the last of the values is below all others by a share of `FALLING`, or has none to compare."""
    return len(values) < 2 or values[-1] < (1 - FALLING) * min(values[:-1])
