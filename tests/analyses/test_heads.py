"""Heads that are replaced leave what a plain model gives whose heads are written over by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from attention_heads import head_ablation, head_r2
from conftest import N_LAYERS, SINK_TOKENS
from handpatched import run
from independent import assert_judged, judged_by_hand
from sklearn.metrics import r2_score
from studies.study import head_pairs
from torch import Tensor

from matlens import MapSet, Readout, collect, make_examples
from matlens.data.corpus import Corpus
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


def test_ablation_is_what_a_plain_model_leaves(
    small_model: Callable[[str], Any], plain_model: Callable[[str], Any], sentences: Corpus
) -> None:
    name, n = "llama", 11
    model, plain = small_model(name), plain_model(name)
    layout, examples = ModelLayout.from_model(model), make_examples(model, sentences)
    pairs, readout = head_pairs(layout), Readout(model)
    sites = [*sorted({site for pair in pairs for site in pair}), f"h.{N_LAYERS}"]
    train = collect(model, examples, sites[:-1], positions="all", progress=False)
    samples = collect(model, examples, sites, progress=False)
    rows, kept = torch.arange(train.n_rows) % 4 > 0, torch.arange(samples.n_rows) % 4 > 0
    maps = MapSet.fit(train, pairs=pairs, rows=rows, progress=False)
    table = head_ablation(
        readout, model, maps, train, samples, rows=rows, validation_rows=kept, every=2, patched=n
    )
    scores = {}
    for layer, (source, target) in enumerate(pairs):
        prediction = samples[source][kept] @ maps[source, target].weight.T
        for head in range(N_HEADS):
            part = slice(head * WIDTH, (head + 1) * WIDTH)
            truth = samples[target][kept][:, part]
            scores[layer, head] = r2_score(truth.numpy(), prediction[:, part].numpy())
    assert head_r2(layout, maps, samples, rows=kept) == pytest.approx(scores, abs=1e-5)
    fit = table[table["metric"] == "r2"].set_index(["layer", "head"])["value"]
    assert fit.to_dict() == pytest.approx(scores, abs=1e-5)
    best = sorted(scores, key=lambda head: -scores[head])
    assert fit.loc[best[0]] > fit.loc[best[-1]]

    def at_positions(heads: list[tuple[int, int]], instead: Stand) -> Tensor:
        final = []
        for s in range(n):
            tokens = examples.tokens[examples.offsets[s] : examples.offsets[s + 1]]
            final.append(by_hand(name, plain, tokens, set(heads), instead)[0][examples.positions[s]])
        return torch.stack(final)

    means = {layer: train[target][rows].mean(0) for layer, (_, target) in enumerate(pairs)}
    ways: dict[str, Stand] = {
        "linear": lambda layer, h: h @ maps[pairs[layer]].weight.T,
        "mean": lambda layer, h: means[layer].expand(*h.shape[:-1], -1),
        "nothing": lambda layer, h: torch.zeros(*h.shape[:-1], N_HEADS * WIDTH),
    }
    truth = samples[N_LAYERS][:n]
    for method, instead in ways.items():
        for cells, heads in (
            (lambda rows: (rows["layer"] == 2) & (rows["head"] == 1), [(2, 1)]),
            (lambda rows: rows["share"] == 0.5, best[:6]),
        ):
            given = table[(table["method"] == method) & (table["metric"] != "r2")]
            given = given[cells(given).fillna(False).astype(bool)]
            h = at_positions(heads, instead)
            (divergence,) = given[given["metric"] == "kl"]["value"]
            p, q = readout.log_probs(truth).double(), readout.log_probs(h).double()
            assert divergence == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=2e-2, abs=1e-6)
            evaluated = given[given["metric"] != "kl"].assign(layer=0)
            assert_judged(evaluated, judged_by_hand(plain, truth, {(method, 0): h}), nats=1e-3)
    alone = table[table["head"].notna() & (table["metric"] == "kl")]
    assert set(zip(alone["layer"], alone["head"], strict=True)) == {(l, h) for l in (0, 2) for h in range(4)}
    assert sorted(set(table["share"].dropna())) == [0.1, 0.25, 0.5, 0.75, 1]
    assert set(pd.unique(table["n"])) == {n, int(kept.sum())}


def test_sinks_are_run_by_the_model_and_the_random_order_is_the_seeds(
    small_model: Callable[[str], Any], plain_model: Callable[[str], Any], sentences: Corpus
) -> None:
    """Heads are replaced at all tokens but sinks; ``linear, random order`` takes them as they are dealt."""
    name, n = "llama-sinks", 8
    model, plain = small_model(name), plain_model(name)
    layout, examples = ModelLayout.from_model(model), make_examples(model, sentences, seed=1)
    pairs, readout = head_pairs(layout), Readout(model)
    sites = [*sorted({site for pair in pairs for site in pair}), f"h.{N_LAYERS}"]
    samples = collect(model, examples, sites, progress=False)
    every = torch.ones(samples.n_rows, dtype=torch.bool)
    fits = MapSet.fit(samples, pairs=pairs, ridge=1e-3, progress=False)
    # Far from what heads give, so that what they would write at sinks is seen at the tokens behind them.
    maps = MapSet(replace(linear, weight=50 * linear.weight) for linear in fits.values())
    given = {
        seed: head_ablation(
            readout, model, maps, samples, samples, rows=every, validation_rows=every, patched=n, seed=seed
        )
        for seed in (3, 4)
    }
    best = sorted(scores := head_r2(layout, maps, samples, rows=every), key=lambda head: -scores[head])
    final = samples[N_LAYERS][:n]

    def divergence(heads: list[tuple[int, int]], *, at_sinks: bool) -> float:
        rows = []
        for s in range(n):
            tokens = examples.tokens[examples.offsets[s] : examples.offsets[s + 1]]
            stay = torch.from_numpy(np.isin(tokens, () if at_sinks else SINK_TOKENS))[:, None]
            with_sinks = stay_at(stay, lambda layer, h: h @ maps[pairs[layer]].weight.T)
            rows.append(by_hand(name, plain, tokens, set(heads), with_sinks)[0][examples.positions[s]])
        p, q = (readout.log_probs(h).double() for h in (final, torch.stack(rows)))
        return float((p.exp() * (p - q)).sum(1).mean())

    for seed, table in given.items():
        dealt = [best[i] for i in np.random.default_rng(seed).permutation(len(best))]
        assert dealt[:6] != best[:6]
        rows = table[(table["metric"] == "kl") & (table["share"] == 0.5)].set_index("method")["value"]
        for method, heads in (("linear", best[:6]), ("linear, random order", dealt[:6])):
            expected = divergence(heads, at_sinks=False)
            assert rows[method] == pytest.approx(expected, rel=1e-3, abs=1e-6)
            assert rows[method] != pytest.approx(divergence(heads, at_sinks=True), rel=1e-2)


def stay_at(stay: Tensor, instead: Stand) -> Stand:
    """The same, but at some tokens the heads' own vectors, which NaN stands for."""
    return lambda layer, h: instead(layer, h).masked_fill(stay, float("nan"))
