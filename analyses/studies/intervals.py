"""Confidence intervals of statistics that are not means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from matlens.metrics import Estimate


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
