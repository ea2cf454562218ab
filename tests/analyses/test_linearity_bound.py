"""NBL's bound in three definitions, by hand; and rank correlations within kinds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from analysing import run, sizes
from linearity_bound import COSTS, NAME, within_kinds
from scipy import stats

import matlens
from matlens.activations import find_sinks
from matlens.data import make_windows
from matlens.io import write_results

MODEL = "llama-sinks"
SITES = {  # input and output of a layer's parts
    "attn": {
        "nbl bound": ("attn_in.{0}", "attn_in.{0} attn_out.{0}"),
        "nbl bound, output": ("attn_in.{0}", "attn_out.{0}"),
        "nbl bound, stream": ("h.{0}", "mid.{0}"),
    },
    "ffn": {
        "nbl bound": ("ffn_in.{0}", "ffn_in.{0} ffn_out.{0}"),
        "nbl bound, output": ("ffn_in.{0}", "ffn_out.{0}"),
        "nbl bound, stream": ("mid.{0}", "h.{1}"),
    },
    "block": dict.fromkeys(("nbl bound", "nbl bound, output", "nbl bound, stream"), ("h.{0}", "h.{1}")),
}


def canonical_bound(x: np.ndarray, y: np.ndarray) -> float:
    """``sum (1 - rho^2)`` from orthonormal bases of centered vectors."""
    bases = [np.linalg.svd(each - each.mean(0), full_matrices=False)[0] for each in (x, y)]
    rho = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False)
    return float((1 - rho**2).sum())


@pytest.fixture(scope="module")
def out(corpora, model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("bound")
    costs = [
        (kind, layer, tokens, (layer + 1) * (1 + len(kind)) / 10)
        for kind in SITES for layer in range(3) for tokens in ("all", "no sinks")
    ]  # fmt: skip
    table = pd.DataFrame(costs, columns=["kind", "layer", "tokens", "value"])
    table = table.assign(method="map", metric="loss increase", low=0.0, high=1.0, n=8)
    removed = table.assign(method="removed", value=-1.0)
    write_results(out, COSTS, pd.concat([removed, table]), {"command": "linearity.py"})
    options = ["--corpus", corpora / "words.txt", *sizes(), "--window", 16, "--windows", 40, "--out", out]
    run(NAME, "--model", model_folder(MODEL), *options)
    return out


def test_bounds_are_sums_over_canonical_correlations(out, small_model, corpora):
    train, _ = matlens.load_corpus(str(corpora / "words.txt")).split(n_train=90, n_validation=30)
    model = small_model(MODEL)
    windows = make_windows(model, train, size=16, max_windows=40, targets=True)
    names = {name.format(i, i + 1) for of_kind in SITES.values() for ends in of_kind.values()
             for name in " ".join(ends).split() for i in range(3)}  # fmt: skip
    vectors = matlens.collect(model, windows, sorted(names), positions="all", progress=False)
    every = windows.at_positions("all")
    sinks = find_sinks(model, windows, progress=False)[every.sentences, every.positions].numpy()
    assert 0 < sinks.sum() < len(sinks)
    found = pd.read_csv(out / f"{NAME}_parts.csv").set_index(["kind", "layer", "tokens", "metric"])["value"]
    for tokens, used in (("all", sinks | True), ("no sinks", ~sinks)):
        for kind, of_kind in SITES.items():
            for metric, ends in of_kind.items():
                for layer in range(3):
                    x, y = (
                        sum(
                            vectors[name].double().numpy()[used]
                            for name in each.format(layer, layer + 1).split()
                        )
                        for each in ends
                    )
                    expected = canonical_bound(x, y)
                    assert found[kind, layer, tokens, metric] == pytest.approx(expected, abs=1e-3)
    assert found["attn", 1, "all", "nbl bound"] != pytest.approx(found["attn", 1, "all", "nbl bound, output"])


def test_bounds_are_correlated_with_loss_increases(out):
    parts = pd.read_csv(out / f"{NAME}_parts.csv")
    found = pd.read_csv(out / f"{NAME}.csv").set_index(["tokens", "kind", "metric"])
    for tokens, rows in parts.groupby("tokens"):
        wide = rows.pivot(index=["kind", "layer"], columns="metric", values="value")
        assert wide.loc[("ffn", 1), "loss increase"] == 0.8
        for metric in ("nbl bound", "nbl bound, output", "nbl bound, stream"):
            expected = stats.spearmanr(wide[metric], wide["loss increase"]).statistic
            assert found.loc[(tokens, "all kinds", metric), "value"] == pytest.approx(expected)


def test_correlations_within_kinds_are_a_weighted_mean():
    table = pd.DataFrame(
        [("all kinds", 0.9, 20), ("attn", 0.5, 11), ("ffn", -0.1, 9)], columns=["kind", "value", "n"]
    )
    value, low, high, n = within_kinds(table)
    assert value == pytest.approx((10 * 0.5 - 8 * 0.1) / 18)
    assert n == 20
    half = 1.959964 * np.sqrt(1.06 / (8 + 6))
    assert np.arctanh([low, high]) == pytest.approx(np.arctanh(value) + np.array([-half, half]))


def test_kinds_that_differ_do_not_correlate_within_kinds():
    generator, n, draws = np.random.default_rng(0), 10, []
    for _ in range(300):
        kinds = [
            (kind, *(shift + generator.normal(size=(2, n))))
            for kind, shift in zip("abc", (0, 5, 10), strict=True)
        ]
        pooled = stats.spearmanr(*np.concatenate([[x, y] for _, x, y in kinds], axis=1)).statistic
        rows = [(kind, stats.spearmanr(x, y).statistic, n) for kind, x, y in kinds]
        estimate = within_kinds(pd.DataFrame(rows, columns=["kind", "value", "n"]))
        assert pooled > 0.6
        draws.append(estimate)
    assert np.mean([each.value for each in draws]) == pytest.approx(0, abs=0.05)
    assert np.mean([each.low <= 0 <= each.high for each in draws]) == pytest.approx(0.95, abs=0.04)
