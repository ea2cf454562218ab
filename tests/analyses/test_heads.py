"""Heads that are replaced leave what a plain model gives whose heads are written over by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from attention_heads import head_ablation
from conftest import N_LAYERS, SINK_TOKENS
from handpatched import run
from independent import assert_judged, judged_by_hand
from sklearn.metrics import r2_score
from studies.study import head_pairs
from torch import Tensor

from matlens import MapSet, Readout, collect, make_examples
from matlens.models.layout import ModelLayout

N_HEADS, WIDTH = 4, 8
Stand = Callable[[int, Tensor], Tensor]  # of a block, from the input of attention: the vectors of all heads


def by_hand(
    name: str, plain: Any, tokens: np.ndarray, heads: set[tuple[int, int]], instead: Stand
) -> tuple[Tensor, Tensor]:
    """``h^L`` and the logits of one sentence, with heads written over before the output projection."""

    def write(layer: int) -> Any:
        chosen = torch.tensor([(layer, head) in heads for head in range(N_HEADS)]).repeat_interleave(WIDTH)

        def function(z: Tensor, seen: Any) -> Tensor:
            other = instead(layer, seen[f"attn_in.{layer}"].float()).to(z)
            return torch.where(chosen & ~other.isnan(), other, z)

        return function

    seen = run(name, plain, [(f"z.{layer}", write(layer)) for layer in range(N_LAYERS)], tokens.tolist())
    return seen[f"h.{N_LAYERS}"].float(), seen["logits"].float()


def test_ablation_is_what_a_plain_model_leaves(small_model, plain_model, sentences):
    """Heads are replaced at all tokens but sinks; ``linear, random order`` takes them in the seed's order."""
    name, n, seed = "llama-sinks", 11, 3
    model, plain = small_model(name), plain_model(name)
    layout, examples = ModelLayout.from_model(model), make_examples(model, sentences, seed=1)
    pairs, readout = head_pairs(layout), Readout(model)
    sites = [*sorted({site for pair in pairs for site in pair}), f"h.{N_LAYERS}"]
    train = collect(model, examples, sites[:-1], positions="all", progress=False)
    samples = collect(model, examples, sites, progress=False)
    rows, kept = torch.arange(train.n_rows) % 4 > 0, torch.arange(samples.n_rows) % 4 > 0
    fits = MapSet.fit(train, pairs=pairs, rows=rows, progress=False)
    # Far from what heads give, so that what they would write at sinks is seen at the tokens after them.
    maps = MapSet(replace(linear, weight=50 * linear.weight) for linear in fits.values())
    table = head_ablation(
        readout, model, maps, train, samples, rows=rows, validation_rows=kept, every=2, patched=n, seed=seed
    )
    scores = {}
    for layer, (source, target) in enumerate(pairs):
        prediction = samples[source][kept] @ maps[source, target].weight.T
        for head in range(N_HEADS):
            part = slice(head * WIDTH, (head + 1) * WIDTH)
            truth = samples[target][kept][:, part]
            scores[layer, head] = r2_score(truth.numpy(), prediction[:, part].numpy())
    fit = table[table["metric"] == "r2"].set_index(["layer", "head"])["value"]
    assert fit.to_dict() == pytest.approx(scores, rel=1e-4, abs=1e-4)
    best = sorted(scores, key=lambda head: -scores[head])

    def at_positions(heads: list[tuple[int, int]], instead: Stand, *, at_sinks: bool = False) -> Tensor:
        final = []
        for s in range(n):
            tokens = examples.tokens[examples.offsets[s] : examples.offsets[s + 1]]
            stay = torch.from_numpy(np.isin(tokens, () if at_sinks else SINK_TOKENS))[:, None]
            others = stay_at(stay, instead)
            final.append(by_hand(name, plain, tokens, set(heads), others)[0][examples.positions[s]])
        return torch.stack(final)

    truth = samples[N_LAYERS][:n]

    def divergence(h: Tensor) -> float:
        p, q = readout.log_probs(truth).double(), readout.log_probs(h).double()
        return float((p.exp() * (p - q)).sum(1).mean())

    means = {layer: train[target][rows].mean(0) for layer, (_, target) in enumerate(pairs)}
    ways: dict[str, Stand] = {
        "linear": lambda layer, h: h @ maps[pairs[layer]].weight.T,
        "mean": lambda layer, h: means[layer].expand(*h.shape[:-1], -1),
        "nothing": lambda layer, h: torch.zeros(*h.shape[:-1], N_HEADS * WIDTH),
    }
    for method, instead in ways.items():
        given = table[(table["method"] == method) & (table["metric"] != "r2")]
        alone = ((given["layer"] == 2) & (given["head"] == 1)).fillna(False)
        for cells, heads in ((alone, [(2, 1)]), (given["share"] == 0.5, best[:6])):
            chosen, h = given[cells.astype(bool)], at_positions(heads, instead)
            (found,) = chosen[chosen["metric"] == "kl"]["value"]
            assert found == pytest.approx(divergence(h), rel=2e-2, abs=1e-6)
            evaluated = chosen[chosen["metric"] != "kl"].assign(layer=0)
            assert_judged(evaluated, judged_by_hand(plain, truth, {(method, 0): h}), nats=1e-3)
    dealt = [best[i] for i in np.random.default_rng(seed).permutation(len(best))]
    of_half = table[(table["metric"] == "kl") & (table["share"] == 0.5)].set_index("method")["value"]
    assert of_half["linear, random order"] == pytest.approx(
        divergence(at_positions(dealt[:6], ways["linear"])), rel=1e-3
    )
    at_sinks = divergence(at_positions(best[:6], ways["linear"], at_sinks=True))
    assert of_half["linear"] != pytest.approx(at_sinks, rel=1e-2)
    one = table[table["head"].notna() & (table["metric"] == "kl")]
    assert set(zip(one["layer"], one["head"], strict=True)) == {(l, h) for l in (0, 2) for h in range(4)}
    assert sorted(set(table["share"].dropna())) == [0.1, 0.25, 0.5, 0.75, 1]
    assert set(pd.unique(table["n"])) == {n, int(kept.sum())}


def stay_at(stay: Tensor, instead: Stand) -> Stand:
    """The same, but at some tokens the heads' own vectors, which NaN stands for."""
    return lambda layer, h: instead(layer, h).masked_fill(stay, float("nan"))
