"""Evaluations and their tables, against NumPy, SciPy and scikit-learn in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from identities import make_identity
from scipy import stats
from sklearn.metrics import r2_score
from torch import Tensor

from matlens import InputError, Lens, LensConfig, Readout
from matlens.activations.activations import Activations
from matlens.data.examples import Examples
from matlens.io.tables import COLUMNS
from matlens.lens import evaluate, evaluate_lenses, evaluation, fit_quality, prediction_quality
from matlens.lens.evaluation import Evaluation
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.models.identity import ModelIdentity, Provenance

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
    models = "'small' with the fingerprint beef, and 'small' with the fingerprint f00d"
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
    with pytest.raises(InputError, match="do not belong together"):
        evaluate_lenses(lenses, setting("bert" if name == "llama" else "llama").validation)
    assert found["mat", None, "seconds", None, ""] == 6.0 / 3
    assert found["mat", None, "parameters", None, ""] == model.cfg.d_model**2
    assert found["id", None, "parameters", None, ""] == 0
    # Standardised vectors have another variance than those that mat maps.
    assert set(table.loc[table["metric"].str.startswith("r2"), "method"]) == {"mat", "id"}
