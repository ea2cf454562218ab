"""Tables of results, against loops that follow the definitions one example at a time."""

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
from scipy import stats
from sklearn.metrics import r2_score

from matlens.activations.activations import Activations
from matlens.data.examples import Examples
from matlens.errors import InputError
from matlens.lens import judgement
from matlens.lens.judgement import Judgement
from matlens.lens.quality import (
    fit_quality,
    layer_table,
    prediction_quality,
    prediction_rows,
    r2_matrix,
)
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.models.identity import ModelIdentity, Provenance

L, N = 3, 23
MODEL = make_identity("small", n_layers=L, d_model=D)


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
COLUMNS = [
    "experiment",
    "model",
    "corpus",
    "method",
    "layer",
    "target",
    "metric",
    "k",
    "value",
    "low",
    "high",
    "n",
]


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
    assert list(table.columns) == COLUMNS
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
    assert list(table.columns) == COLUMNS
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


@pytest.mark.parametrize("scale", [0.01, 2.0, 30.0])
def test_at_the_last_layer_both_methods_are_right_and_as_surprised_as_the_model_itself(scale: float) -> None:
    data, head = activations(), Head(scale)
    table = prediction_quality(head, mapset(ALL), data, progress=False)
    expected = np.mean([-math.log(max(distribution(head, h))) for h in data[L].tolist()])
    for method in ("mat", "id"):
        for k in (1, 5, 10):
            assert only_row(table, method=method, layer=L, metric="precision", k=k)["value"] == 1
        value = only_row(table, method=method, layer=L, metric="surprisal")["value"]
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("rows", [1, 7, N - 1, N, 1000])
def test_results_do_not_depend_on_how_many_examples_are_read_at_once(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, maps, data = Head(), mapset(ALL), activations()
    whole = prediction_quality(head, maps, data, progress=False)
    monkeypatch.setattr(judgement, "_ROWS", rows)
    head.largest = 0
    parts = prediction_quality(head, maps, data, progress=False)
    assert head.largest == min(rows, N)
    pd.testing.assert_frame_equal(parts, whole, rtol=1e-5)


def test_only_layers_with_a_map_to_the_last_are_shown() -> None:
    maps = mapset([("h.0", "h.2"), ("h.1", "h.3")])
    table = prediction_quality(Head(), maps, activations(), progress=False)
    assert sorted(set(table["layer"])) == [1, 3]
    assert set(table["target"]) == {3}


@pytest.mark.parametrize("pairs", [[], INSIDE, [("h.0", "h.1"), ("h.1", "h.2")]])
def test_without_a_map_to_the_last_layer_there_is_nothing_to_predict_from(
    pairs: list[tuple[str, str]],
) -> None:
    with pytest.raises(InputError, match=r"no map to the last layer h\.3"):
        prediction_quality(Head(), mapset(pairs), activations(), progress=False)


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


def test_an_infinite_surprisal_has_no_interval() -> None:
    data = activations()
    judged = Judgement(
        torch.tensor([0] * (N - 3) + [VOCAB] * 3),
        torch.ones(N).index_fill(0, torch.tensor([N - 1]), math.inf),
    )
    table = pd.DataFrame(prediction_rows("x", data, "broken", 1, judged))
    for k in (1, 5, 10):
        assert only_row(table, metric="precision", k=k)["value"] == (N - 3) / N
    surprisal = only_row(table, metric="surprisal")
    assert surprisal["value"] == math.inf
    assert surprisal[["low", "high"]].isna().all()


def test_rows_of_a_method_are_shares_of_ranks_and_a_mean() -> None:
    surprisals = [0.1, 0.5, 1.5, 2.0, 0.25, 7.0, 4.0]
    judged = Judgement(torch.tensor([1, 2, 5, 6, 10, 11, VOCAB + 1]), torch.tensor(surprisals))
    data = activations(7)
    table = pd.DataFrame(prediction_rows("some study", data, "scheme", 2.5, judged))
    assert list(table.columns) == COLUMNS
    assert table["metric"].tolist() == ["precision"] * 3 + ["surprisal"]
    for k, hits in ((1, 1), (5, 3), (10, 5)):
        row = only_row(table, metric="precision", k=k)
        interval = stats.binomtest(hits, 7).proportion_ci(0.95, method="wilson")
        assert row[["value", "low", "high"]].tolist() == pytest.approx(
            [hits / 7, interval.low, interval.high]
        )
    row = only_row(table, metric="surprisal")
    assert row["value"] == pytest.approx(np.mean(surprisals))
    low, high = stats.t.interval(0.95, 6, loc=np.mean(surprisals), scale=stats.sem(surprisals))
    assert (row["low"], row["high"]) == pytest.approx((low, high))
    assert pd.isna(row["k"])
    named = {"experiment": "some study", "model": "small", "corpus": "words", "method": "scheme"}
    for column, value in {**named, "layer": 2.5, "target": L, "n": 7}.items():
        assert (table[column] == value).all()
    data.provenance = replace(data.provenance, data={})
    assert {line["corpus"] for line in prediction_rows("x", data, "scheme", 0, judged)} == {"unnamed"}


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
