"""The recovered fraction of the perplexity that the published method adds, and its interval."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from pruning import added_perplexity, recovered_estimate

from matlens import InputError
from matlens.ffn import TextLosses

LENGTH = 30


def losses(means: np.ndarray) -> TextLosses:
    return TextLosses(means * LENGTH, np.full(len(means), LENGTH))


def test_the_recovered_fraction():
    rows = [
        ("original", "", 0, 10.0), ("replaceme", "angle", 3, 30.0), ("refit", "greedy", 3, 20.0),
        ("out", "angle", 3, 50.0),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["method", "choice", "n_removed", "value"]).assign(
        corpus="a", metric="perplexity", blocks="", low=math.nan, high=math.nan
    )
    recovered = added_perplexity(table).set_index("method")
    assert recovered["recovered"].to_dict() == pytest.approx({"replaceme": 0, "refit": 0.5, "out": -1})
    assert recovered["low"].isna().all()
    limits = {"metric": "recovered", "value": 0.5, "low": 0.4, "high": 0.7}
    with_limits = pd.concat([table, table[table["method"] == "refit"].assign(**limits)])
    (refit,) = added_perplexity(with_limits).query("method == 'refit'").to_dict("records")
    assert (refit["recovered"], refit["low"], refit["high"]) == pytest.approx((0.5, 0.4, 0.7))
    with pytest.raises(InputError):
        added_perplexity(table[table["choice"] != "angle"])


def test_an_interval_is_that_of_resampled_windows():
    """All models have read the same windows, so what these differ in themselves does not widen it."""
    generator = np.random.default_rng(3)
    n = 14
    whole = generator.normal(4, 0.6, n)
    published = whole + generator.normal(0.4, 0.02, n)
    ours = whole + generator.normal(0.2, 0.03, n)
    estimate = recovered_estimate(losses(ours), losses(whole), losses(published))
    of_all = [math.exp(each.mean()) for each in (ours, whole, published)]
    assert estimate.value == pytest.approx(1 - (of_all[0] - of_all[1]) / (of_all[2] - of_all[1]))
    drawn = []
    for _ in range(4000):
        index = generator.integers(n, size=n)
        a, b, c = (math.exp(each[index].mean()) for each in (ours, whole, published))
        drawn.append(1 - (a - b) / (c - b))
    assert (estimate.low, estimate.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.01)
    assert estimate.high - estimate.low < 0.15
    assert estimate == recovered_estimate(losses(ours), losses(whole), losses(published))
