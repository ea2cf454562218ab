"""Evaluations and their tables, against loops that follow the definitions one example at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from identities import make_identity
from linear_head import VOCAB, D, Head, distribution, random
from paper_a.alternation import r2_matrix
from scipy import stats
from sklearn.metrics import r2_score

from matlens import InputError, Lens, Readout
from matlens.activations.activations import Activations
from matlens.cli.printing import print_members
from matlens.data.examples import Examples
from matlens.io.tables import COLUMNS
from matlens.lens import evaluation
from matlens.lens.early_exit import exit_sweep
from matlens.lens.evaluation import (
    Evaluation,
    Member,
    evaluate,
    fit_quality,
    layer_table,
    prediction_quality,
    report_by_member,
    report_table,
)
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.models.identity import ModelIdentity, Provenance

Settings = Callable[[str], Any]
L, N = 3, 23
MODEL = make_identity("small", n_layers=L, d_model=D)


# Token by token


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_predicts_nothing_and_harms_no_other(wrong: float, small_model: Settings) -> None:
    """Also vectors whose squares overflow, of which a norm would make something."""
    readout = Readout(small_model("llama"))
    truth = random(N, readout.d_model, seed=1)
    lost = torch.zeros(N, dtype=torch.bool)
    lost[[0, 7, N - 1]] = True
    broken, scores = truth.clone(), readout.logits(truth).clone()
    broken[[0, 7], [1, 4]] = wrong
    broken[N - 1] = wrong
    scores[lost, 3] = wrong if abs(wrong) != 1e30 else math.inf
    given = {"whole": truth, "vectors": broken, "scores": lambda part: scores[part]}
    whole, *others = evaluate(readout, truth, given, kl=True, progress=False).values()
    for other in others:
        of_lost = (readout.d_vocab + 1, math.inf, math.inf)
        for ours, theirs, value in zip(other[:3], whole[:3], of_lost, strict=True):
            assert torch.equal(ours[~lost], theirs[~lost])
            assert (ours[lost] == value).all()
        assert other.estimates()["kl", None].value == math.inf
        assert math.isnan(other.estimates()["kl", None].low)


def test_a_truth_that_is_not_finite_is_refused() -> None:
    truth = random(N, D, seed=1)
    truth[3, 2] = math.inf
    with pytest.raises(InputError, match="vectors at the read-out are not finite"):
        evaluate(Head(), truth, {"x": truth}, progress=False)


def test_differences_are_paired() -> None:
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
    with pytest.raises(InputError, match="same tokens"):
        ours.differences(Evaluation(*(part[:3] for part in theirs[:3])))


@pytest.mark.refused
def test_what_cannot_be_judged_is_refused() -> None:
    head, truth = Head(), random(N, D, seed=1)
    with pytest.raises(InputError, match="must not be empty"):
        evaluate(head, truth, {})
    with pytest.raises(InputError, match=rf"must have scores \(23, {VOCAB}\)"):
        evaluate(head, truth, {"x": lambda part: torch.zeros(len(truth[part]), VOCAB - 1)})


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_each_token_is_judged_by_the_model_s_own_distribution(name: str, setting: Settings) -> None:
    model, _, validation = setting(name)
    readout, last = Readout(model), model.cfg.n_layers
    predictions = {
        "id": validation[1], "itself": validation[last],
        "loud": lambda part: 30 * readout.logits(validation[1][part]),
    }  # fmt: skip
    evaluated = evaluate(readout, validation[last], predictions, kl=True, progress=False)
    judged, itself, loud = evaluated.values()
    p = log_softmax(readout.logits(validation[last]).double().numpy())
    q = log_softmax(readout.logits(validation[1]).double().numpy())
    first = q.argmax(1)
    of_first = p[np.arange(len(p)), first]
    assert judged.rank.tolist() == (1 + (p > of_first[:, None]).sum(1)).tolist()
    np.testing.assert_allclose(judged.surprisal.numpy(), -of_first, rtol=1e-4)
    np.testing.assert_allclose(judged.kl.numpy(), (np.exp(p) * (p - q)).sum(1), rtol=1e-3, atol=1e-5)
    q = log_softmax(30 * readout.logits(validation[1]).double().numpy())
    np.testing.assert_allclose(loud.kl.numpy(), (np.exp(p) * (p - q)).sum(1), rtol=1e-3)
    assert np.abs(loud.kl.numpy() / (np.exp(q) * (q - p)).sum(1) - 1).max() > 0.1  # the other way round
    assert itself.rank.tolist() == [1] * len(p)
    torch.testing.assert_close(itself.kl, torch.zeros(len(p)), atol=1e-5, rtol=0)


# Maps


def activations(n: int = N, model: ModelIdentity = MODEL) -> Activations:
    """A stream in which each layer is a step away from the one before; one site is inside a block."""
    stream = [random(n, D, seed=0)]
    for layer in range(L):
        stream.append(stream[-1] + 0.7 * random(n, D, seed=layer + 1))
    vectors = {f"h.{layer}": h for layer, h in enumerate(stream)}
    vectors |= {"ln1_out.0": random(n, D, seed=20), "attn_out.0": random(n, D, seed=21)}
    examples = Examples(np.zeros(n, dtype=np.int64), np.arange(n + 1), np.zeros(n, dtype=np.int64))
    return Activations(vectors, examples, "drawn", Provenance(model, {"corpus": "words"}))


def mapset(pairs: list[tuple[str, str]], model: ModelIdentity = MODEL) -> MapSet:
    maps = []
    for i, (source, target) in enumerate(pairs):
        weight = 0.8 * torch.eye(D) + 0.3 * random(D, D, seed=40 + i)
        maps.append(LinearMap(weight, random(D, seed=60) if i % 2 else None, source, target))
    return MapSet(maps, provenance=Provenance(model))


ALL = [(f"h.{a}", f"h.{b}") for a in range(L) for b in range(a + 1, L + 1)]
INSIDE = [("ln1_out.0", "attn_out.0"), ("h.0", "attn_out.0")]


def _rest(data: Activations) -> tuple[Any, ...]:
    return data.examples, data.positions, data.provenance


def only_row(table: pd.DataFrame, **wanted: Any) -> Any:
    rows = table
    for column, value in wanted.items():
        rows = rows[rows[column] == value]
    assert len(rows) == 1
    return rows.iloc[0]


def apply(linear: LinearMap, h: list[float]) -> list[float]:
    bias = [0.0] * D if linear.bias is None else linear.bias.tolist()
    return [
        sum(w * x for w, x in zip(row, h, strict=True)) + b
        for row, b in zip(linear.weight.tolist(), bias, strict=True)
    ]


# Quality of fit


def test_only_the_rows_that_are_named_count_in_r2() -> None:
    maps, data = mapset([("h.0", "h.2")]), activations()
    rows = torch.arange(N) % 3 != 1
    table = fit_quality(maps, data, rows=rows, progress=False)
    truth, source = (data[site].double().numpy()[rows.numpy()] for site in ("h.2", "h.0"))
    assert only_row(table, method="id")["value"] == pytest.approx(r2_score(truth, source), abs=1e-5)
    mapped = np.array([apply(maps["h.0", "h.2"], h) for h in source.tolist()])
    assert only_row(table, method="mat")["value"] == pytest.approx(r2_score(truth, mapped), abs=1e-5)
    assert set(table["n"]) == {int(rows.sum())}


@pytest.mark.refused
def test_rows_of_other_examples_are_refused() -> None:
    for rows in (torch.ones(N - 1, dtype=torch.bool), torch.arange(N) < 1):
        with pytest.raises(InputError, match=r"^rows must be"):
            fit_quality(mapset([("h.0", "h.2")]), activations(), rows=rows, progress=False)


def test_fit_quality_is_r2_of_every_map_of_the_stream_and_of_the_identity() -> None:
    maps, data = mapset(ALL + INSIDE), activations()
    table = fit_quality(maps, data, progress=False)
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == 2 * len(ALL) + len(INSIDE)
    without = Activations({site: data[site] for site in data if site[0] == "h"}, *_rest(data))
    pd.testing.assert_frame_equal(
        fit_quality(maps, without, progress=False), table[~table["method"].str.contains(" -> ")]
    )
    for source, target in INSIDE:  # by the names of both sites: layers alone would be those of the stream
        mapped = np.array([apply(maps[source, target], h) for h in data[source].tolist()])
        row = only_row(table, method=f"mat {source} -> {target}")
        assert row["value"] == pytest.approx(r2_score(data[target].double().numpy(), mapped), abs=1e-5)
        assert (row["layer"], row["target"], row["n"]) == (0, 0, N)
    for source, target in ALL:
        truth = data[target].double().numpy()
        mapped = np.array([apply(maps[source, target], h) for h in data[source].tolist()])
        for method, prediction in (("mat", mapped), ("id", data[source].double().numpy())):
            row = only_row(table, method=method, layer=int(source[2:]), target=int(target[2:]))
            assert row["value"] == pytest.approx(r2_score(truth, prediction), abs=1e-5)
            assert (row["experiment"], row["model"], row["corpus"]) == ("fit_quality", "small", "words")
            assert (row["metric"], row["n"]) == ("r2", N)
            assert row[["k", "low", "high"]].isna().all()


# Quality of prediction


def test_prediction_quality_is_what_a_loop_over_examples_counts() -> None:
    maps, data, head = mapset(ALL + INSIDE), activations(), Head()
    table = prediction_quality(head, maps, data, progress=False)
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == (L + 1) * 2 * 4
    values = set()
    for layer in range(L + 1):
        for method in ("mat", "id"):
            ranks, surprisals = [], []
            for h, final in zip(data[layer].tolist(), data[L].tolist(), strict=True):
                substitute = apply(maps[layer, L], h) if method == "mat" and layer < L else h
                p, q = distribution(head, final), distribution(head, substitute)
                t = q.index(max(q))
                ranks.append(sorted(p, reverse=True).index(p[t]))
                surprisals.append(-math.log(p[t]))
            for k in (1, 5, 10):
                row = only_row(table, method=method, layer=layer, metric="precision", k=k)
                hits = sum(r < k for r in ranks)
                assert row["value"] == pytest.approx(hits / N)
                interval = stats.binomtest(hits, N).proportion_ci(0.95, method="wilson")
                assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
                assert (row["experiment"], row["target"], row["n"]) == ("prediction_quality", L, N)
                assert (row["model"], row["corpus"]) == ("small", "words")
                values.add(row["value"])
            row = only_row(table, method=method, layer=layer, metric="surprisal")
            assert row["value"] == pytest.approx(np.mean(surprisals), rel=1e-5)
            half = stats.t.ppf(0.975, N - 1) * np.std(surprisals, ddof=1) / math.sqrt(N)
            assert (row["high"] - row["value"], row["value"] - row["low"]) == pytest.approx(
                (half, half), rel=1e-4
            )
            assert pd.isna(row["k"])
            assert (row["target"], row["n"]) == (L, N)
    assert len(values) > 8, "the samples tell nothing apart"


@pytest.mark.parametrize("rows", [1, 7, N - 1, N, 1000])
def test_results_do_not_depend_on_how_many_examples_are_read_at_once(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, maps, data = Head(), mapset(ALL), activations()
    whole = prediction_quality(head, maps, data, progress=False)
    monkeypatch.setattr(evaluation, "_ROWS", rows)
    head.largest = 0
    parts = prediction_quality(head, maps, data, progress=False)
    assert head.largest == min(rows, N)
    pd.testing.assert_frame_equal(parts, whole, rtol=1e-5)


def test_maps_of_another_model_are_refused() -> None:
    maps = mapset(ALL, replace(MODEL, fingerprint="beef"))
    models = "'small' with the fingerprint beef, and 'small' with the fingerprint f00d"
    with pytest.raises(InputError, match=models):
        fit_quality(maps, activations(), progress=False)
    with pytest.raises(InputError, match=models):
        prediction_quality(Head(), maps, activations(), progress=False)


def test_one_example_gives_a_prediction_without_an_interval_of_its_surprisal() -> None:
    table = prediction_quality(Head(), mapset(ALL), activations(1), progress=False)
    assert table[table["metric"] == "surprisal"][["low", "high"]].isna().all(axis=None)
    assert table[table["metric"] == "precision"][["low", "high"]].notna().all(axis=None)


# Rows and tables


# Tables for people and figures


def both() -> pd.DataFrame:
    maps, data = mapset(ALL), activations()
    tables = [fit_quality(maps, data, progress=False), prediction_quality(Head(), maps, data, progress=False)]
    return pd.concat([table.astype({"k": "Int64"}) for table in tables], ignore_index=True)


def fit_only() -> pd.DataFrame:
    return fit_quality(mapset(ALL), activations(), progress=False)


@pytest.mark.parametrize("make", [both, fit_only])
def test_layer_table_shows_what_concerns_the_last_layer(make: Callable[[], pd.DataFrame]) -> None:
    results = make()
    table = layer_table(results)
    assert list(table.columns) == (
        ["r2 mat", "r2 id", "P@1 mat", "P@1 id", "surprisal mat", "surprisal id"]
        if make is both
        else ["r2 mat", "r2 id"]
    )
    assert list(table.index) == list(range(L + 1 if make is both else L))
    for name in table.columns:
        short, method = name.split()
        for layer in table.index:
            if short == "r2" and layer == L:
                assert math.isnan(table.loc[layer, name])
                continue
            wanted = {"method": method, "layer": layer, "target": L}
            wanted |= {"metric": "precision", "k": 1} if short == "P@1" else {"metric": short}
            assert table.loc[layer, name] == only_row(results, **wanted)["value"]


def test_to_tensor_puts_r2_at_layer_and_target_and_nothing_elsewhere() -> None:
    results = both()
    for method in ("mat", "id"):
        grid = r2_matrix(results, method)
        assert grid.shape == (L + 1, L + 1)
        for a in range(L + 1):
            for b in range(L + 1):
                if a < b:
                    row = only_row(results, method=method, layer=a, target=b, metric="r2")
                    assert grid[a, b].item() == pytest.approx(row["value"], rel=1e-6)
                else:
                    assert math.isnan(grid[a, b].item())


# Lenses


def members(model: Any, train: Any) -> dict[str, Member]:
    mat = Lens.fit(model, train, method="mat", progress=False)
    return {"mat": Member(mat, 6.0, 900.0), "id": Member(Lens.identity(model))}


def values(table: Any) -> dict[Any, float]:
    keys = zip(table["method"], table["layer"], table["metric"], table["k"], table["against"], strict=True)
    return {
        tuple(None if pd.isna(part) else part for part in key): value
        for key, value in zip(keys, table["value"], strict=True)
    }


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_each_row_is_the_measure_of_its_member(name: str, setting: Settings) -> None:
    model, train, validation = setting(name)
    fitted = members(model, train)
    sinks = torch.arange(validation.n_rows) < 3
    table = report_table(fitted, validation, layers=[1, 2], against="id", sinks=sinks, progress=False)
    assert list(table.columns) == [*COLUMNS, "against"]
    found, last = values(table), model.cfg.n_layers
    mat, truth = fitted["mat"].lens, validation[last]
    for layer in (1, 2):
        h = validation[layer]
        stand_ins = {"mat": mat(h, layer), "id": h}
        judged = evaluate(Readout(model), truth, stand_ins, kl=True, progress=False)
        for (metric, k), estimate in judged["mat"].estimates().items():
            assert found["mat", layer, metric, k, ""] == pytest.approx(estimate.value, rel=1e-6)
        for (metric, k), estimate in judged["mat"].differences(judged["id"]).items():
            assert found["mat", layer, metric, k, "id"] == pytest.approx(estimate.value, rel=1e-6, abs=1e-9)
            plain = found["mat", layer, metric, k, ""] - found["id", layer, metric, k, ""]
            assert found["mat", layer, metric, k, "id"] == pytest.approx(plain, abs=1e-5)
        for metric, rows in (("r2", slice(None)), ("r2 without sinks", ~sinks)):
            expected = r2_score(truth[rows].double(), mat(h[rows], layer).double())
            assert found["mat", layer, metric, None, ""] == pytest.approx(expected, abs=1e-6)
        assert found["mat", layer, "r2", None, ""] != found["mat", layer, "r2 without sinks", None, ""]
    assert not any(key[0] == "id" and key[4] for key in found)
    assert found["mat", None, "seconds", None, ""] == 6.0 / 3
    assert found["mat", None, "flops", None, ""] == 300
    assert found["mat", None, "numbers", None, ""] == model.cfg.d_model**2
    assert found["mat", None, "bytes", None, ""] == 4 * model.cfg.d_model**2
    assert found["id", None, "bytes", None, ""] == 0
    wide = report_by_member(table)
    assert wide.loc["mat", "P@1"] == pytest.approx(
        (found["mat", 1, "precision", 1, ""] + found["mat", 2, "precision", 1, ""]) / 2
    )
    assert wide.loc["id", "kl"] != wide.loc["mat", "kl"]


def test_r2_is_given_of_lenses_of_one_space_alone(
    setting: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standardized vectors have another variance than those that ``mat`` maps."""
    model, train, validation = setting("llama")
    lens = Lens.fit(model, train, method="normed+affine", progress=False)
    fitted = {**members(model, train), "normed+affine": Member(lens, 6.0)}
    sinks = torch.arange(validation.n_rows) < 3
    table = report_table(fitted, validation, layers=[1], sinks=sinks, progress=False)
    assert set(table.loc[table["metric"].str.startswith("r2"), "method"]) == {"mat", "id"}
    assert "kl" in set(table.loc[table["method"] == "normed+affine", "metric"])
    exits = exit_sweep({"normed+affine": lens}, validation, layers=[1], progress=False)
    print_members(table[table["method"] == "normed+affine"], exits)
    assert "nan" not in capsys.readouterr().out


@pytest.mark.refused
def test_what_cannot_be_reported_on_is_refused(setting: Settings) -> None:
    model, train, validation = setting("llama")
    fitted = members(model, train)
    with pytest.raises(InputError, match="one lens or more"):
        report_table({}, validation)
    with pytest.raises(InputError, match="against must be one of"):
        report_table(fitted, validation, against="tuned")
    with pytest.raises(InputError, match="do not belong together"):
        report_table(fitted, setting("bert").validation)
    with pytest.raises(InputError, match=r"^~sinks must be"):
        report_table(fitted, validation, sinks=torch.ones(validation.n_rows, dtype=torch.bool))
    of_one = {"mat": Member(Lens.fit(model, train, method="mat", layers=[1], progress=False))}
    with pytest.raises(InputError, match=r"those that all lenses have, \[1\]"):
        report_table(of_one, validation, layers=[2])
    with pytest.raises(InputError, match=r"lens\.report_table"):
        report_by_member(report_table(fitted, validation, layers=[1], progress=False)[["value"]])
