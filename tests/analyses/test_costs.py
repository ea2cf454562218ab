"""What maps cost is what counting by hand from the sizes of a model gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import N_LAYERS
from memory_and_layers import PAPER_SWEEP, Costs, exit_costs

from matlens import MapSet, Readout, collect, make_examples
from matlens.lens.early_exit import ExitConfidence, exit_layers, exit_sweep, savings, thresholds
from matlens.lens.evaluation import evaluate, map_lenses, prediction_quality

# Of the configurations in conftest: d_model 32, 60 tokens; FFNs of 128 in GPT-2 and of 48 in the others.
BLOCKS = {
    "gpt2": 32 * 96 + 32 * 32 + 2 * 32 * 128,
    "llama": 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48,
    "bert": 4 * 32 * 32 + 2 * 32 * 48,
}
READOUTS = {"gpt2": 60 * 32, "llama": 60 * 32, "bert": 32 * 32 + 60 * 32}


@pytest.mark.parametrize("name", list(BLOCKS))
def test_matrices_are_counted(name, small_model):
    model = small_model(name)
    costs = Costs.from_model(model, Readout(model))
    assert costs.blocks == (BLOCKS[name],) * N_LAYERS
    assert (costs.readout, costs.map, costs.n_bytes) == (READOUTS[name], 1024, 4)
    assert costs.run(1, 3, 7) == 2 * BLOCKS[name] + 2 * 7 * 2 * 32


def test_exits_cost_their_maps_and_readouts_and_save_blocks(small_model, sentences):
    model = small_model("llama")
    readout, examples = Readout(model), make_examples(model, sentences)
    data = collect(model, examples, progress=False)
    maps = MapSet.fit(data, pairs="last", ridge=1e-3, progress=False)
    table = exit_costs(readout, model, maps, data, precisions=(0.5, 1.0))
    block, context = BLOCKS["llama"], float((examples.positions + 1).mean()) * 2 * 32
    whole = N_LAYERS * (block + context)
    quality = prediction_quality(readout, maps, data, progress=False)
    quality = quality[(quality["metric"] == "precision") & (quality["k"] == 1)]
    wide = table[table["layer"].notna()].pivot(index=["method", "layer"], columns="metric", values="value")
    assert len(wide) == 2 * N_LAYERS
    for (method, layer), row in wide.iterrows():
        n_maps = int(method == "mat")
        (precision,) = quality[(quality["method"] == method) & (quality["layer"] == layer)]["value"]
        left = N_LAYERS - layer
        assert row.to_dict() == pytest.approx(
            {
                "precision": precision, "layers saved": left, "bytes of maps": n_maps * 4 * 32 * 32,
                "bytes saved": 4 * left * block, "map multiplications": n_maps * 32 * 32,
                "multiplications saved": left * (block + context),
            }
        )  # fmt: skip
    lenses = map_lenses(readout, maps, data)
    sweep = exit_sweep(lenses, data, lams={"mat": PAPER_SWEEP}, progress=False)
    positions, seen = torch.from_numpy(examples.positions), 0
    wide = table[table["layer"].isna()].pivot(index=["method", "k"], columns="metric", values="value")
    assert set(wide.index) == {("mat", 0.5), ("mat", 1.0), ("id", 0.5), ("id", 1.0)}
    for (method, k), row in wide.iterrows():
        saved, n_maps = savings(sweep, k).set_index("method")["saved"][method], int(method == "mat")
        # One map for each layer that is run but the last.
        ways = [
            (lambda h: h) if layer == N_LAYERS or not n_maps else maps[layer, N_LAYERS]
            for layer in range(1, N_LAYERS + 1)
        ]
        at = [way(data[layer]) for layer, way in enumerate(ways, 1)]
        evaluated = evaluate(readout, data[N_LAYERS], dict(enumerate(at)), confidence=True, progress=False)
        confidence = ExitConfidence.from_evaluations(evaluated.values()).difference
        points = []
        for lam in sorted(set(sweep[sweep["method"] == method]["lam"].dropna())):
            left = exit_layers(confidence, thresholds(positions, lam)).double()
            points.append((float(left.mean()), float(left.clamp(max=N_LAYERS - 1).mean())))
        pairs = [*itertools.pairwise(points)] if saved < N_LAYERS - 1 else [(points[0], points[0])]
        (a, mapped_a), (b, mapped_b) = next(
            (low, high) for low, high in pairs if low[0] - 1e-9 <= N_LAYERS - saved <= high[0] + 1e-9
        )
        t = (N_LAYERS - saved - a) / (b - a) if b > a else 0.0
        n_mapped = mapped_a + t * (mapped_b - mapped_a)
        assert n_mapped <= N_LAYERS - 1
        seen += n_mapped < N_LAYERS - saved - 1e-9
        assert row.to_dict() == pytest.approx(
            {
                "layers saved": saved, "bytes of maps": n_maps * (N_LAYERS - 1) * 4 * 32 * 32,
                "bytes saved": 0, "map multiplications": n_maps * n_mapped * 32 * 32,
                "readout multiplications": (N_LAYERS - saved - 1) * 60 * 32,
                "multiplications saved": saved * (block + context),
            }
        )  # fmt: skip
    assert seen
    shares = table.set_index("metric")[["value", "share of bytes", "share of multiplications"]].astype(float)
    for metric, row in shares.iterrows():
        expected = {"bytes": row["value"] / (4 * N_LAYERS * block), "multiplications": row["value"] / whole}
        for unit, share in expected.items():
            given = row[f"share of {unit}"]
            assert given == pytest.approx(share) if unit in str(metric) else torch.isnan(torch.tensor(given))
