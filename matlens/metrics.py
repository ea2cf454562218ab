"""Quality of fit and of prediction, from tensors, with confidence intervals."""

from __future__ import annotations

import math
from typing import NamedTuple, SupportsFloat

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens.errors import InputError, PositiveInt, checked, warn
from matlens.numerics import in_float64

_HOPELESS = -1000.0  # an r2 that no reader can use
_Z = 1.959963984540054  # the 97.5% quantile of the standard normal distribution
_ROUNDING = 1e-5  # of a share in float32
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
    return share(hits.flatten().double())


@checked
def share(shares: Float[Tensor, " n"], *, n_entries: PositiveInt | None = None) -> Estimate:
    """Mean of the shares of several items with its 95% Wilson interval, which never leaves ``[0, 1]``.

    Entries of an item are correlated, so the sample size of the interval is that of independent entries whose
    share has the variance of this mean, and at most ``n_entries``, the entries of all items together; by
    default one per item. If all entries are alike, each item counts once.
    """
    sample = _bounded(shares)
    n, p, between = len(sample), float(sample.mean()), float(sample.var())
    size = float(n_entries or n)
    if p in (0, 1):
        size = n
    elif between > 0:
        size = min(p * (1 - p) * n / between, size)
    z2 = _Z**2 / size
    middle, half = p + z2 / 2, math.sqrt(z2 * p * (1 - p) + z2 * z2 / 4)
    low, high = (middle - half) / (1 + z2), (middle + half) / (1 + z2)
    # At 0 and 1 a bound equals the share, except for rounding.
    return Estimate(p, min(max(low, 0.0), p), max(min(high, 1.0), p), n)


@checked
def difference(ours: Float[Tensor, " n"], theirs: Float[Tensor, " n"]) -> Estimate:
    """Mean difference of paired shares with its 95% Agresti-Min interval, which never leaves ``[-1, 1]``.

    The interval is Wald's after half a pair is added to each of the four outcomes of a pair, so it has a
    width where all pairs agree.
    """
    if len(ours) != len(theirs):
        raise InputError(f"ours and theirs must be pairs, got {len(ours)} and {len(theirs)} values.")
    apart = _bounded(ours) - _bounded(theirs)
    n, value = len(apart), float(apart.mean())
    middle = float(apart.sum()) / (n + 2)
    half = _Z * math.sqrt(((float(np.square(apart).sum()) + 1) / (n + 2) - middle**2) / (n + 2))
    return Estimate(value, max(middle - half, -1.0), min(middle + half, 1.0), n)


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


def _bounded(shares: Tensor) -> np.ndarray:
    """Shares in float64 on the CPU, within 0 and 1 but for rounding."""
    _check_some(shares)
    sample = shares.detach().cpu().double().numpy()
    if not ((sample >= -_ROUNDING) & (sample <= 1 + _ROUNDING)).all():
        raise InputError(f"Shares must be between 0 and 1, got {sample.min():g} to {sample.max():g}.")
    return sample.clip(0, 1)


def _check_some(values: Tensor) -> None:
    if not values.numel():
        raise InputError("A mean must have at least one example, got none.")
