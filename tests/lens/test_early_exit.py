"""Early exit, against a loop over examples and layers that is written from the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, make_sentences
from torch import Tensor

from matlens import InputError, Lens, LinearMap, MapSet, Readout, collect, make_examples
from matlens.activations.activations import Activations
from matlens.io.tables import COLUMNS
from matlens.lens.early_exit import (
    PAPER_SWEEP,
    exit_layers,
    exit_sweep,
    layers_saved,
    savings,
    thresholds,
)
from matlens.lens.evaluation import map_lenses
from matlens.lens.evaluation import prediction_quality as quality

MODELS = ("gpt2", "llama", "bert")
Studies = Callable[[str], tuple[Readout, MapSet, Activations]]


def layer_left(confidence: list[float], i: int, mean_length: float, lam: float) -> int:
    """Where one example leaves, by the definition; ``confidence`` is that after layers 1, 2, ..., L."""
    for layer, gap in enumerate(confidence, 1):
        if gap > 0.9 * lam + 0.1 * math.exp(-4 * i / mean_length):
            return layer
    return len(confidence)


def sweep(readout: Readout, maps: MapSet, data: Activations) -> pd.DataFrame:
    """Figure 9: ``mat`` and ``id`` at all layers."""
    lenses, layers = map_lenses(readout, maps, data), list(range(1, N_LAYERS))
    return exit_sweep(lenses, data, layers=layers, lams={"mat": PAPER_SWEEP}, progress=False)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Thresholds and layers


@pytest.mark.parametrize("seed", range(8))
def test_exit_layers_are_those_of_a_loop_over_examples(seed: int) -> None:
    n, n_layers = 60, 1 + seed
    positions = torch.randint(0, 40, (n,), generator=generator(seed))
    # Gaps of all sizes, and more of them near the thresholds of small lam.
    confidence = torch.rand(n, n_layers, generator=generator(seed + 100)) ** 2
    mean_length = sum(i + 1 for i in positions.tolist()) / n
    for lam in (*torch.linspace(-0.2, 1.2, 15).tolist(), -1.112, 0, 1, 1.112):
        left = exit_layers(confidence, thresholds(positions, lam))
        expected = [
            layer_left(gaps, i, mean_length, lam)
            for gaps, i in zip(confidence.tolist(), positions.tolist(), strict=True)
        ]
        assert left.tolist() == expected


def test_the_mean_length_counts_tokens_and_not_positions() -> None:
    positions = torch.tensor([0, 3, 8])
    limits = thresholds(positions, 0.5)
    assert limits.dtype == torch.float64
    expected = [0.45 + 0.1 * math.exp(-4 * i / ((1 + 4 + 9) / 3)) for i in (0, 3, 8)]
    assert limits.tolist() == pytest.approx(expected, rel=1e-14)
    assert limits[0].item() == pytest.approx(0.55)
    given = thresholds(positions, 0.5, mean_length=20)
    assert given.tolist() == pytest.approx([0.45 + 0.1 * math.exp(-i / 5) for i in (0, 3, 8)], rel=1e-14)


def test_a_confidence_that_only_reaches_the_threshold_does_not_leave() -> None:
    threshold = thresholds(torch.tensor([0, 2, 5, 9]), 0.3)
    tie, above = threshold, threshold.nextafter(torch.tensor(1.0, dtype=torch.float64))
    assert exit_layers(torch.stack([tie, above, above], 1), threshold).tolist() == [2] * 4
    assert exit_layers(torch.stack([tie, tie, tie], 1), threshold).tolist() == [3] * 4
    assert exit_layers(torch.stack([above, tie, tie], 1), threshold).tolist() == [1] * 4


@pytest.mark.parametrize("positions", [[0], [0, 0, 0], [0, 1, 2], [500, 0, 3]], ids=str)
def test_the_ends_of_the_sweep_leave_at_once_and_never(positions: list[int]) -> None:
    """Even where the least sure leave first, and where the most sure stay."""
    i = torch.tensor(positions)
    nothing, certain = torch.zeros(len(i), 5), torch.ones(len(i), 5)
    assert exit_layers(nothing, thresholds(i, -1.112)).tolist() == [1] * len(i)
    assert exit_layers(certain, thresholds(i, 1.112)).tolist() == [5] * len(i)


# Tables


class Sharp(Readout):
    """Small models are sure of nothing; read out this way, of some tokens more than of others."""

    factor, largest = 1.0, 0

    def logits(self, h: Tensor) -> Tensor:
        self.largest = max(self.largest, len(h))
        return self.factor * super().logits(h)


@pytest.fixture(scope="module")
def study(small_model: Callable[[str], Any]) -> Studies:
    """Read-out, maps of each layer to the last, and the stream at the drawn positions."""
    known: dict[str, tuple[Readout, MapSet, Activations]] = {}

    def made(name: str) -> tuple[Readout, MapSet, Activations]:
        if name not in known:
            model = small_model(name)
            data = collect(model, make_examples(model, make_sentences(), seed=2), progress=False)
            noise = torch.randn(N_LAYERS, D_MODEL, D_MODEL, generator=generator(0))
            maps = [
                LinearMap(torch.eye(D_MODEL) + 0.1 * noise[layer], None, f"h.{layer}", f"h.{N_LAYERS}")
                for layer in range(N_LAYERS)
            ]
            readout = Sharp(model)
            readout.factor = 30.0
            known[name] = readout, MapSet(maps, provenance=data.provenance), data
        return known[name]

    return made


def early(table: pd.DataFrame, method: str) -> pd.DataFrame:
    return table[(table["method"] == method) & table["lam"].notna()]


def fixed(table: pd.DataFrame, method: str) -> pd.DataFrame:
    return table[(table["method"] == method) & table["lam"].isna()]


def by_hand(
    readout: Readout, maps: MapSet, data: Activations, method: str, lam: float
) -> tuple[list[int], list[bool]]:
    """Where each example leaves and whether it says there what the model says at the end."""
    positions = data.examples.positions.tolist()
    mean_length = sum(i + 1 for i in positions) / len(positions)
    layers, right = [], []
    for row, i in enumerate(positions):
        said, gaps = [], []
        for layer in range(1, N_LAYERS + 1):
            h = data[layer][row]
            if method == "mat" and layer < N_LAYERS:
                h = maps[layer, N_LAYERS].weight @ h
            distribution = readout.logits(h[None])[0].double().softmax(0)
            first, second = distribution.sort(descending=True).values[:2].tolist()
            said.append(int(distribution.argmax()))
            gaps.append(first - second)
        layers.append(layer_left(gaps, i, mean_length, lam))
        right.append(said[layers[-1] - 1] == said[-1])
    return layers, right


@pytest.mark.parametrize("method", ["mat", "id"])
@pytest.mark.parametrize("name", MODELS)
def test_early_exit_is_a_computation_by_hand(name: str, method: str, study: Studies) -> None:
    readout, maps, data = study(name)
    rows = early(sweep(readout, maps, data), method)
    for row in rows.to_dict("records"):
        layers, right = by_hand(readout, maps, data, method, row["lam"])
        assert row["layer"] == pytest.approx(np.mean(layers), abs=1e-12)
        assert row["value"] == pytest.approx(np.mean(right), abs=1e-12)
        assert row["low"] <= row["value"] <= row["high"]
        assert (row["metric"], row["k"], row["target"]) == ("precision", 1, N_LAYERS)
        assert (row["experiment"], row["n"], row["corpus"]) == ("early_exit", len(layers), "words")
    # From everyone leaving at once to nobody leaving, over layers that tell the thresholds apart.
    by_lam = rows.sort_values("lam")
    assert by_lam["layer"].iloc[0] == 1
    assert (by_lam["layer"].iloc[-1], by_lam["value"].iloc[-1]) == (N_LAYERS, 1.0)
    assert by_lam["layer"].is_monotonic_increasing
    assert by_lam["layer"].nunique() > 10
    assert by_lam["value"].nunique() > 2


@pytest.mark.parametrize("name", MODELS)
def test_fixed_exit_is_precision_at_1_of_every_layer_from_the_first(name: str, study: Studies) -> None:
    readout, maps, data = study(name)
    table = sweep(readout, maps, data)
    assert list(table.columns) == [*COLUMNS, "lam"]
    expected = quality(readout, maps, data, progress=False)
    precise = expected[(expected["metric"] == "precision") & (expected["k"] == 1) & (expected["layer"] > 0)]
    shared = ["model", "corpus", "method", "layer", "target", "metric", "k", "value", "low", "high", "n"]
    for method in ("mat", "id"):
        there = precise[precise["method"] == method].sort_values("layer")
        pd.testing.assert_frame_equal(
            fixed(table, method)[shared].reset_index(drop=True),
            there[shared].reset_index(drop=True),
            check_dtype=False,
        )
        assert list(fixed(table, method)["layer"]) == [1, 2, 3]
    assert len(table) == sum(len(part(table, method)) for part in (early, fixed) for method in ("mat", "id"))


def test_the_sweep_is_the_one_of_the_definition(study: Studies) -> None:
    table = sweep(*study("gpt2"))
    lams = [-1.112, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.112]
    assert sorted(early(table, "mat")["lam"]) == pytest.approx(lams, abs=1e-12)
    more = sorted(set(early(table, "id")["lam"]) - set(early(table, "mat")["lam"]))
    assert len(early(table, "id")) == len(lams) + 10
    assert len(more) == 10
    assert more[0] > 1
    assert more[-1] < 1.112
    assert np.diff([1, *more, 1.112]) == pytest.approx(0.112 / 11, abs=1e-6)


def test_a_missing_map_is_refused(study: Studies) -> None:
    readout, maps, data = study("gpt2")
    for layer in (1, 2):
        some = MapSet(
            (linear for pair, linear in maps.items() if pair[0] != f"h.{layer}"), provenance=maps.provenance
        )
        with pytest.raises(InputError, match="those that all lenses have"):
            sweep(readout, some, data)
    # Nobody leaves before the first layer, so no map from there is needed.
    rest = MapSet((linear for pair, linear in maps.items() if pair[0] != "h.0"), provenance=maps.provenance)
    pd.testing.assert_frame_equal(sweep(readout, rest, data), sweep(readout, maps, data))


def test_a_factor_on_the_scores_changes_when_the_model_is_left(setting: Callable[[str], Any]) -> None:
    model, _, validation = setting("gpt2")
    lens = Lens.identity(model)
    unsure = replace(lens, scales=dict.fromkeys(lens.layers, 0.01))
    table = exit_sweep({"sure": lens, "unsure": unsure}, validation, layers=[2], progress=False)
    means = table[table["lam"] == 0.0].set_index("method")["layer"]
    assert means["unsure"] > means["sure"]
    assert set(table.loc[table["lam"].isna(), "layer"]) == {2, 3}


@pytest.mark.refused
def test_there_must_be_something_to_leave_by(setting: Callable[[str], Any]) -> None:
    model, _, validation = setting("gpt2")
    lens = Lens.identity(model)
    with pytest.raises(InputError, match="one lens or more"):
        exit_sweep({}, validation)
    with pytest.raises(InputError, match="must have one from 1"):
        exit_sweep({"id": lens}, validation, layers=[0])
    with pytest.raises(InputError, match="do not belong together"):
        exit_sweep({"id": lens}, setting("llama").validation)
    with pytest.raises(InputError, match=r"lens\.exit_sweep"):
        savings(pd.DataFrame())


# Layers saved


def curve(points: list[tuple[float, float]], method: str = "mat", last: int = 10) -> pd.DataFrame:
    """A sweep with these layers and precisions, and fixed exits, which do not count."""
    rows = [{"layer": layer, "value": value, "lam": 0.1 * i} for i, (layer, value) in enumerate(points)]
    rows += [{"layer": float(layer), "value": 1.0, "lam": np.nan} for layer in range(1, last + 1)]
    return pd.DataFrame([row | {"method": method, "target": last} for row in rows])


@pytest.mark.parametrize(
    ("points", "saved"),
    [
        pytest.param([(1, 0.2), (6, 0.9), (8, 1.0), (10, 1.0)], 3, id="between two points"),
        pytest.param([(1, 0.2), (5, 0.95), (10, 1.0)], 5, id="at a point"),
        pytest.param([(10, 1.0), (8, 1.0), (1, 0.2), (6, 0.9)], 3, id="in any order"),
        pytest.param([(1, 0.96), (10, 1.0)], 9, id="from the first point on"),
        pytest.param([(1, 0.95), (4, 0.2), (10, 1.0)], 9, id="at the first point alone"),
        # Reached at 4.75, lost again, reached once more: the fewest layers count.
        pytest.param([(1, 0.2), (4, 0.8), (5, 1.0), (7, 0.5), (10, 1.0)], 5.25, id="falls"),
        # Touches 0.95 from below at a point, falls, and rises again.
        pytest.param([(1, 0.2), (4, 0.95), (6, 0.3), (10, 1.0)], 6, id="touches"),
        pytest.param([(1, 0.2), (9, 0.9), (10, 1.0)], 0.5, id="shortly before the end"),
        pytest.param([(1, 0.2), (10, 0.2), (10, 1.0)], 0, id="only the full model"),
        pytest.param([(1, 0.2), (3, 0.4), (3, 0.99), (3, 0.6), (10, 1.0)], 7, id="points above one another"),
        pytest.param([(1, 0.2), (1, 0.96), (10, 1.0)], 9, id="above one another at the start"),
    ],
)
def test_layers_saved_is_where_straight_lines_reach_the_precision(
    points: list[tuple[float, float]], saved: float
) -> None:
    other = curve([(1, 1.0), (10, 1.0)], "id")
    assert layers_saved(pd.concat([curve(points), other]), "mat") == pytest.approx(saved, abs=1e-12)


def test_a_precision_that_no_threshold_reaches_is_refused() -> None:
    with pytest.raises(InputError, match=r"reaches a precision of 0\.95"):
        layers_saved(curve([(1, 0.2), (5, 0.94), (10, 0.9)]), "mat")


def test_savings_of_both_methods_can_be_followed_by_eye() -> None:
    """mat reaches 95% half way between 6 and 7 of 10 layers, id at 9; fixed exits do not count."""
    points = {"mat": [(6, 0.9), (7, 1.0)], "id": [(8, 0.5), (9, 0.95), (10, 1.0)]}
    rows = [(method, layer, value, 0.1) for method, each in points.items() for layer, value in each]
    rows += [("mat", 1, 0.99, math.nan), ("id", 1, 0.99, math.nan)]
    table = pd.DataFrame(rows, columns=["method", "layer", "value", "lam"]).assign(target=10)
    saved = savings(table).set_index("method")
    assert saved["saved"].to_dict() == pytest.approx({"mat": 3.5, "id": 1})
    assert saved["share"].to_dict() == pytest.approx({"mat": 0.35, "id": 0.1})
    assert set(saved["n_layers"]) == {10}
    assert savings(table, 0.9)["saved"].tolist() == pytest.approx([4, 1 + 0.05 / 0.45])
