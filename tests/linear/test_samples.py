"""Chosen and weighted samples: scikit-learn's answer, the same however the samples come by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from identities import make_activations, make_identity
from sklearn.linear_model import LinearRegression, Ridge
from torch import Tensor

from matlens.activations import Rows
from matlens.errors import InputError
from matlens.linear.fitting import fit_samples, fit_stream
from matlens.linear.least_squares import LeastSquares
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.models.identity import Provenance

N, D_IN, D_OUT = 60, 6, 4
PAIR = [("h.0", "h.1")]
GENERATOR = np.random.default_rng(0)
X = torch.from_numpy(GENERATOR.normal(size=(N, D_IN)))
Y = torch.from_numpy(GENERATOR.normal(size=(N, D_OUT)))
WEIGHTS = torch.from_numpy(GENERATOR.exponential(size=N))
WEIGHTS[::7] = 0
ROWS = torch.from_numpy(GENERATOR.random(N) < 0.7)
SAMPLES = {"h.0": X, "h.1": Y}


def sklearn(rows: Tensor | None, weights: Tensor | None, intercept: bool, ridge: float) -> Any:
    model = Ridge(ridge, fit_intercept=intercept) if ridge else LinearRegression(fit_intercept=intercept)
    keep = np.ones(N, dtype=bool) if rows is None else rows.numpy()
    return model.fit(X[keep], Y[keep], sample_weight=None if weights is None else weights[keep])


COLLECTED = make_activations(SAMPLES, Provenance(make_identity(n_layers=1)))


def shuffled() -> Iterator[Rows]:
    """Batches that know which samples they are, in another order than the collection's."""
    for part in np.split(np.random.default_rng(1).permutation(N), [11, 12, 40]):
        yield Rows(part, part, {site: vectors[part] for site, vectors in SAMPLES.items()})


def in_order() -> Iterator[dict[str, Tensor]]:
    for start in range(0, N, 17):
        yield {site: vectors[start : start + 17] for site, vectors in SAMPLES.items()}


WAYS: dict[str, Callable[..., Any]] = {
    "samples": lambda **options: list(fit_samples(SAMPLES, PAIR, **options)),
    "rows": lambda **options: list(fit_samples(COLLECTED, PAIR, **options)),
    "set": lambda **options: list(MapSet.fit(COLLECTED, pairs=PAIR, progress=False, **options).values()),
    "stream": lambda **options: list(fit_stream(shuffled(), PAIR, **options)),
    "stream in order": lambda **options: list(fit_stream(in_order(), PAIR, **options)),
}


@pytest.mark.parametrize("ridge", [0.0, 0.8])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("rows", [None, ROWS], ids=["all", "chosen"])
@pytest.mark.parametrize("way", WAYS)
def test_every_fit_is_sklearns_on_the_chosen_and_weighted_samples(
    way: str, rows: Tensor | None, weights: Tensor | None, intercept: bool, ridge: float
) -> None:
    (linear,) = WAYS[way](rows=rows, weights=weights, intercept=intercept, ridge=ridge)
    expected = sklearn(rows, weights, intercept, ridge)
    np.testing.assert_allclose(linear.weight, expected.coef_, rtol=0, atol=1e-6)
    if intercept:
        np.testing.assert_allclose(linear.bias, expected.intercept_, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ridge", [0.0, 0.8])
@pytest.mark.parametrize("intercept", [False, True])
def test_weighted_moments_are_sklearns_in_float64_and_merge_into_the_whole(
    intercept: bool, ridge: float
) -> None:
    whole = LeastSquares(D_IN, D_OUT).update(X, Y, weights=WEIGHTS)
    merged = LeastSquares(D_IN, D_OUT)
    for part in (slice(0, 7), slice(7, 8), slice(8, N)):
        merged.merge(LeastSquares(D_IN, D_OUT).update(X[part], Y[part], weights=WEIGHTS[part]))
    expected = sklearn(None, WEIGHTS, intercept, ridge)
    for moments in (whole, merged):
        weight, bias = moments.solution(intercept=intercept, ridge=ridge)
        np.testing.assert_allclose(weight, expected.coef_, rtol=0, atol=1e-12)
        if intercept:
            np.testing.assert_allclose(bias, expected.intercept_, rtol=0, atol=1e-12)
        assert moments.n == int((WEIGHTS > 0).sum())


def test_whole_weights_are_repeated_samples() -> None:
    counts = torch.arange(N) % 3
    weighted = (
        LeastSquares(D_IN, D_OUT).update(X, Y, weights=counts.double()).solution(intercept=True, ridge=0.5)
    )
    repeated = LeastSquares(D_IN, D_OUT).update(
        X.repeat_interleave(counts, 0), Y.repeat_interleave(counts, 0)
    )
    for ours, theirs in zip(weighted, repeated.solution(intercept=True, ridge=0.5), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_samples_of_weight_zero_are_left_out_however_bad_they_are() -> None:
    """Those that are left out may be anything: an attention sink, or what is not finite."""
    weights, bad = torch.ones(N), X.clone()
    weights[3], bad[3] = 0, torch.inf
    (linear,) = fit_samples({"h.0": bad, "h.1": Y}, PAIR, weights=weights)
    (without,) = fit_samples(SAMPLES, PAIR, rows=weights > 0)
    torch.testing.assert_close(linear.weight, without.weight)


@pytest.mark.refused
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": torch.full((N,), -1.0)}, r"^weights must be finite"),
        ({"weights": torch.full((N,), torch.nan)}, r"^weights must be finite"),
        ({"weights": torch.full((N,), torch.inf)}, r"^weights must be finite"),
        ({"weights": torch.zeros(N)}, "select at least one sample"),
        ({"weights": torch.ones(N, 1)}, r"weights.*(60, 1)|\[60, 1\]"),
        ({"weights": [1.0] * N}, r"^weights must be"),
        ({"weights": ROWS.float(), "rows": ROWS.logical_not()}, "select at least one sample"),
        ({"rows": ~torch.ones(N, dtype=torch.bool)}, "select at least one sample"),
        ({"rows": torch.ones(N)}, r"rows.*[Tt]ensor"),
        ({"ridge": -1.0}, "ridge"),
        ({"ridge": float("nan")}, "ridge"),
        ({"ridge": float("inf")}, "ridge"),
        ({"ridge": "1"}, "ridge"),
    ],
)
def test_what_cannot_be_used_is_refused_by_every_fit(way: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        WAYS[way](**options)


@pytest.mark.refused
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [N - 1, N + 1, 1])
def test_values_for_another_number_of_samples_are_refused(way: str, n: int) -> None:
    for options in ({"rows": torch.ones(n, dtype=torch.bool)}, {"weights": torch.ones(n)}):
        with pytest.raises(InputError, match=rf"{n}\b"):
            WAYS[way](**options)


@pytest.mark.refused
def test_what_is_no_collection_is_refused_with_the_way() -> None:
    for samples in (SAMPLES, [X, Y], None, X):
        with pytest.raises(InputError, match=r"matlens\.collect"):
            MapSet.fit(samples, progress=False)  # type: ignore[arg-type]
    for samples in ([X, Y], None, X):
        with pytest.raises(InputError, match=r"^samples must be"):
            list(fit_samples(samples, PAIR))  # type: ignore[arg-type]


@pytest.mark.refused
@pytest.mark.parametrize("fit", [fit_samples, lambda samples, pairs: fit_stream([samples], pairs)])
@pytest.mark.parametrize(
    ("samples", "pairs", "message"),
    [
        ({}, PAIR, r"no vectors of h\.0|at least one sample"),
        (SAMPLES, [("h.0", "h.7")], r"no vectors of h\.7"),
        (SAMPLES, [("h.0",)], r"pair"),
        (SAMPLES, [(0, 1, 2)], r"pair"),
        (SAMPLES, [], r"pairs must"),
        (SAMPLES, "last", r"^pairs must be"),
        (SAMPLES, None, r"^pairs must be"),
    ],
)
def test_pairs_that_are_not_there_are_refused(fit: Any, samples: Any, pairs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(fit(samples, pairs))


@pytest.mark.refused
def test_sites_with_other_numbers_of_samples_are_refused() -> None:
    with pytest.raises(InputError, match=r"60 of h\.0, 59 of h\.1.*as many samples of every site"):
        list(fit_samples({"h.0": X, "h.1": Y[1:]}, PAIR))
    with pytest.raises(InputError, match=r"^samples of h\.0 must be"):
        list(fit_samples({"h.0": X[:, 0], "h.1": Y}, PAIR))


def test_weights_are_told_apart_in_the_record() -> None:
    weights = [WEIGHTS, WEIGHTS + 1]
    details = [WAYS["rows"](weights=w)[0].provenance.details for w in weights]
    assert details[0]["weights"] != details[1]["weights"]
    assert details[0]["n_fitted"] == int((WEIGHTS > 0).sum())
    assert "weights" not in WAYS["rows"]()[0].provenance.details


def test_a_stream_of_a_changed_model_does_not_take_the_plain_models_provenance() -> None:
    plain = Provenance(make_identity(n_layers=1))
    changed = Provenance(replace(make_identity(n_layers=1), changes=("something was replaced",)))
    batches = [Rows(np.arange(N), np.arange(N), SAMPLES, changed)]
    with pytest.raises(InputError, match=r"nothing replaced or hooked.*something was replaced"):
        list(fit_stream(batches, PAIR, provenance=plain))


def test_maps_know_how_many_samples_they_were_fitted_on() -> None:
    maps = MapSet.fit(COLLECTED, pairs=PAIR, rows=ROWS, progress=False)
    assert maps.n_samples == maps["h.0", "h.1"].n_samples == int(ROWS.sum())
    assert LinearMap(torch.eye(2), None, "h.0", "h.1").n_samples is None


@pytest.mark.refused
def test_vectors_of_another_width_are_not_mapped() -> None:
    linear = LinearMap(torch.eye(3), None, "h.0", "h.1")
    for h in (torch.ones(2, 4), torch.ones(4), torch.ones(2, 0)):
        with pytest.raises(InputError, match="takes vectors of 3 coordinates"):
            linear(h)
    with pytest.raises(InputError, match=r"Expected cpu, cuda or mps"):
        linear.to("bogus")


@pytest.mark.refused
@pytest.mark.parametrize("d", [0, -1, 10**40, 2.0])
def test_moments_of_no_width_are_refused(d: Any) -> None:
    with pytest.raises(InputError, match="d_in"):
        LeastSquares(d, 3)
    with pytest.raises(InputError, match=r"^y must be"):
        LeastSquares(D_IN, 1).update(X, Y[:, 0])
