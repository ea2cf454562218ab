"""Which score predicts the damage, and which parts go first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from linearity import atlas_summary
from scipy import stats

from matlens import linearity
from matlens.linearity.ranking import first_parts, spearman


def atlas_table(n_layers: int = 8) -> pd.DataFrame:
    """A table in which NBL's bound tells the rise of a map exactly, and r2 in part."""
    generator, rows = np.random.default_rng(3), list[dict[str, Any]]()
    for kind in ("attn", "ffn", "block"):
        for layer in range(n_layers):
            rise = float(generator.exponential())
            numbers = {
                ("map", "loss increase"): rise, ("removed", "loss increase"): rise + generator.exponential(),
                ("map", "nbl bound"): 10 * rise, ("map", "r2"): -rise + generator.normal(),
            }  # fmt: skip
            rows += [
                {
                    "model": "m", "corpus": "c", "method": method, "metric": metric, "kind": kind,
                    "layer": layer, "target": layer + 1, "value": value, "tokens": "all", "parts": "",
                }
                for (method, metric), value in numbers.items()
            ]  # fmt: skip
    return pd.DataFrame(rows)


def of_both_kinds_of_tokens() -> pd.DataFrame:
    """Maps of all tokens and of those that are no sinks, each with numbers of its own."""
    table = atlas_table()
    table = table[(table["method"] == "map") | (table["metric"] == "loss increase")]
    others = table[table["method"] == "map"].assign(tokens="no sinks")
    shuffled = others["value"].sample(frac=1, random_state=1).to_numpy()
    return pd.concat([table, others.assign(value=shuffled)], ignore_index=True)


def test_scores_of_some_tokens_are_held_against_rises_of_maps_at_these_and_of_leaving_out_at_all():
    table = of_both_kinds_of_tokens()
    ours = linearity.rank_correlations(table, resamples=99).set_index(["tokens", "kind", "method", "metric"])
    wide = table.pivot(index=["kind", "layer"], columns=["tokens", "method", "metric"], values="value")
    seen = set[float]()
    for tokens in ("all", "no sinks"):
        for method, of_rise in (("map", tokens), ("removed", "all")):
            rises = wide[of_rise, method, "loss increase"]
            for score, sign in (("r2", -1), ("nbl bound", 1)):
                expected = sign * stats.spearmanr(wide[tokens, "map", score], rises).statistic
                assert ours.loc[(tokens, "all kinds", method, score), "value"] == pytest.approx(expected)
                seen.add(round(float(expected), 9))
        row = ours.loc[(tokens, "ffn", "map", "r2")]
        assert row["low"] < row["value"] < row["high"]
        assert row["n"] == 8
    assert len(seen) >= 7, "the two kinds of tokens tell nothing apart"
    assert (tokens, "ffn", "map", "procrustes") not in ours.index
    sums = atlas_summary(table).set_index(["tokens", "kind", "method", "metric"])["value"]
    for tokens in ("all", "no sinks"):
        part = table[(table["tokens"] == tokens) & (table["kind"] == "attn") & (table["method"] == "map")]
        rises = part[part["metric"] == "loss increase"].set_index("layer")["value"]
        assert sums[tokens, "attn", "map", "loss increase"] == pytest.approx(rises.mean())
        assert sums[tokens, "attn", "map", "median loss increase"] == pytest.approx(rises.median())


def test_what_is_not_finite_counts_as_the_worst():
    table = atlas_table()
    worst = (table["kind"] == "ffn") & (table["layer"] == 2) & (table["method"] == "map")
    table.loc[worst & table["metric"].isin(["loss increase"]), "value"] = np.inf
    table.loc[worst & table["metric"].isin(["r2"]), "value"] = -np.inf
    finite = table.copy()
    finite.loc[worst & table["metric"].isin(["loss increase"]), "value"] = 1e6
    finite.loc[worst & table["metric"].isin(["r2"]), "value"] = -1e6
    ours, expected = (linearity.rank_correlations(each, resamples=9) for each in (table, finite))
    pd.testing.assert_frame_equal(ours, expected)


def test_an_interval_is_of_resampled_pairs():
    generator = np.random.default_rng(0)
    x = generator.normal(size=60)
    y = x + generator.normal(size=60)
    _, low, high = spearman(x, y, seed=1, resamples=999)
    drawn = generator.integers(60, size=(999, 60))
    expected = np.quantile([stats.spearmanr(x[i], y[i]).statistic for i in drawn], [0.025, 0.975])
    assert (low, high) == pytest.approx(expected, abs=0.03)


def test_the_first_parts_do_not_touch():
    rows = [("ffn", 1, 0.1), ("block", 1, 0.2), ("attn", 1, 0.3), ("block", 2, 0.4), ("attn", 2, 0.5)]
    table = pd.DataFrame(rows, columns=["kind", "layer", "value"]).assign(
        method="map", metric="loss increase", tokens="all", target=3
    )
    assert first_parts(table, group="any") == [("ffn", 1), ("attn", 1), ("block", 2)]
    assert first_parts(table, group="block") == [("block", 1), ("block", 2)]
    assert first_parts(table, group="attn") == [("attn", 1), ("attn", 2)]
    assert first_parts(table, group="ffn") == [("ffn", 1)]
    assert first_parts(table, group="norms") == []
