"""Early exit, against a loop over examples and layers that is written from the definition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, make_sentences
from small_lenses import Sharp

from matlens import InputError, Lens, LinearMap, MapSet, collect, make_examples
from matlens.io.tables import COLUMNS
from matlens.lens import exit_sweep, prediction_quality, savings
from matlens.lens.early_exit import exit_layers, thresholds
from matlens.lens.evaluation import map_lenses


def layer_left(confidence: list[float], i: int, mean_length: float, lam: float) -> int:
    """Where one example exits, by the definition; ``confidence`` is that after layers 1, 2, ..., L."""
    for layer, gap in enumerate(confidence, 1):
        if gap > 0.9 * lam + 0.1 * math.exp(-4 * i / mean_length):
            return layer
    return len(confidence)


# Thresholds and layers


@pytest.mark.parametrize("seed", range(3))
def test_exit_layers_are_those_of_a_loop_over_examples(seed):
    n, n_layers, generator = 60, 1 + 3 * seed, torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 40, (n,), generator=generator)
    # Gaps of all sizes, and more of them near the thresholds of small lam.
    confidence = torch.rand(n, n_layers, generator=generator) ** 2
    mean_length = sum(i + 1 for i in positions.tolist()) / n  # counts tokens
    for lam in (*torch.linspace(-0.2, 1.2, 15).tolist(), -1.112, 0, 1, 1.112):
        for given, length in ((None, mean_length), (20.0, 20.0)):
            left = exit_layers(confidence, thresholds(positions, lam, given))
            expected = [
                layer_left(gaps, i, length, lam)
                for gaps, i in zip(confidence.tolist(), positions.tolist(), strict=True)
            ]
            assert left.tolist() == expected


def test_a_confidence_that_only_reaches_the_threshold_does_not_exit():
    threshold = thresholds(torch.tensor([0, 2, 5, 9]), 0.3)
    tie, above = threshold, threshold.nextafter(torch.tensor(1.0, dtype=torch.float64))
    assert exit_layers(torch.stack([tie, above, above], 1), threshold).tolist() == [2] * 4
    assert exit_layers(torch.stack([tie, tie, tie], 1), threshold).tolist() == [3] * 4
    # The ends of the sweep exit at once and never, even where the least sure exit first.
    i = torch.tensor([500, 0, 3])
    assert exit_layers(torch.zeros(3, 5), thresholds(i, -1.112)).tolist() == [1] * 3
    assert exit_layers(torch.ones(3, 5), thresholds(i, 1.112)).tolist() == [5] * 3


# Tables


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_sweep_is_a_computation_by_hand(name, small_model):
    model = small_model(name)
    data = collect(model, make_examples(model, make_sentences(), seed=2), progress=False)
    noise = torch.randn(N_LAYERS, D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(0))
    weights = torch.eye(D_MODEL) + 0.1 * noise
    maps = MapSet(
        (LinearMap(weights[layer], None, f"h.{layer}", f"h.{N_LAYERS}") for layer in range(1, N_LAYERS)),
        provenance=data.provenance,
    )
    readout, positions = Sharp(model), data.examples.positions.tolist()
    readout.factor = 30.0
    mean_length = sum(i + 1 for i in positions) / len(positions)
    table = exit_sweep(
        map_lenses(readout, maps, data), data, lams={"mat": (-1.112, 0.5, 1.112)}, progress=False
    )
    assert list(table.columns) == [*COLUMNS, "lam"]
    quality = prediction_quality(readout, maps, data, progress=False)
    for method in ("mat", "id"):
        said, gaps = [], []
        for layer in range(1, N_LAYERS + 1):
            h = data[layer] @ weights[layer].T if method == "mat" and layer < N_LAYERS else data[layer]
            q = readout.logits(h).double().softmax(1).sort(descending=True)
            said.append(q.indices[:, 0].tolist())
            gaps.append((q.values[:, 0] - q.values[:, 1]).tolist())
        rows = table[(table["method"] == method) & table["lam"].notna()]
        for row in rows.to_dict("records"):
            of_examples = zip(positions, zip(*gaps, strict=True), strict=True)
            layers = [layer_left(list(gap), i, mean_length, row["lam"]) for i, gap in of_examples]
            right = [said[layer - 1][i] == said[-1][i] for i, layer in enumerate(layers)]
            assert row["layer"] == pytest.approx(np.mean(layers), abs=1e-12)
            assert row["value"] == pytest.approx(np.mean(right), abs=1e-12)
            assert row["low"] <= row["value"] <= row["high"]
            assert (row["metric"], row["k"], row["target"]) == ("precision", 1, N_LAYERS)
            assert (row["experiment"], row["n"], row["corpus"]) == ("early_exit", len(layers), "words")
        assert (rows["layer"].iloc[-1], rows["value"].iloc[-1]) == (N_LAYERS, 1.0)
        assert method == "mat" or rows["layer"].nunique() > 10
        fixed = table[(table["method"] == method) & table["lam"].isna()].set_index("layer")
        same = quality.query("method == @method and k == 1 and layer > 0").set_index("layer")
        assert list(fixed.index) == [1, 2, 3]
        assert fixed[["value", "low", "high"]].equals(same[["value", "low", "high"]])
    lams = [-1.112, *(i / 10 for i in range(11)), *(1 + 0.112 * i / 11 for i in range(1, 11)), 1.112]
    assert rows["lam"].tolist() == pytest.approx(lams, abs=1e-6)


@pytest.mark.refused
def test_there_must_be_something_to_exit_by(setting):
    model, _, validation = setting("gpt2")
    lens = Lens.identity(model)
    with pytest.raises(InputError, match="at least one"):
        exit_sweep({}, validation)
    with pytest.raises(InputError, match="collected layer above 0"):
        exit_sweep({"id": lens}, validation, layers=[0])
    with pytest.raises(InputError, match="do not belong together"):
        exit_sweep({"id": lens}, setting("llama").validation)
    with pytest.raises(InputError, match="those that all lenses have"):
        exit_sweep({"id": lens, "x": replace(lens, maps={1: None})}, validation, layers=[1, 2])
    with pytest.raises(InputError, match=r"lens\.exit_sweep"):
        savings(pd.DataFrame())
    for value in (torch.nan, torch.inf):
        with pytest.raises(InputError, match="finite"):
            exit_layers(torch.full((2, 3), value), torch.zeros(2))


# Layers saved


@pytest.mark.parametrize(
    ("points", "saved"),
    [
        pytest.param([(10, 1.0), (8, 1.0), (1, 0.2), (6, 0.9)], 3, id="between two points, in any order"),
        pytest.param([(1, 0.2), (5, 0.95), (10, 1.0)], 5, id="at a point"),
        pytest.param([(1, 0.95), (4, 0.2), (10, 1.0)], 9, id="at the first point alone"),
        # Reached at 4.75, lost again, reached once more: the fewest layers count.
        pytest.param([(1, 0.2), (4, 0.8), (5, 1.0), (7, 0.5), (10, 1.0)], 5.25, id="falls"),
        pytest.param([(1, 0.2), (10, 0.2), (10, 1.0)], 0, id="only the full model"),
        pytest.param([(1, 0.2), (3, 0.4), (3, 0.99), (3, 0.6), (10, 1.0)], 7, id="points above one another"),
    ],
)
def test_layers_saved_is_where_straight_lines_reach_the_precision(points, saved):
    rows = [("mat", layer, value, 0.1 * i) for i, (layer, value) in enumerate(points)]
    rows += [("id", 1.0, 1.0, 0.0), ("id", 10.0, 1.0, 0.1)]
    rows += [(method, float(layer), 1.0, math.nan) for method in ("mat", "id") for layer in range(1, 11)]
    table = pd.DataFrame(rows, columns=["method", "layer", "value", "lam"]).assign(target=10)
    found = savings(table).set_index("method")
    assert list(found.index) == ["mat", "id"]
    assert found["saved"].to_dict() == pytest.approx({"mat": saved, "id": 9}, abs=1e-12)
    assert found["share"].to_dict() == pytest.approx({"mat": saved / 10, "id": 0.9}, abs=1e-12)
    assert set(found["n_layers"]) == {10}
    with pytest.raises(InputError, match=r"reaches a precision of 0\.95"):
        savings(table.assign(value=table["value"].clip(upper=0.94)))


def test_a_factor_on_the_scores_changes_the_exits(setting):
    model, _, validation = setting("gpt2")
    lens = Lens.identity(model)
    unsure = replace(lens, scales=dict.fromkeys(lens.layers, 0.01))
    table = exit_sweep({"sure": lens, "unsure": unsure}, validation, layers=[2], progress=False)
    means = table[table["lam"] == 0.0].set_index("method")["layer"]
    assert means["unsure"] > means["sure"]
    assert set(table.loc[table["lam"].isna(), "layer"]) == {2, 3}
