"""Rows about layers, and confidence intervals of statistics that are not means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd

from matlens.io import result_row, result_table
from matlens.metrics import Estimate

LayerRow = tuple[str, float | None, str, int | None, Estimate]


def layer_table(experiment: str, model: str, corpus: str, rows: Iterable[LayerRow]) -> pd.DataFrame:
    """A table of rows ``(method, layer, metric, k, estimate)``; ``target`` is the layer, too."""
    return result_table(
        result_row(
            experiment, model=model, corpus=corpus, method=method, layer=layer, target=layer, metric=metric,
            k=k, estimate=estimate,
        )
        for method, layer, metric, k, estimate in rows
    )  # fmt: skip


def bootstrap(
    statistic: Callable[[np.ndarray], float],
    samples: np.ndarray,
    generator: np.random.Generator,
    *,
    resamples: int,
    method: Any = "linear",
) -> Estimate:
    """A statistic of samples with the 95% interval of a percentile bootstrap.

    ``method`` is that of `numpy.quantile`. There is no interval if the statistic is NaN in some resamples.
    """
    n = len(samples)
    resampled = [statistic(samples[generator.integers(n, size=n)]) for _ in range(resamples)]
    low, high = np.quantile(resampled, (0.025, 0.975), method=method)
    return Estimate(float(statistic(samples)), float(low), float(high), n)
