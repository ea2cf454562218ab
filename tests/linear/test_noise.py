"""Fits that follow the noise of their samples are found by leaving samples out, and warned of once a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from identities import make_activations, make_identity
from torch import Tensor

import matlens
from matlens.linear import fitting
from matlens.linear.fitting import fit_samples, fit_stream
from matlens.linear.least_squares import LeastSquares, noise_of_fit
from matlens.linear.mapsets import MapSet
from matlens.models.identity import Provenance

D, D_OUT = 12, 4
Arrays = tuple[np.ndarray, np.ndarray]


def gaussian(n: int, *, tails: bool = False) -> Arrays:
    """Samples with noise in the targets; with tails, a tenth of them is thirty times longer than others."""
    generator = np.random.default_rng(n)
    x, y = generator.normal(size=(n, D)), generator.normal(size=(n, D_OUT))
    if tails:
        x[::10] *= 30
    return x, x @ np.ones((D, D_OUT)) / D + y


def tensors(arrays: Iterable[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


@pytest.mark.parametrize("rare", [False, True], ids=["", "rare"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("intercept", [False, True], ids=["", "intercept"])
def test_errors_on_others_are_those_of_fits_without_each_sample(
    intercept: bool, weighted: bool, rare: bool
) -> None:
    n = D + 4
    x, y = gaussian(n)
    if rare:  # a direction of one sample alone, and one of none
        x[:, 0], x[3, 0], x[:, 1] = 0, 2, 0
    weights = np.random.default_rng(1).uniform(0.5, 2, n) if weighted else np.ones(n)
    roots = np.sqrt(weights)[:, None]

    def errors(i: int, *, without: bool) -> np.ndarray:
        rows = np.delete(np.arange(n), i) if without else np.arange(n)
        of_rows, of_i = x[rows], x[i]
        targets, shift = y[rows], np.zeros(D_OUT)
        if intercept:
            center = np.average(of_rows, 0, weights[rows])
            shift = np.average(targets, 0, weights[rows])
            of_rows, of_i, targets = of_rows - center, of_i - center, targets - shift
        a = np.linalg.lstsq(of_rows * roots[rows], targets * roots[rows], rcond=1e-10)[0]
        return np.asarray(np.square(y[i] - of_i @ a - shift) * weights[i])

    spread = (weights[:, None] * np.square(y - np.average(y, 0, weights))).sum(0)
    expected, fitted = (
        1 - (sum(errors(i, without=without) for i in range(n)) / spread).mean() for without in (True, False)
    )
    x_, y_, weights_ = tensors((x, y, weights))
    moments = LeastSquares(D, D_OUT).update(x_, y_, weights=weights_)
    halves = [(x_[part], [y_[part]], weights_[part]) for part in (slice(7), slice(7, None))]
    (found,) = noise_of_fit(moments, halves, ["x -> y"], intercept=intercept)
    assert (found.n, found.width) == (n, D)
    assert (found.r2, found.r2_fitted) == pytest.approx((expected, fitted))


@pytest.mark.parametrize(
    ("n", "tails", "noisy"),
    [(D, False, True), (18, False, True), (26, False, False), (26, True, True), (1200, True, False)],
)
def test_fits_whose_error_is_mostly_noise_are_found_beyond_twice_the_width(
    n: int, tails: bool, noisy: bool
) -> None:
    x, y = gaussian(n, tails=tails)
    others, truth = gaussian(4001, tails=tails)
    a = np.linalg.lstsq(x, y, rcond=None)[0]
    # The noise of the targets has the variance 1: error above it comes from the fit.
    assert (np.square(others @ a - truth).mean() > 2) is np.bool_(noisy)
    x_, y_ = tensors((x, y))
    found = noise_of_fit(
        LeastSquares(D, D_OUT).update(x_, y_), [(x_, [y_], None)], ["x -> y"], intercept=False
    )
    assert bool(found) is noisy


def test_noise_of_late_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions of one sample each, as of rare tokens, that are not in the first chunk."""
    monkeypatch.setattr(fitting, "_CHUNK", 256)
    monkeypatch.setattr(fitting, "N_HELD_OUT", 64)
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(800, 40)
    x[:, :10] = torch.randn(800, 10, generator=generator)
    x[-30:, 10:] = 5 * torch.eye(30)
    y = x[:, :4] + 50 * (x[:, 10:].sum(1, keepdim=True) * torch.randn(800, 4, generator=generator))
    with pytest.warns(matlens.InputWarning):
        list(fit_samples({"h.0": x, "h.1": y}, [(0, 1)]))


def collected(n: int) -> Any:
    x, y = tensors(gaussian(n))
    vectors = {"h.0": x, "h.1": torch.cat([y, y, y], 1) + x, "h.2": torch.cat([y, y, y], 1)}
    return make_activations(vectors, Provenance(make_identity(n_layers=2)))


PAIRS = [("h.0", "h.1"), ("h.0", "h.2"), ("h.1", "h.2")]


def halves_of(samples: Any) -> list[dict[str, Tensor]]:
    middle = samples.n_rows // 2
    return [{site: of[part] for site, of in samples.items()} for part in (slice(middle), slice(middle, None))]


FITS: dict[str, Callable[..., Any]] = {
    "MapSet.fit": lambda samples, **how: MapSet.fit(samples, pairs=PAIRS, progress=False, **how),
    "samples": lambda samples, **how: list(fit_samples(samples, PAIRS, **how)),
    "stream": lambda samples, **how: list(fit_stream(halves_of(samples), PAIRS, **how)),
}


@pytest.mark.filterwarnings("error::matlens.InputWarning")
@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_every_fit_warns_once_where_samples_are_too_few(fit: Callable[..., Any]) -> None:
    for n in (D - 2, D + 4):
        with pytest.warns(matlens.InputWarning, match=rf"{n}.*ridge") as caught:
            fit(collected(n))
        assert len(caught) == 1
        assert caught[0].filename == __file__  # where the user's own code is
    fit(collected(6 * D))
    fit(collected(D - 2), ridge=1.0)
