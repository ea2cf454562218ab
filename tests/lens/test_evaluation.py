"""Evaluations, early exit, comparisons and trajectories, against NumPy, SciPy and loops in float64."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, SINK_TOKENS, assert_near, make_sentences, plain_vectors
from identities import make_identity
from scipy import stats
from sklearn.metrics import r2_score
from small_lenses import Sharp, make_lens
from torch import Tensor

from matlens import (
    InputError,
    Lens,
    LensConfig,
    LinearMap,
    MapSet,
    Readout,
    collect,
    make_examples,
    metrics,
    patched,
)  # fmt: skip
from matlens.activations.activations import Activations
from matlens.data.examples import Examples
from matlens.ffn import controlled
from matlens.io.tables import COLUMNS
from matlens.lens import (
    evaluate,
    evaluate_lenses,
    evaluation,
    exit_sweep,
    fit_quality,
    prediction_quality,
    savings,
    summarize,
)
from matlens.lens.comparison import compare_lenses
from matlens.lens.early_exit import exit_layers, thresholds
from matlens.lens.evaluation import Evaluation, map_lenses
from matlens.lens.open_sets import EvaluationItem, evaluate_open_sets, read_evaluations
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.tokens import word_token
from matlens.patching import Replacement
from matlens.plots import plot_report

L, N, D = 3, 23, 32
MODEL = make_identity("small", n_layers=L, d_model=D)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def log_softmax(scores: Any) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    shifted = scores - scores.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


# Token by token


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_predicts_nothing_and_harms_no_other(wrong, small_model):
    """Also vectors whose squares overflow, of which a norm would make something."""
    readout = Readout(small_model("llama"))
    truth = random(N, readout.d_model, seed=1)
    lost = torch.zeros(N, dtype=torch.bool)
    lost[[0, 7, N - 1]] = True
    broken, scores = truth.clone(), readout.logits(truth).clone()
    broken[[0, 7], [1, 4]] = wrong
    broken[N - 1] = wrong
    scores[lost, 3] = wrong if wrong != 1e30 else math.inf
    given = {"whole": truth, "vectors": broken, "scores": lambda part: scores[part]}
    whole, *others = evaluate(readout, truth, given, kl=True, progress=False).values()
    for other in others:
        of_lost = (readout.d_vocab + 1, math.inf, math.inf)
        for ours, theirs, value in zip(other[:3], whole[:3], of_lost, strict=True):
            assert torch.equal(ours[~lost], theirs[~lost])
            assert (ours[lost] == value).all()
        assert other.estimates()["kl", None].value == math.inf
        assert math.isnan(other.estimates()["kl", None].low)
    with pytest.raises(InputError, match="must be finite"):
        evaluate(readout, truth.log(), {"x": truth}, progress=False)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_each_token_is_compared_with_the_model_s_own_distribution(name, setting):
    model, _, validation = setting(name)
    readout, last = Readout(model), model.cfg.n_layers
    predictions = {
        "id": validation[1], "itself": validation[last],
        "loud": lambda part: 30 * readout.logits(validation[1][part]),
    }  # fmt: skip
    evaluated = evaluate(readout, validation[last], predictions, kl=True, confidence=True, progress=False)
    p = log_softmax(readout.logits(validation[last]))
    for key, factor in (("id", 1), ("loud", 30)):
        q = log_softmax(factor * readout.logits(validation[1]).double())
        of_first = p[np.arange(len(p)), q.argmax(1)]
        of_key = evaluated[key]
        assert of_key.rank.tolist() == (1 + (p > of_first[:, None]).sum(1)).tolist()
        np.testing.assert_allclose(of_key.surprisal, -of_first, rtol=1e-4)
        np.testing.assert_allclose(of_key.kl, (np.exp(p) * (p - q)).sum(1), rtol=1e-3, atol=1e-5)
        second, first = np.sort(np.exp(q), 1)[:, -2:].T
        np.testing.assert_allclose(of_key.confidence, first - second, rtol=1e-3, atol=1e-6)
    assert np.abs(evaluated["loud"].kl.numpy() / (np.exp(q) * (q - p)).sum(1) - 1).max() > 0.1  # not reversed
    assert evaluated["itself"].rank.tolist() == [1] * len(p)
    torch.testing.assert_close(evaluated["itself"].kl, torch.zeros(len(p)), atol=1e-5, rtol=0)


def test_differences_are_paired():
    base = torch.linspace(0, 50, 20)
    ours = Evaluation(torch.ones(20, dtype=torch.long), base + 1 + 0.1 * torch.sin(base), base)
    theirs = Evaluation(torch.tensor([1, 6] * 10), base, base)
    differences = ours.differences(theirs)
    expected = stats.ttest_rel(ours.surprisal.double(), theirs.surprisal.double()).confidence_interval()
    assert differences["surprisal", None].low == pytest.approx(expected.low)
    assert differences["surprisal", None].high == pytest.approx(expected.high)
    assert differences["surprisal", None].high < 1.2  # unpaired, an interval as wide as the spread
    assert differences["precision", 1].value == 0.5
    assert theirs.differences(ours)["precision", 1].value == -0.5
    assert differences["kl", None].value == 0
    center, spread = 10 / 22, math.sqrt(11 - 100 / 22) / 22  # ten ranks of 6 against 1, and ten that agree
    wanted = [center - 1.959964 * spread, center + 1.959964 * spread]
    assert list(differences["precision", 1][1:3]) == pytest.approx(wanted, rel=1e-6)
    assert differences["precision", 10].low < 0 < differences["precision", 10].high  # all agree


# Maps


def activations(n: int = N, model: ModelIdentity = MODEL) -> Activations:
    """A stream in which each layer is a step away from the one before; one site is inside a block."""
    stream = [random(n, D, seed=0)]
    for layer in range(L):
        stream.append(stream[-1] + 0.7 * random(n, D, seed=layer + 1))
    vectors = {f"h.{layer}": h for layer, h in enumerate(stream)}
    vectors |= {"ln1_out.0": random(n, D, seed=20), "attn_out.0": random(n, D, seed=21)}
    examples = Examples(np.zeros(n, dtype=np.int64), np.arange(n + 1), np.zeros(n, dtype=np.int64))
    return Activations(vectors, examples, "sampled", Provenance(model, {"corpus": "words"}))


ALL = [(f"h.{a}", f"h.{b}") for a in range(L) for b in range(a + 1, L + 1)]
INSIDE = [("ln1_out.0", "attn_out.0"), ("h.0", "attn_out.0")]


def mapset(pairs: list[tuple[str, str]], model: ModelIdentity = MODEL) -> MapSet:
    maps = []
    for i, (source, target) in enumerate(pairs):
        weight = 0.8 * torch.eye(D) + 0.3 * random(D, D, seed=40 + i)
        maps.append(LinearMap(weight, random(D, seed=60) if i % 2 else None, source, target))
    return MapSet(maps, provenance=Provenance(model))


def apply(linear: LinearMap, h: Any) -> np.ndarray:
    bias = 0 if linear.bias is None else linear.bias.double().numpy()
    return np.asarray(h, np.float64) @ linear.weight.double().numpy().T + bias


def only_row(table: pd.DataFrame, **wanted: Any) -> Any:
    for column, value in wanted.items():
        table = table[table[column] == value]
    assert len(table) == 1
    return table.iloc[0]


@pytest.mark.parametrize("rows", [None, torch.arange(N) % 3 != 1])
def test_fit_quality_is_r2_of_every_map_and_of_the_identity(rows):
    maps, data = mapset(ALL + INSIDE), activations()
    used = slice(None) if rows is None else rows
    table = fit_quality(maps, data, rows=rows, progress=False)
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == 2 * len(ALL) + len(INSIDE)
    for source, target in ALL + INSIDE:
        truth, h = (data[site][used].double().numpy() for site in (target, source))
        of_stream = (source, target) in ALL
        names = {"mat": apply(maps[source, target], h), "id": h}
        if not of_stream:  # by the names of both sites: layers alone would be those of the stream
            names = {f"mat {source} -> {target}": names["mat"]}
        for method, prediction in names.items():
            row = only_row(table, method=method, layer=int(source[-1]), target=int(target[-1]))
            assert row["value"] == pytest.approx(r2_score(truth, prediction), abs=1e-5)
            assert (row["experiment"], row["model"], row["corpus"]) == ("fit_quality", "small", "words")
            assert (row["metric"], row["n"]) == ("r2", len(truth))
            assert row[["k", "low", "high"]].isna().all()
    stream = {site: data[site] for site in data if site[0] == "h"}
    without = Activations(stream, data.examples, data.positions, data.provenance)
    pd.testing.assert_frame_equal(
        fit_quality(maps, without, rows=rows, progress=False), table[~table["method"].str.contains(" -> ")]
    )


def test_prediction_quality_is_what_the_definitions_count(small_model, monkeypatch):
    readout, identity = Readout(small_model("llama")), ModelIdentity.from_model(small_model("llama"))
    maps, data = mapset(ALL, identity), activations(model=identity)
    table = prediction_quality(readout, maps, data, progress=False)
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == (L + 1) * 2 * 4
    p, values = log_softmax(readout.logits(data[L])), set()
    for layer in range(L + 1):
        for method in ("mat", "id"):
            h = apply(maps[layer, L], data[layer]) if method == "mat" and layer < L else data[layer]
            token = readout.logits(torch.as_tensor(h).float()).argmax(1).numpy()
            surprisals = -p[range(N), token]
            ranks = (p > p[range(N), token][:, None]).sum(1)
            for k in (1, 5, 10):
                row = only_row(table, method=method, layer=layer, metric="precision", k=k)
                interval = stats.binomtest(int((ranks < k).sum()), N).proportion_ci(0.95, method="wilson")
                assert row["value"] == pytest.approx((ranks < k).mean())
                assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
                assert (row["experiment"], row["target"], row["n"]) == ("prediction_quality", L, N)
                values.add(row["value"])
            row = only_row(table, method=method, layer=layer, metric="surprisal")
            half = stats.t.ppf(0.975, N - 1) * surprisals.std(ddof=1) / math.sqrt(N)
            expected = surprisals.mean() + np.array([-half, 0, half])
            assert list(row[["low", "value", "high"]]) == pytest.approx(list(expected), rel=1e-4)
    assert len(values) > 8, "the samples tell nothing apart"
    monkeypatch.setattr(evaluation, "_ROWS", 7)  # whatever is read at once
    parts = prediction_quality(readout, maps, data, progress=False)
    pd.testing.assert_frame_equal(parts, table, rtol=1e-5)
    one = prediction_quality(readout, maps, activations(1, identity), progress=False)
    assert one[one["metric"] == "surprisal"][["low", "high"]].isna().all(axis=None)


@pytest.mark.refused
def test_what_does_not_belong_together_is_refused(small_model):
    readout = Readout(small_model("llama"))
    others = mapset(ALL, replace(MODEL, fingerprint="beef"))
    models = "beef.*f00d"
    with pytest.raises(InputError, match=models):
        fit_quality(others, activations(), progress=False)
    with pytest.raises(InputError, match=models):
        prediction_quality(readout, others, activations(), progress=False)
    for rows in (torch.ones(N - 1, dtype=torch.bool), torch.arange(N) < 1):
        with pytest.raises(InputError, match=r"^rows must be"):
            fit_quality(mapset(ALL), activations(), rows=rows, progress=False)
    with pytest.raises(InputError, match=rf"must have scores \({N}, {readout.d_vocab}\)"):
        evaluate(readout, random(N, D, seed=1), {"x": lambda part: torch.zeros(N, 3)})
    truth = random(256, D, seed=1)  # as many as are read out at once
    with pytest.raises(InputError, match="'x' must have 256 vectors"):
        evaluate(readout, truth, {"x": torch.cat([truth, truth[:1]])})


# Lenses


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_each_row_is_the_measure_of_its_lens(name, setting):
    model, train, validation = setting(name)
    lenses = {"mat": Lens.fit(model, train, method="mat", progress=False), "id": Lens.identity(model)}
    if name == "llama":
        lenses["standardise"] = Lens.fit(model, train, method=LensConfig(standardise=True), progress=False)
    sinks, last = torch.arange(validation.n_rows) < 3, model.cfg.n_layers
    table = evaluate_lenses(
        lenses, validation, layers=[1, 2], against="id", sinks=sinks,
        seconds=dict.fromkeys(lenses, 6.0), progress=False,
    )  # fmt: skip
    assert list(table.columns) == [*COLUMNS, "against"]
    keys = zip(table["method"], table["layer"], table["metric"], table["k"], table["against"], strict=True)
    found = {
        tuple(None if pd.isna(part) else part for part in key): value
        for key, value in zip(keys, table["value"], strict=True)
    }
    truth, mat = validation[last], lenses["mat"]
    for layer in (1, 2):
        h = validation[layer]
        evaluated = evaluate(Readout(model), truth, {"mat": mat(h, layer), "id": h}, kl=True, progress=False)
        for (metric, k), estimate in evaluated["mat"].estimates().items():
            assert found["mat", layer, metric, k, ""] == pytest.approx(estimate.value, rel=1e-6)
            plain = found["mat", layer, metric, k, ""] - found["id", layer, metric, k, ""]
            assert found["mat", layer, metric, k, "id"] == pytest.approx(plain, abs=1e-5)
        for metric, rows in (("r2", slice(None)), ("r2 without sinks", ~sinks)):
            expected = r2_score(truth[rows].double(), mat(h[rows], layer).double())
            assert found["mat", layer, metric, None, ""] == pytest.approx(expected, abs=1e-6)
        assert found["mat", layer, "r2", None, ""] != found["mat", layer, "r2 without sinks", None, ""]
    assert not any(key[0] == "id" and key[4] for key in found)
    with pytest.raises(InputError):
        evaluate_lenses(lenses, setting("bert" if name == "llama" else "llama").validation)
    assert found["mat", None, "seconds", None, ""] == 6.0 / 3
    assert found["mat", None, "parameters", None, ""] == model.cfg.d_model**2
    assert found["id", None, "parameters", None, ""] == 0
    # Standardised vectors have another variance than those that mat maps.
    assert set(table.loc[table["metric"].str.startswith("r2"), "method"]) == {"mat", "id"}


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
    with pytest.raises(InputError):
        exit_sweep({"id": lens}, setting("llama").validation)
    with pytest.raises(InputError, match="those that all lenses have"):
        exit_sweep({"id": lens, "x": replace(lens, maps={1: None})}, validation, layers=[1, 2])
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


NO_SINKS = LensConfig(sinks="exclude")


def test_a_decoder_is_compared_with_jacobians_fitted_lenses_and_open_sets(small_model, tmp_path):
    model, parts = small_model("gpt2"), make_sentences().split(n_train=30, n_validation=10, seed=0)
    items = {"own": [EvaluationItem("a", "w1 w2 w3", (("w4",),)), EvaluationItem("b", "w5", (("w6",),))]}
    methods = ["id", "mat", NO_SINKS, "polished", "jacobian"]
    mine = Lens.fit(model, parts[0], method=LensConfig(ridge=0.1), layers=[1, 2], progress=False)
    made = compare_lenses(
        model, parts, tmp_path, methods=methods, fitted={"mine": (mine, 6.0)}, layers=[1, 2], n_prompts=2,
        evaluations=items, seed=3, progress=False,
    )  # fmt: skip
    names = ["id", "mat", "sinks=exclude", "polished", "jacobian", "mine"]
    assert list(dict.fromkeys(made.report["method"])) == list(made.lenses) == names
    assert set(made.report["against"]) == {"", "mat"}
    assert set(made.report["layer"].dropna()) == {1, 2}
    assert (made.report.loc[made.report["metric"] == "kl", "n"] == 10).all()
    assert set(made.exits["method"]) == set(names)
    assert made.evaluations is not None
    assert set(made.evaluations["method"]) == set(names)
    together = Lens.fit(model, parts[0], method=methods, layers=[1, 2], n_prompts=2, seed=3, progress=False)
    assert {name: lens.digest for name, lens in together.items()} == {
        name: made.lenses[name].digest for name in together
    }
    assert made.origin["n_rows"] == sum(len(text.split()) for text in parts[0].sentences)
    assert made.origin["n_prompts"] == 2
    wide = summarize(made.report, made.exits)
    assert wide.loc["mine", "seconds"] == 6.0 / 2
    plain = made.report[(made.report["method"] == "mat") & (made.report["against"] == "")]
    assert wide.loc["mat", "kl"] == pytest.approx(plain.loc[plain["metric"] == "kl", "value"].mean())
    assert plot_report(made.report).axes


def test_sinks_are_those_of_the_validation_sentences(small_model, tmp_path):
    """Each lens is fitted with or without sinks, and r2 is given with and without those of validation."""
    model, parts = small_model("llama-sinks"), make_sentences().split(n_train=25, n_validation=15, seed=0)

    def at_sinks(seed: int) -> np.ndarray:
        examples = make_examples(model, parts[1], seed=seed)
        return np.isin(examples.tokens[examples.offsets[:-1] + examples.positions], SINK_TOKENS)

    seed = next(seed for seed in range(1, 99) if at_sinks(seed).sum() > 1)
    made = compare_lenses(
        model, parts, tmp_path, methods=["mat", NO_SINKS, "id"], layers=[1], seed=seed, progress=False
    )
    train = collect(model, make_examples(model, parts[0], seed=seed), positions="all", progress=False)
    validation = collect(model, make_examples(model, parts[1], seed=seed), progress=False)
    fitted_sinks, sinks = np.isin(train.examples.tokens, SINK_TOKENS), at_sinks(seed)
    assert 1 < sinks.sum() < len(sinks) - 3
    assert made.origin["n_sinks"] == sinks.sum()
    truth, h = (validation[layer].double().numpy() for layer in (3, 1))
    found = made.report.set_index(["method", "metric", "against", "layer"])["value"]
    for name in ("mat", NO_SINKS.name, "id"):
        mapped = h
        if name != "id":
            rows = ~fitted_sinks if name == NO_SINKS.name else slice(None)
            x, y = (train[layer].double().numpy()[rows] for layer in (1, 3))
            mapped = h @ np.linalg.lstsq(x, y, rcond=None)[0]
        for metric, used in (("r2", slice(None)), ("r2 without sinks", ~sinks)):
            expected = r2_score(truth[used], mapped[used])
            assert found[name, metric, "", 1] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def write(folder: Path, name: str, items: list[Any]) -> Path:
    path = folder / f"lens-eval-{name}.json"
    path.write_text(json.dumps({"items": items}))
    return path


def test_each_evaluation_is_read_at_its_own_token(tmp_path):
    write(
        tmp_path,
        "multihop",
        [{"name": "a", "prompt": "The river of tulips is ", "intermediates": ["W"], "target": "R"}],
    )
    write(tmp_path, "poetry", [{"prompt": "First line,\nsecond", "intermediates": ["rhyme"]}])
    write(
        tmp_path, "order-ops", [{"prompt": "(2 + 3) * 4 = ", "intermediates": ["5", "multiplication", "77"]}]
    )
    items = read_evaluations(tmp_path)
    assert list(items) == ["multihop", "order-ops", "poetry"]
    assert items["multihop"] == [EvaluationItem("a", "The river of tulips is", (("W",),))]
    assert items["poetry"][0].text == "First line,\n"
    assert items["order-ops"][0].words == (
        ("5", "five"), ("multiplication", "*", "times", "multiply", "product"), ("77",)
    )  # fmt: skip


def test_scores_are_those_of_a_loop(small_model):
    model = small_model("llama")
    lens = Lens.identity(model)
    texts = ["w1 w2 w3", "w9 w8", "w4 w5 w6 w7", "w3"]
    words = [(("w10",), ("w11", "w12")), (("w13",),), (("tulip",),), (("w1 w2",), ("w14",))]
    texts += [f"w{i} w{i + 20}" for i in range(20)]
    words += [((f"w{i + 5}", f"w{i + 25}"),) for i in range(20)]
    items = [EvaluationItem(str(i), text, of) for i, (text, of) in enumerate(zip(texts, words, strict=True))]
    table = evaluate_open_sets({"id": lens}, {"own": items}, layers=[1, 2], progress=False)
    shares: dict[int, list[float]] = {1: [], 5: [], 10: []}
    for text, of in zip(texts, words, strict=True):
        trajectory = lens.trajectory(text)
        best = []
        for spellings in of:
            ranks = []
            for layer in (1, 2):
                logits = lens.logits(trajectory._vectors[layer], layer)[-1]
                for spelling in spellings:
                    token = model.tokenizer.convert_tokens_to_ids(spelling)
                    if spelling not in ("tulip", "w1 w2"):
                        ranks.append(int((logits > logits[token]).sum()))
            if ranks:
                best.append(min(ranks))
        for k in shares:
            if best:
                shares[k].append(sum(rank < k for rank in best) / len(best))
    rows = table.set_index("k")
    for k, values in shares.items():
        assert rows.loc[k, "value"] == pytest.approx(sum(values) / 23)
        assert rows.loc[k, "n"] == 23
        interval = metrics.share(torch.tensor(values), n_entries=24)
        assert list(rows.loc[k, ["low", "high"]]) == pytest.approx([interval.low, interval.high])
        assert 0 <= interval.low < interval.high <= 1
    assert (table["metric"] == "pass").all()
    assert table["corpus"].unique().tolist() == ["own"]


PROMPT = "w3 w14 w15 w9 w26"


def expected_logits(lens: Lens, plain: Any, ids: torch.Tensor) -> torch.Tensor:
    """Scores of every layer and token by the plain model's own modules, ``[layers, tokens, vocabulary]``."""
    seen = plain_vectors("llama", plain, ids[None])
    scores = []
    with torch.no_grad():
        for layer in (*lens.layers, N_LAYERS):
            h = seen[f"h.{layer}"][0]
            if layer < N_LAYERS:
                bias = getattr(lens.maps[layer], "bias", None)
                h = h @ lens.matrix(layer).T + (0 if bias is None else bias)
            scores.append(plain.lm_head(plain.model.norm(h)) * lens.scales.get(layer, 1))
    return torch.stack(scores)


@pytest.mark.parametrize("in_memory", [2**24, 100])  # scores: all tokens at once, and one at a time
def test_everything_is_as_computed_from_the_plain_model(in_memory, small_model, plain_model, monkeypatch):
    monkeypatch.setattr("matlens.lens.trajectory._SCORES", in_memory)
    model = small_model("llama")
    lens = make_lens(model).on(model)
    trajectory = lens.trajectory(PROMPT, k=3)
    assert trajectory.tokens == tuple(PROMPT.split())
    assert trajectory.layers == (0, 1, 2, 3)
    logits = expected_logits(lens, plain_model("llama"), trajectory.ids).double()
    q = logits.softmax(-1)
    p = q[-1:]
    assert torch.equal(trajectory.top_ids, q.topk(3).indices)
    assert_near(trajectory.probabilities, q.topk(3).values.float())
    assert_near(trajectory.entropy, -(q * q.log()).sum(-1).float())
    assert_near(trajectory.kl, (p * (p.log() - q.log())).sum(-1).float(), 1e-4)
    final = torch.stack([q[:, i, token] for i, token in enumerate(trajectory.top_ids[-1, :, 0])], 1)
    assert torch.equal(trajectory.final_rank, 1 + (q > final[..., None]).sum(-1))
    word = word_token(model.tokenizer, "w7")
    ranks, probabilities = trajectory.rank("w7"), trajectory.probability(word)
    assert list(ranks) == list(probabilities) == [0, 1, 2, 3]
    assert torch.equal(torch.stack([*ranks.values()]), 1 + (q > q[..., word, None]).sum(-1))
    assert_near(torch.stack([*probabilities.values()]), q[..., word].float())
    for place, token in enumerate([*trajectory.top_ids[-1, :, 0].tolist()[:4], word]):
        first = next((x for x in range(N_LAYERS + 1) if (q[x:, place].argmax(-1) == token).all()), None)
        assert trajectory.first_top1(token, place) == first
    assert trajectory.first_top1(int(trajectory.top_ids[-1, -1, 0])) is not None


DIRECTION = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(4))


def hooked(model: Any) -> Any:
    def add_direction(value: Tensor, hook: Any) -> Tensor:
        return value + DIRECTION

    return model.hooks(fwd_hooks=[("blocks.0.hook_out", add_direction)])


CHANGES = {
    "hooks": hooked,
    "patched": lambda model: patched(model, [Replacement(lambda h: h + DIRECTION, 1, 1)]),
    "controlled": lambda model: controlled(model, {"L0D5": 30.0}),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_model_is_read_by_the_lens_of_the_plain_one(kind, small_model, plain_model):
    model, plain = small_model("llama"), plain_model("llama")
    lens = make_lens(model).on(model)
    before = lens.trajectory(PROMPT, k=3)
    with CHANGES[kind](model):
        trajectory = lens.trajectory(PROMPT, k=3)
    block = plain.model.layers[0]
    if kind == "controlled":
        edit = block.mlp.down_proj.register_forward_pre_hook(
            lambda module, given: (given[0].index_fill(-1, torch.tensor([5]), 30.0),)
        )
    else:
        edit = block.register_forward_hook(lambda module, given, left: left + DIRECTION)
    try:
        q = expected_logits(lens, plain, trajectory.ids).double().softmax(-1)
    finally:
        edit.remove()
    assert torch.equal(trajectory.top_ids, q.topk(3).indices)
    assert_near(trajectory.probabilities, q.topk(3).values.float())
    assert not torch.equal(trajectory.top_ids, before.top_ids)
    changes = trajectory.provenance.active_hooks
    assert changes
    assert not before.provenance.active_hooks
    name = {"hooks": "add_direction", "patched": "h.1 -> h.1", "controlled": "L0D5"}[kind]
    titles = [read.plot().get_suptitle() for read in (before, trajectory)]
    assert [name in title.replace("\\", "") for title in titles] == [False, True]
    assert [name in read.to_html().replace("&gt;", ">") for read in (before, trajectory)] == [False, True]
    assert [name in repr(read) for read in (before, trajectory)] == [False, True]
    assert "changes" not in before.to_dataframe()
    assert trajectory.to_dataframe(["w7"])["changes"].str.contains(name, regex=False).all()


def test_layers_that_a_jump_skips_are_not_read(small_model):
    model = small_model("llama")
    lens = make_lens(model).on(model)
    with patched(model, [Replacement(lambda h: h, 0, 3)]):
        trajectory = lens.trajectory(PROMPT)
    assert trajectory.layers == (0, 3)
    assert torch.equal(trajectory._vectors[0], trajectory._vectors[1])
    assert lens.trajectory(PROMPT).layers == (0, 1, 2, 3)


def test_tokens_are_texts_by_layer_and_position(small_model):
    model = small_model("llama")
    lens = make_lens(model).on(model)
    trajectory = lens.trajectory(PROMPT, k=2, layers=[1, -2])
    texts, table = trajectory.top_tokens(), trajectory.to_dataframe(["w7", 9])
    assert len(table) == 2 * 5 * 3
    row = table.query("position == 4 and layer == 2 and answer == 'w7'").iloc[0]
    assert row["token"] == "w26"
    assert row["predicted"] == texts[2][4][0]
    assert row["kl"] == pytest.approx(float(trajectory.kl[1, 4]))
    assert row["answer_rank"] == int(trajectory.rank("w7")[2][4])
    other = table.query("position == 4 and layer == 2 and answer == 9").iloc[0]
    assert other["answer_probability"] == pytest.approx(float(trajectory.probability(9)[2][4]))
    assert (table[table["layer"] == N_LAYERS]["kl"] == 0).all()


def test_the_last_layer_ranks_its_own_prediction_first(small_model):
    """Also where a soft cap makes logits so alike that log-probabilities are rounded to ties."""
    trajectory = Lens.identity(small_model("gemma2")).trajectory("w1 w2 w3 w4 w5 w6 w7 w8")
    assert bool((trajectory.final_rank[-1] == 1).all())
