"""Quality of fit and of prediction, from tensors, with confidence intervals."""

from __future__ import annotations

from typing import NamedTuple, SupportsFloat

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens.errors import InputError, checked, warn
from matlens.numerics import in_float64

_HOPELESS = -1000.0  # an r2 that no reader can use
_STEADY = 0.1  # of the median standard deviation of a coordinate, below which one hardly varies


class Estimate(NamedTuple):
    """A mean over ``n`` examples and the interval that holds the true one with 95% confidence."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def without_interval(cls, value: SupportsFloat, n: int) -> Estimate:
        """A value that is not a mean over examples, such as r2, a quantile or a count."""
        return cls(float(value), float("nan"), float("nan"), n)


@checked
def r2(prediction: Float[Tensor, "n d"], truth: Float[Tensor, "n d"]) -> float:
    """Share of variance explained, averaged over dimensions (paper A, section 3.3).

    ``1 - SSE/SST`` of each coordinate against the mean of ``truth``, in float64, as scikit-learn's
    `r2_score` does by default: a coordinate that is constant counts 1 if it is met exactly, else 0.

    Warns with `InputWarning` if the score is below -1000 because of coordinates that hardly vary.
    """
    score, n_steady = r2_and_steady(prediction, truth)
    if n_steady:
        warn_of_steady("the truth", n_steady)
    return score


def warn_of_steady(of: str, n: int) -> None:
    """Warn if r2 is dominated by a few dimensions."""
    what = "1 coordinate that hardly varies" if n == 1 else f"{n:,} coordinates that hardly vary"
    warn(
        f"r2 is far below zero because of {what} in {of}, since it divides the error of each by its "
        "variance. Leave them out, or compare surprisal or KL."
    )


def r2_and_steady(prediction: Tensor, truth: Tensor) -> tuple[float, int]:
    """`r2`, and how many coordinates of small variance make it hopeless; 0 for any score that is not."""
    if prediction.shape != truth.shape or not truth.shape[1]:
        raise InputError(
            f"prediction and truth must have the same shape [n, d], d at least 1, got "
            f"{tuple(prediction.shape)} and {tuple(truth.shape)}."
        )
    if len(truth) < 2:
        raise InputError(f"r2 needs at least two examples, got {len(truth)}.")
    truth, prediction = in_float64(truth), in_float64(prediction)
    residual = (truth - prediction).square().sum(0)
    total = (truth - truth.mean(0)).square().sum(0)
    # The mean of equal values can be off by rounding, which is not variance.
    total = torch.where((truth == truth[0]).all(0), torch.zeros_like(total), total)
    score = 1 - residual / total
    score = torch.where(total == 0, torch.zeros_like(score), score)
    score = torch.where(residual == 0, torch.ones_like(score), score)
    steady = (score < _HOPELESS) & (total < (_STEADY**2) * total.median())
    hopeless = float(score.mean()) < _HOPELESS <= float(score[~steady].mean())
    return float(score.mean()), int(steady.sum()) if hopeless else 0


@checked
def rank(log_probs: Float[Tensor, "n d_vocab"], token: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The rank of the given token, 1 for the most probable; ties share the better rank."""
    _check_tokens(log_probs, token)
    if bool(log_probs.isnan().any()):  # nothing compares with NaN, so it would count as the best rank
        raise InputError("log_probs must be numbers, got NaN.")
    return 1 + (log_probs > log_probs.gather(1, token[:, None])).sum(1)


@checked
def surprisal(log_probs: Float[Tensor, "n d_vocab"], token: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """``-ln p(token)``, in nats: how unlikely the model finds the token (paper A, section 4)."""
    _check_tokens(log_probs, token)
    return -log_probs.gather(1, token[:, None])[:, 0]


@checked
def proportion(hits: Bool[Tensor, " ..."]) -> Estimate:
    """Share of true entries with its 95% Wilson interval, which never leaves ``[0, 1]``."""
    _check_some(hits)
    n, count = hits.numel(), int(hits.sum())
    from scipy import stats  # slow to import

    interval = stats.binomtest(count, n).proportion_ci(0.95, method="wilson")
    return Estimate(count / n, float(interval.low), float(interval.high), n)


@checked
def mean(values: Float[Tensor, " ..."]) -> Estimate:
    """Mean with its 95% interval by Student's t; no interval for an infinite mean."""
    _check_some(values)
    sample = values.cpu().double().numpy().reshape(-1)
    if np.isinf(sample).any():
        return Estimate.without_interval(np.mean(sample), len(sample))
    from scipy import stats

    center, error = float(np.mean(sample)), float(stats.sem(sample)) if len(sample) > 1 else float("nan")
    half = error * float(stats.t.ppf(0.975, max(len(sample) - 1, 1)))
    return Estimate(center, center - half, center + half, len(sample))


def _check_tokens(log_probs: Tensor, token: Tensor) -> None:
    rows, d_vocab = log_probs.shape
    if len(token) != rows:
        raise InputError(f"token must be one for each of {rows} distributions, got {len(token)}.")
    if rows and not 0 <= int(token.min()) <= int(token.max()) < d_vocab:
        raise InputError(
            f"token must be between 0 and {d_vocab - 1}, got {int(token.min())} to {int(token.max())}."
        )


def _check_some(values: Tensor) -> None:
    if not values.numel():
        raise InputError("A mean must have at least one example, got none.")
