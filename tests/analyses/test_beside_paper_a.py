"""Early exit and its costs, and heads that are replaced: the scripts' tables are a plain model's by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import handpatched
import numpy as np
import pandas as pd
import pytest
import torch
from analysing import N_VALIDATION, SINKS, read, run, sizes
from conftest import N_LAYERS, SINK_TOKENS
from independent import assert_judged, make_readout
from memory_and_layers import PRECISIONS, Costs
from paper_a_by_hand import fitted
from sklearn.metrics import r2_score
from torch import Tensor

from matlens import MapSet, Readout

# Of the configurations in conftest: d_model 32, 60 tokens; FFNs of 128 in GPT-2 and of 48 in the others.
LLAMA = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
MATRICES = {
    "gpt2": (32 * 96 + 32 * 32 + 2 * 32 * 128, 60 * 32),
    "llama": (LLAMA, 60 * 32),
    "bert": (4 * 32 * 32 + 2 * 32 * 48, 32 * 32 + 60 * 32),
}


@pytest.mark.parametrize("name", list(MATRICES))
def test_matrices_are_counted(name, small_model):
    costs, (block, readout) = Costs.from_model(small_model(name), Readout(small_model(name))), MATRICES[name]
    assert costs.blocks == (block,) * N_LAYERS
    assert (costs.readout, costs.map, costs.n_bytes) == (readout, 1024, 4)
    assert costs.run(1, 3, 7) == 2 * block + 2 * 7 * 2 * 32


def test_exits_are_those_of_the_plain_models_confidence_and_cost_maps_and_readouts(finished, by_hand):
    study, exits = by_hand(), read(finished, "paper_a_fig9_early_exit")
    exits = exits[exits["lam"].notna()]
    assert len(exits) == 13 + 23
    costs = read(finished, "memory_and_layers")
    context = (sum(study.validation.positions) / len(study.validation.positions) + 1) * 2 * 32
    judged, block = study.judge(study.layers()), LLAMA
    fixed = costs[costs["layer"].notna()].pivot(index=["method", "layer"], columns="metric", values="value")
    assert len(fixed) == 2 * N_LAYERS
    for (method, layer), row in fixed.iterrows():
        n_maps, left = int(method == "mat"), N_LAYERS - layer
        assert row.to_dict() == pytest.approx(
            {
                "precision": judged[method, layer][0], "layers saved": left,
                "bytes of maps": n_maps * 4 * 32 * 32, "bytes saved": 4 * left * block,
                "map multiplications": n_maps * 32 * 32, "multiplications saved": left * (block + context),
            }
        )  # fmt: skip
    early = costs[costs["layer"].isna()].pivot(index=["method", "k"], columns="metric", values="value")
    assert len(early) == 2 * len(PRECISIONS)
    for method, rows in exits.groupby("method"):
        points = study.exits(str(method), rows["lam"])
        found = rows[["layer", "value"]].to_numpy()
        assert found == pytest.approx(np.array(points)[:, [0, 2]], abs=1e-6)
        ordered = sorted(points, key=lambda point: (point[0], point[2]))
        means, mapped, values = zip(*ordered, strict=True)
        for goal in PRECISIONS:  # the first point that reaches it, and how far from the one before
            end = next(i for i, value in enumerate(values) if value >= goal)
            part = (goal - values[end - 1]) / (values[end] - values[end - 1]) if end else 0.0
            n_run, n_mapped = (
                each[end] - (1 - part) * (each[end] - each[end - 1]) * (end > 0) for each in (means, mapped)
            )
            n_maps, saved = int(method == "mat"), N_LAYERS - n_run
            assert early.loc[(method, goal)].to_dict() == pytest.approx(
                {
                    "layers saved": saved, "bytes of maps": n_maps * (N_LAYERS - 1) * 4 * 32 * 32,
                    "bytes saved": 0, "map multiplications": n_maps * n_mapped * 32 * 32,
                    "readout multiplications": (n_run - 1) * 60 * 32,
                    "multiplications saved": saved * (block + context),
                }
            )  # fmt: skip
    for unit, whole in (("bytes", 4 * N_LAYERS * block), ("multiplications", N_LAYERS * (block + context))):
        of_unit = costs["metric"].str.contains(unit)
        assert costs[of_unit][f"share of {unit}"].to_numpy() == pytest.approx(costs[of_unit]["value"] / whole)
        assert costs[~of_unit][f"share of {unit}"].isna().all()


# Heads

N_HEADS, WIDTH = 4, 8
Instead = Callable[[int, Tensor], Tensor]  # of a block, from the input of attention: the vectors of all heads


def test_heads_are_those_that_a_plain_model_has_written_over_by_hand(
    by_hand, corpora, model_folder, tmp_path, monkeypatch
):
    """Heads are replaced at all tokens but sinks; ``linear, random order`` takes them in the seed's order."""
    far, fit = 50, MapSet.fit  # from what heads give, so that what they would write at sinks shows

    def scaled(*args: Any, **how: Any) -> MapSet:
        return MapSet(replace(linear, weight=far * linear.weight) for linear in fit(*args, **how).values())

    monkeypatch.setattr(MapSet, "fit", scaled)
    options = ["--model", model_folder(SINKS), "--corpus", corpora / "words.txt", *sizes(), "--every", 2]
    run("attention_heads", *options, "--out", tmp_path)
    table, study = pd.read_csv(tmp_path / "attention_heads.csv"), by_hand()
    assert json.loads((tmp_path / "attention_heads.json").read_text())["sinks"] == study.train.counts
    rows, kept = ~study.train.sink, ~study.validation.sink
    ends = [[study.train.at[f"{kind}.{n}"][rows] for kind in ("attn_in", "z")] for n in range(N_LAYERS)]
    weights, means = [far * fitted(x, z) for x, z in ends], [z.mean(0) for _, z in ends]
    scores = {}
    for layer, weight in enumerate(weights):
        truth, x = (study.validation.at[f"{kind}.{layer}"][kept] for kind in ("z", "attn_in"))
        parts = zip(truth.split(WIDTH, 1), (x @ weight.T).split(WIDTH, 1), strict=True)
        scores |= {(layer, head): r2_score(*each) for head, each in enumerate(parts)}
    r2 = table[table["metric"] == "r2"].set_index(["layer", "head"])["value"]
    assert r2.to_dict() == pytest.approx(scores, rel=1e-4, abs=1e-4)
    best = sorted(scores, key=lambda head: -scores[head])

    def ablated(heads: list[tuple[int, int]], instead: Instead, *, at_sinks: bool = False) -> Tensor:
        def write(layer: int, places: Tensor, value: Tensor, seen: Mapping[str, Tensor]) -> Tensor:
            written = torch.tensor([(layer, head) in heads for head in range(N_HEADS)])
            new = instead(layer, seen[f"attn_in.{layer}"])
            return torch.where(places & written.repeat_interleave(WIDTH), new, value)

        vectors = []
        for tokens in study.validation.tokens:
            places = torch.tensor([at_sinks or token not in SINK_TOKENS for token in tokens])[:, None]
            functions = [(f"z.{n}", partial(write, n, places)) for n in range(N_LAYERS)]
            vectors.append(handpatched.run(SINKS, study.plain, functions, tokens))
        return study.validation.pick(vectors, f"h.{N_LAYERS}")

    @torch.no_grad()
    def divergence(h: Tensor) -> float:
        p, q = (make_readout(study.plain)(each).double().log_softmax(-1) for each in (study.truth, h))
        return float((p.exp() * (p - q)).sum(1).mean())

    ways: dict[str, Instead] = {
        "linear": lambda layer, h: h @ weights[layer].T,
        "mean": lambda layer, h: means[layer],
        "nothing": lambda layer, h: torch.tensor(0.0).double(),
    }
    for method, instead in ways.items():
        for chosen, heads in (("layer == 2 and head == 1", [(2, 1)]), ("share == 0.5", best[:6])):
            cells = table.query(f"method == '{method}' and metric != 'r2' and {chosen}").assign(layer=0)
            (kl,), h = cells[cells["metric"] == "kl"]["value"], ablated(heads, instead)
            assert kl == pytest.approx(divergence(h), rel=2e-2, abs=1e-6)
            assert_judged(cells[cells["metric"] != "kl"], study.judge({(method, 0): h}), nats=1e-3)
    dealt = [best[i] for i in np.random.default_rng(0).permutation(len(best))]
    kl = table[table["metric"] == "kl"]
    of_half = kl[kl["share"] == 0.5].set_index("method")["value"]
    in_order = divergence(ablated(dealt[:6], ways["linear"]))
    assert of_half["linear, random order"] == pytest.approx(in_order, rel=1e-3)
    at_sinks = divergence(ablated(best[:6], ways["linear"], at_sinks=True))
    assert of_half["linear"] != pytest.approx(at_sinks, rel=1e-2)
    alone = kl[kl["head"].notna()]
    assert set(zip(alone["layer"], alone["head"], strict=True)) == {key for key in scores if key[0] != 1}
    assert sorted(set(table["share"].dropna())) == [0.1, 0.25, 0.5, 0.75, 1]
    assert set(table["n"]) == {N_VALIDATION, int(kept.sum())}
