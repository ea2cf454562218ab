"""Least squares: every way of giving the samples solves the same problem, the one that gelsd solves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from identities import make_activations, make_identity
from sklearn.linear_model import LinearRegression, Ridge
from torch import Tensor

from matlens.activations.activations import Activations, Rows
from matlens.errors import InputError, InputWarning
from matlens.linear import fitting
from matlens.linear.fitting import fit_samples, fit_stream
from matlens.linear.least_squares import LeastSquares
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.models.identity import Provenance
from matlens.numerics import split_product

EPS = torch.finfo(torch.float64).eps
N, D_IN, D_OUT = 40, 7, 3
Solution = tuple[Tensor, Tensor | None]
Way = Callable[[Tensor, Tensor, bool, float], Solution]


def random(n: int, d: int, seed: int = 0) -> Tensor:
    """Normal values on a grid of 1/256, so that sums and differences of columns are exact."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, d, generator=generator, dtype=torch.float64) * 256).round() / 256


# The inputs. Each makes any number of samples, so that new points come from where the training points did.


def plain(n: int, seed: int) -> Tensor:
    return random(n, D_IN, seed)


def wide(n: int, seed: int) -> Tensor:
    return random(n, 2 * N, seed)


def collinear(n: int, seed: int) -> Tensor:
    x = random(n, D_IN, seed)
    x[:, 2], x[:, 4] = x[:, 0] - x[:, 1], x[:, 3]
    return x


def nearly_collinear(n: int, seed: int) -> Tensor:
    x = random(n, D_IN, seed).float()
    x[:, 2] = 0.3 * x[:, 0] - 0.7 * x[:, 1]
    return x.double()


def everything(n: int, seed: int) -> Tensor:
    """Columns that are constant, zero, multiples of others, and ten thousand times larger or smaller."""
    x = random(n, D_IN, seed)
    x[:, 1], x[:, 2] = 1.0, 0.0
    x[:, 3], x[:, 4], x[:, 5] = x[:, 0] * 2, x[:, 4] * 1e4, x[:, 5] * 1e-4
    return x


def everything_wide(n: int, seed: int) -> Tensor:
    return torch.cat([everything(n, seed), wide(n, seed + 50)], 1)


def offset_constant(n: int, seed: int) -> Tensor:
    x = random(n, D_IN, seed)
    x[:, 2] = 1000.0
    return x


def offset_collinear(n: int, seed: int) -> Tensor:
    return collinear(n, seed) + 4096


INPUTS = (plain, wide, collinear, nearly_collinear, everything, everything_wide)


def targets(x: Tensor, seed: int = 1) -> Tensor:
    """A function of the input that no linear map meets exactly, of dimensions of different size."""
    y = (x / (1 + x.abs().amax(0))) @ random(x.shape[1], D_OUT, seed) + random(len(x), D_OUT, seed + 1)
    return y * torch.tensor([1.0, 30.0, 0.1], dtype=torch.float64) + 0.5


# The ways in which samples can be given. All solve in float64.


def moments(x: Tensor, y: Tensor) -> LeastSquares:
    return LeastSquares(x.shape[1], y.shape[1])


def parts(x: Tensor, y: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(sizes), y.split(sizes), strict=True)


def one_update(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    return moments(x, y).update(x, y).solution(intercept=intercept, ridge=ridge)


def uneven_updates(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    state = moments(x, y)
    for a, b in parts(x, y, [0, *[1] * 9, 0, 20, 3, 0, len(x) - 32]):
        state.update(a, b)
    return state.solution(intercept=intercept, ridge=ridge)


def merged(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    states = [moments(x, y).update(a, b) for a, b in parts(x, y, [9, 0, 2, 1, len(x) - 12])]
    left, right = states[3].merge(states[0]), states[1].merge(states[2])
    whole = moments(x, y).merge(right.merge(left)).merge(states[4])
    return whole.solution(intercept=intercept, ridge=ridge)


def as_collected(samples: Mapping[str, Tensor]) -> Activations:
    return make_activations(samples, SEED)


def batch(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    (fitted,) = fit_samples(
        as_collected({"h.0": x, "h.1": y}), [("h.0", "h.1")], intercept=intercept, ridge=ridge
    )
    return fitted.weight, fitted.bias


def streamed(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    batches = ({"h.0": a, "h.1": b} for a, b in parts(x, y, [3, 0, 1] + [12] * 3 + [len(x) - 40]))
    (fitted,) = fit_stream(batches, [("h.0", "h.1")], intercept=intercept, ridge=ridge)
    return fitted.weight, fitted.bias


def in_chunks(way: Way) -> Way:
    def chunked(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fitting, "chunk_size", lambda width: 1)
            return way(x, y, intercept, ridge)

    return chunked


WAYS = {
    "one update": one_update, "uneven updates": uneven_updates, "merged": merged, "batch": batch,
    "batch in chunks": in_chunks(batch), "stream": streamed, "stream in chunks": in_chunks(streamed),
}  # fmt: skip
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture
def in_float64(monkeypatch):
    """Keep maps in the float64 that they are solved in, to compare more digits than a float32 has."""

    def of(w: Tensor, b: Tensor | None, source: str, target: str, provenance: Any = None) -> LinearMap:
        return LinearMap(w, b, source, target, provenance or Provenance())

    monkeypatch.setattr(LinearMap, "from_solution", of)


def gelsd(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.lstsq(x.double(), y.double(), driver="gelsd").solution


def slack(x: Tensor) -> float:
    """What two backward stable solvers may differ by: rounding times the condition of what counts."""
    s = torch.linalg.svdvals(x.double())
    counted = s[s > EPS * max(x.shape) * s[0]]
    return float(100 * EPS * counted[0] / counted[-1])


def predict(solution: Solution, x: Tensor) -> Tensor:
    weight, bias = solution
    return x.double() @ weight.T + (0 if bias is None else bias)


def close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """To a share of each target's largest value: a dimension may be a thousand times another."""
    error = (actual - expected).abs().amax(0) / expected.abs().amax(0)
    assert actual.shape == expected.shape
    assert error.max() < relative, f"{error.max():.2e} is not below {relative:.2e}"


@pytest.mark.usefixtures("in_float64")
@each_way
@pytest.mark.parametrize("make", INPUTS)
def test_the_map_is_gelsds_on_old_and_new_points_and_of_least_norm(make, way):
    x, new = make(N, 0), make(25, 7)
    y = targets(x)
    reference, found = gelsd(x, y), way(x, y, False, 0.0)
    assert found[1] is None
    assert found[0].dtype == torch.float64
    assert slack(x) < 1e-4, "the reference itself is not determined"
    close(predict(found, x), x @ reference, slack(x))
    close(predict(found, new), new @ reference, slack(x))
    close(found[0].T, torch.linalg.pinv(x, rtol=EPS * max(x.shape)) @ y, slack(x))
    # No part of the weight lies where the inputs have nothing.
    _, s, vh = torch.linalg.svd(x)
    nothing = vh[int((s > EPS * max(x.shape) * s[0]).sum()) :]
    assert make not in (wide, collinear, everything, everything_wide) or len(nothing)
    assert not len(nothing) or (found[0] @ nothing.T).abs().max() <= slack(x) * found[0].abs().max()


@pytest.mark.usefixtures("in_float64")
@each_way
@pytest.mark.parametrize(("factor", "counts"), [(0.5, False), (2.0, True)])
def test_a_direction_counts_from_the_singular_value_from_which_gelsd_counts_it(way, factor, counts):
    x = torch.zeros(400, 2, dtype=torch.float64)
    x[0, 0], x[1, 1] = 1.0, factor * 400 * EPS
    y = torch.ones(400, 1, dtype=torch.float64)
    weight, _ = way(x, y, False, 0.0)
    assert bool(gelsd(x, y)[1] != 0) == counts
    torch.testing.assert_close(weight.T, gelsd(x, y))


@pytest.mark.usefixtures("in_float64")
@each_way
def test_the_solution_is_in_float64_whatever_the_samples_are(way):
    x = (random(N, D_IN) * 300).to(torch.bfloat16)
    y = targets(x.double()).to(torch.float16)
    close(predict(way(x, y, False, 0.0), x), x.double() @ gelsd(x, y), 1e-12)


@pytest.mark.parametrize("way", [batch, streamed])
def test_a_map_is_the_float64_solution_rounded_once(way):
    x = everything(N, 0)
    y = targets(x)
    for intercept in (False, True):
        for rounded, exact in zip(way(x, y, intercept, 0.0), one_update(x, y, intercept, 0.0), strict=True):
            if rounded is not None and exact is not None:
                assert rounded.dtype == torch.float32
                torch.testing.assert_close(rounded, exact.float(), rtol=1.5 * 2**-23, atol=0)


# Intercept and ridge


@pytest.mark.usefixtures("in_float64")
@each_way
@pytest.mark.parametrize(
    "make",
    [plain, wide, collinear, everything, offset_constant, offset_collinear, lambda n, s: plain(n, s) + 300],
)
def test_intercept_is_least_squares_on_centred_samples(make, way):
    x, new = make(N, 0), make(25, 7)
    y = targets(x)
    centred = x - x.mean(0)
    reference = torch.linalg.pinv(centred, rtol=1e-11) @ (y - y.mean(0))
    found = way(x, y, True, 0.0)
    for points in (x, new):
        close(predict(found, points), y.mean(0) + (points - x.mean(0)) @ reference, 1e-8)
    close(found[0].T, reference, 1e-7)


@pytest.mark.usefixtures("in_float64")
@each_way
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("make", [wide, everything])
def test_ridge_is_sklearns(make, intercept, way):
    ridge = 0.5
    x, new = make(N, 0), make(25, 7)
    y = targets(x)
    weight, bias = way(x, y, intercept, ridge)
    model = Ridge(alpha=ridge, fit_intercept=intercept, solver="svd", tol=0).fit(x.numpy(), y.numpy())
    close(weight.T, torch.from_numpy(model.coef_).T, 1e-8)
    assert (bias is not None) == intercept
    close(predict((weight, bias), new), torch.from_numpy(model.predict(new.numpy())), 1e-8)


# Several sites

SEED = Provenance(details={"seed": 4})
SITES = {"a.0": random(N, 4, 11), "b.0": random(N, 6, 12), "c.0": random(N, 3, 13), "d.0": random(N, 4, 14)}
PAIRS = [("b.0", "c.0"), ("a.0", "b.0"), ("b.0", "a.0"), ("a.0", "d.0"), ("b.0", "c.0"), ("c.0", "d.0")]
ORDER = [("b.0", "c.0"), ("b.0", "a.0"), ("a.0", "b.0"), ("a.0", "d.0"), ("c.0", "d.0")]


def batches(samples: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    for start in range(0, N, size):
        yield {site: vectors[start : start + size] for site, vectors in samples.items()}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("intercept", "ridge"), [(False, 0.0), (True, 0.5)])
def test_several_targets_at_once_and_in_chunks_are_the_same_as_one_by_one(
    intercept, ridge, copied, monkeypatch
):
    monkeypatch.setattr(fitting, "CONVERTED_BYTES", fitting.CONVERTED_BYTES if copied else 0)
    before = {site: vectors.clone() for site, vectors in SITES.items()}
    options: dict[str, Any] = {"intercept": intercept, "ridge": ridge}
    for chunk in (fitting._CHUNK, 9):
        monkeypatch.setattr(fitting, "_CHUNK", chunk)
        streamed_maps = fit_stream(batches(SITES, 7), PAIRS, provenance=SEED, **options)
        for maps in (fit_samples(as_collected(SITES), PAIRS, **options), streamed_maps):
            found = list(maps)
            assert [(m.source, m.target) for m in found] == ORDER
            for linear in found:
                weight, bias = one_update(SITES[linear.source], SITES[linear.target], intercept, ridge)
                torch.testing.assert_close(linear.weight, weight)
                torch.testing.assert_close(linear.bias, bias)
                assert linear.provenance.details["seed"] == 4
    assert all(torch.equal(vectors, before[site]) for site, vectors in SITES.items())


# Chosen and weighted samples: scikit-learn's answer, however the samples are given

WEIGHTS = torch.from_numpy(np.random.default_rng(0).exponential(size=N))
WEIGHTS[::7] = 0
ROWS = torch.from_numpy(np.random.default_rng(1).random(N) < 0.7)
X, Y = plain(N, 3), targets(plain(N, 3))
PAIR, SAMPLES = [("h.0", "h.1")], {"h.0": X, "h.1": Y}
COLLECTED = make_activations(SAMPLES, Provenance(make_identity(n_layers=1)))


def shuffled() -> Iterator[Rows]:
    """Batches with the index of their samples, in another order than the collection's."""
    for part in np.split(np.random.default_rng(1).permutation(N), [11, 12, 30]):
        yield Rows(part, part, {site: vectors[part] for site, vectors in SAMPLES.items()})


FITS: dict[str, Callable[..., Any]] = {
    "set": lambda **options: list(MapSet.fit(COLLECTED, pairs=PAIR, progress=False, **options).values()),
    "stream": lambda **options: list(fit_stream(shuffled(), PAIR, **options)),
    "stream in order": lambda **options: list(fit_stream(batches(SAMPLES, 17), PAIR, **options)),
}


@pytest.mark.parametrize(("intercept", "ridge"), [(False, 0.0), (True, 0.0), (True, 0.8)])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("rows", [None, ROWS], ids=["all", "chosen"])
@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_fits_on_chosen_and_weighted_samples_are_sklearns(fit, rows, weights, intercept, ridge):
    (linear,) = fit(rows=rows, weights=weights, intercept=intercept, ridge=ridge)
    model = Ridge(ridge, fit_intercept=intercept) if ridge else LinearRegression(fit_intercept=intercept)
    mask = np.ones(N, dtype=bool) if rows is None else rows.numpy()
    model.fit(X[mask], Y[mask], sample_weight=None if weights is None else weights[mask])
    np.testing.assert_allclose(linear.weight, model.coef_, rtol=1e-5, atol=1e-5)
    if intercept:
        np.testing.assert_allclose(linear.bias, model.intercept_, rtol=1e-5, atol=1e-5)


def test_whole_weights_are_repeated_samples_in_parts_too():
    counts = torch.arange(N) % 3
    whole = moments(X, Y).update(X, Y, weights=counts.double())
    merged = moments(X, Y)
    for part in (slice(0, 7), slice(7, 8), slice(8, N)):
        merged.merge(moments(X, Y).update(X[part], Y[part], weights=counts[part].double()))
    repeated = moments(X, Y).update(X.repeat_interleave(counts, 0), Y.repeat_interleave(counts, 0))
    for weighted in (whole, merged):
        assert weighted.n == int((counts > 0).sum())
        solutions = (state.solution(intercept=True, ridge=0.5) for state in (weighted, repeated))
        for ours, theirs in zip(*solutions, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
        x_mean, y_mean, total = weighted.means()
        of_samples = counts.double()
        torch.testing.assert_close(x_mean, of_samples @ X.double() / of_samples.sum())
        torch.testing.assert_close(y_mean, of_samples @ Y.double() / of_samples.sum())
        assert total == pytest.approx(counts.sum().item())


def test_samples_of_weight_zero_may_be_anything():
    weights, bad = torch.ones(N), X.clone()
    weights[3], bad[3] = 0, torch.inf
    (linear,) = fit_samples(as_collected({"h.0": bad, "h.1": Y}), PAIR, weights=weights)
    (without,) = fit_samples(COLLECTED, PAIR, rows=weights > 0)
    torch.testing.assert_close(linear.weight, without.weight)


def test_the_provenance_tells_rows_and_weights_apart():
    details = [FITS["set"](weights=w, rows=ROWS)[0].provenance.details for w in (WEIGHTS, WEIGHTS + 1)]
    assert details[0]["weights"] != details[1]["weights"]
    assert details[0]["rows"] != details[1]["rows"]
    assert details[0]["n_fitted"] == int((ROWS & (WEIGHTS > 0)).sum())
    assert not {"weights", "rows"} & {*FITS["set"]()[0].provenance.details}


# What is refused


UNUSABLE: list[dict[str, Any]] = [
    {"weights": torch.full((N,), -1.0)}, {"weights": torch.full((N,), torch.nan)},
    {"weights": ROWS.double(), "rows": ~ROWS}, {"rows": torch.ones(N - 1, dtype=torch.bool)},
    {"weights": torch.ones(N + 1)}, {"rows": torch.arange(N)},
]  # fmt: skip


@pytest.mark.refused
@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_rows_and_weights_that_cannot_be_used_are_refused(fit):
    for options in UNUSABLE:
        with pytest.raises(InputError, match=r"rows|weights"):
            fit(**options)


@pytest.mark.filterwarnings("error::matlens.InputWarning")
def test_every_fit_warns_once_of_fewer_than_two_samples_per_dimension():
    def collected(n: int) -> Activations:
        vectors = {f"h.{layer}": random(n, 12, layer) for layer in range(3)}
        return make_activations(vectors, Provenance(make_identity(n_layers=2)))

    pairs = [("h.0", "h.1"), ("h.0", "h.2"), ("h.1", "h.2")]
    fits: list[Callable[..., Any]] = [
        lambda samples, **how: MapSet.fit(samples, pairs=pairs, progress=False, **how),
        lambda samples, **how: list(fit_stream([dict(samples)], pairs, **how)),
    ]
    for fit in fits:
        with pytest.warns(InputWarning, match=r"23.*ridge") as caught:
            fit(collected(23))
        assert [warning.filename for warning in caught] == [__file__]  # where the user's own code is
        fit(collected(24))
        fit(collected(10), ridge=1.0)
        with pytest.warns(InputWarning):
            fit(collected(24), rows=torch.arange(24) > 0)


@pytest.mark.parametrize(("side", "bad"), [("source", torch.nan), ("target", torch.inf)])
@pytest.mark.parametrize("n_before", [0, 5])
def test_what_is_not_finite_is_refused_by_name_and_adds_nothing(side, bad, n_before):
    state = LeastSquares(D_IN, {"h.30": D_OUT}, source="h.3").update(X[:n_before], Y[:n_before])
    bad_x, bad_y = X[n_before:].clone(), Y[n_before:].clone()
    (bad_x if side == "source" else bad_y)[-1, 1] = bad
    with pytest.raises(InputError, match=rf"at h\.{3 if side == 'source' else 30} are not finite"):
        state.update(bad_x, bad_y)
    assert state.n == n_before
    state.update(X[n_before:], Y[n_before:])
    close(predict(state.solution(intercept=False, ridge=0.0), X), X @ gelsd(X, Y), 1e-12)


def test_moments_of_other_sites_are_not_merged():
    state = LeastSquares(D_IN, {"h.1": 3, "h.2": 3}, source="h.0").update(X, [Y, Y])
    for targets, options in (("h.2 h.1", {}), ("h.1", {}), ("h.1 h.2", {"norms": True})):
        with pytest.raises(InputError, match=r"^other must|norms"):
            state.merge(LeastSquares(D_IN, dict.fromkeys(targets.split(), 3), source="h.0", **options))
    with pytest.raises(InputError, match=r"^other must"):
        state.merge(LeastSquares(D_IN, {"h.1": 3, "h.2": 3}, source="h.3"))
    assert state.n == N


def test_merging_leaves_the_other_as_it_was():
    other = moments(X, Y).update(X[:20], Y[:20])
    before = other.solution(intercept=True, ridge=0.0)
    moments(X, Y).update(X[20:], Y[20:]).merge(other).update(X, Y)
    assert other.n == 20
    torch.testing.assert_close(other.solution(intercept=True, ridge=0.0), before, rtol=0, atol=0)


def test_a_stream_of_another_model_does_not_take_a_given_provenance():
    given, other = (Provenance(make_identity(fingerprint=digits, n_layers=1)) for digits in ("f00d", "beef"))
    with pytest.raises(InputError):
        list(fit_stream([Rows(np.arange(N), np.arange(N), SAMPLES, other)], PAIR, provenance=given))


# Products in float32


def test_split_products_give_the_same_maps():
    x = random(60, 5) * torch.tensor([1000.0, 1, 1, 1e-3, 1])
    samples = {"h.0": x, "h.1": x @ random(5, 5, 3) + random(60, 5, 4), "h.2": random(60, 5, 5)}
    pairs = [("h.0", "h.1"), ("h.0", "h.2")]
    collected = make_activations(samples, Provenance(make_identity(n_layers=2)))
    split = list[Tensor]()

    def counted(a: Tensor, b: Tensor) -> Tensor:
        split.append(split_product(a, b))
        return split[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matlens.linear.least_squares.split_product", counted)
        fitted = MapSet.fit(collected, pairs=pairs, progress=False, split=True).values()
        maps = [*fitted, *fit_stream([samples], pairs, split=True)]
    assert len(split) == len(maps) == 4
    for linear in maps:
        exact, sizes = gelsd(x, samples[linear.target]).T, x.abs().amax(0)
        assert torch.allclose(linear.weight.double() * sizes, exact * sizes, rtol=1e-6, atol=1e-6)
