"""Least squares: every way of giving the samples solves the same problem, the one that gelsd solves."""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from identities import make_activations
from sklearn.linear_model import LinearRegression, Ridge
from torch import Tensor

from matlens import parallel
from matlens.errors import InputError
from matlens.linear import fitting, sums
from matlens.linear.fitting import fit_samples, fit_stream
from matlens.linear.least_squares import LeastSquares
from matlens.linear.maps import LinearMap
from matlens.models.identity import Provenance
from matlens.numerics import split_product

EPS = torch.finfo(torch.float64).eps
N, D_IN, D_OUT = 40, 7, 3
Solution = tuple[Tensor, Tensor | None]
Way = Callable[[Tensor, Tensor, bool, float], Solution]


def random(n: int, d: int, seed: int = 0) -> Tensor:
    """Normal numbers on a grid of 1/256, so that sums and differences of columns are exact."""
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


def constant(n: int, seed: int) -> Tensor:
    x = random(n, D_IN, seed)
    x[:, 1], x[:, 5] = 1.0, -3.5
    return x


def zero(n: int, seed: int) -> Tensor:
    x = random(n, D_IN, seed)
    x[:, 0], x[:, 3] = 0.0, 0.0
    return x


def strong(n: int, seed: int) -> Tensor:
    x = random(n, D_IN, seed)
    x[:, 1] *= 1e4
    return x


def weak(n: int, seed: int) -> Tensor:
    x = random(n, D_IN, seed)
    x[:, 1] *= 1e-4
    return x


def everything(n: int, seed: int) -> Tensor:
    x = random(n, D_IN, seed)
    x[:, 1], x[:, 2] = 1.0, 0.0
    x[:, 3], x[:, 4], x[:, 5] = x[:, 0] * 2, x[:, 4] * 1e4, x[:, 5] * 1e-4
    return x


def everything_wide(n: int, seed: int) -> Tensor:
    return torch.cat([everything(n, seed), wide(n, seed + 50)], 1)


INPUTS = (
    plain, wide, collinear, nearly_collinear, constant, zero, strong, weak, everything, everything_wide,
)  # fmt: skip


def targets(x: Tensor, seed: int = 1) -> Tensor:
    """A function of the input that no linear map meets exactly, of coordinates of different size."""
    y = (x / (1 + x.abs().amax(0))) @ random(x.shape[1], D_OUT, seed) + random(len(x), D_OUT, seed + 1)
    return y * torch.tensor([1.0, 30.0, 0.1], dtype=torch.float64) + 0.5


# The ways in which samples can be given. All solve in float64.


def moments(x: Tensor, y: Tensor) -> LeastSquares:
    return LeastSquares(x.shape[1], y.shape[1])


def parts(x: Tensor, y: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(sizes), y.split(sizes), strict=True)


def one_update(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    return moments(x, y).update(x, y).solution(intercept=intercept, ridge=ridge)


def row_by_row(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    state = moments(x, y)
    for a, b in parts(x, y, [1] * len(x)):
        state.update(a, b)
    return state.solution(intercept=intercept, ridge=ridge)


def uneven_updates(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    state = moments(x, y)
    for a, b in parts(x, y, [0, 1, 0, 20, 3, 0, len(x) - 24]):
        state.update(a, b)
    return state.solution(intercept=intercept, ridge=ridge)


def merged_in_turn(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    states = [moments(x, y).update(a, b) for a, b in parts(x, y, [1] * 5 + [0, len(x) - 5])]
    return reduce(LeastSquares.merge, states).solution(intercept=intercept, ridge=ridge)


def merged_as_tree(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    states = [moments(x, y).update(a, b) for a, b in parts(x, y, [9, 2, 1, len(x) - 12])]
    left, right = states[3].merge(states[0]), states[1].merge(states[2])
    return moments(x, y).merge(right.merge(left)).solution(intercept=intercept, ridge=ridge)


def batch(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    (fitted,) = fit_samples({"h.0": x, "h.1": y}, [("h.0", "h.1")], intercept=intercept, ridge=ridge)
    return fitted.weight, fitted.bias


def streamed(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    batches = ({"h.0": a, "h.1": b} for a, b in parts(x, y, [3, 0, 1] + [12] * 3 + [len(x) - 40]))
    (fitted,) = fit_stream(batches, [("h.0", "h.1")], intercept=intercept, ridge=ridge)
    return fitted.weight, fitted.bias


def with_chunks_of_one(way: Way, x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "chunk_size", lambda samples: 1)
        patch.setattr(sums, "chunk_size", lambda samples: 1)
        return way(x, y, intercept, ridge)


def batch_in_chunks(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    return with_chunks_of_one(batch, x, y, intercept, ridge)


def streamed_in_chunks(x: Tensor, y: Tensor, intercept: bool, ridge: float) -> Solution:
    return with_chunks_of_one(streamed, x, y, intercept, ridge)


WAYS = (
    one_update, row_by_row, uneven_updates, merged_in_turn, merged_as_tree,
    batch, batch_in_chunks, streamed, streamed_in_chunks,
)  # fmt: skip


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep maps in the float64 that they are solved in, to compare more digits than a float32 has."""

    def of(w: Tensor, b: Tensor | None, source: str, target: str, provenance: Any = None) -> LinearMap:
        return LinearMap(w, b, source, target, provenance or Provenance())

    monkeypatch.setattr(LinearMap, "from_solution", of)


def gelsd(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.lstsq(x.double(), y.double(), driver="gelsd").solution


def slack(x: Tensor) -> float:
    """What two backward stable solvers may differ by: rounding times the condition of what is kept."""
    s = torch.linalg.svdvals(x.double())
    kept = s[s > EPS * max(x.shape) * s[0]]
    return float(100 * EPS * kept[0] / kept[-1])


def predict(solution: Solution, x: Tensor) -> Tensor:
    weight, bias = solution
    return x.double() @ weight.T + (0 if bias is None else bias)


def close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """To a share of each target's largest value: a coordinate may be a thousand times another."""
    error = (actual - expected).abs().amax(0) / expected.abs().amax(0)
    assert actual.shape == expected.shape
    assert error.max() < relative, f"{error.max():.2e} is not below {relative:.2e}"


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", INPUTS)
def test_predictions_are_those_of_gelsd_on_old_and_new_points(
    make: Callable[[int, int], Tensor], way: Way
) -> None:
    x, new = make(N, 0), make(25, 7)
    y = targets(x)
    reference, found = gelsd(x, y), way(x, y, False, 0.0)
    assert found[1] is None
    assert found[0].dtype == torch.float64
    assert slack(x) < 1e-4, "the reference itself is not determined"
    close(predict(found, x), x @ reference, slack(x))
    close(predict(found, new), new @ reference, slack(x))


@pytest.mark.parametrize("way", [one_update, merged_as_tree, batch, streamed])
@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.usefixtures("in_float64")
def test_weight_is_the_one_of_least_norm(make: Callable[[int, int], Tensor], way: Way) -> None:
    x = make(N, 0)
    y = targets(x)
    weight, _ = way(x, y, False, 0.0)
    close(weight.T, torch.linalg.pinv(x, rtol=EPS * max(x.shape)) @ y, slack(x))
    # No part of the weight lies where the inputs have nothing.
    _, s, vh = torch.linalg.svd(x)
    nothing = vh[int((s > EPS * max(x.shape) * s[0]).sum()) :]
    assert make not in (wide, collinear, zero, everything, everything_wide) or len(nothing)
    assert not len(nothing) or (weight @ nothing.T).abs().max() <= slack(x) * weight.abs().max()


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("way", [one_update, row_by_row, merged_as_tree, batch, streamed])
@pytest.mark.parametrize(("factor", "counts"), [(0.5, False), (2.0, True)])
def test_a_direction_counts_from_the_singular_value_from_which_gelsd_counts_it(
    way: Way, factor: float, counts: bool
) -> None:
    x = torch.zeros(400, 2, dtype=torch.float64)
    x[0, 0], x[1, 1] = 1.0, factor * 400 * EPS
    y = torch.ones(400, 1, dtype=torch.float64)
    weight, _ = way(x, y, False, 0.0)
    assert bool(gelsd(x, y)[1] != 0) == counts
    torch.testing.assert_close(weight.T, gelsd(x, y))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("y_dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("x_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_solution_is_in_float64_whatever_the_samples_are(
    x_dtype: torch.dtype, y_dtype: torch.dtype, way: Way
) -> None:
    x = (random(N, D_IN) * 300).to(x_dtype)
    y = targets(x.double()).to(y_dtype)
    found = way(x, y, False, 0.0)
    close(predict(found, x), x.double() @ gelsd(x, y), 1e-12)


@pytest.mark.parametrize("way", [batch, streamed])
def test_a_map_is_the_float64_solution_rounded_once(way: Way) -> None:
    x = strong(N, 0)
    y = targets(x)
    for intercept in (False, True):
        weight, bias = one_update(x, y, intercept, 0.0)
        found = way(x, y, intercept, 0.0)
        assert found[0].dtype == torch.float32
        torch.testing.assert_close(found[0], weight.float(), rtol=1.5 * 2**-23, atol=0)
        if bias is not None and found[1] is not None:
            assert found[1].dtype == torch.float32
            torch.testing.assert_close(found[1], bias.float(), rtol=1.5 * 2**-23, atol=0)


# Intercept and ridge


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_intercept_is_sklearns(way: Way, offset: float) -> None:
    x, new = random(N, D_IN) + offset, random(9, D_IN, 8) + offset
    y = targets(x)
    weight, bias = way(x, y, True, 0.0)
    model = LinearRegression().fit(x.numpy(), y.numpy())
    assert bias is not None
    torch.testing.assert_close(weight, torch.from_numpy(model.coef_), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(bias, torch.from_numpy(model.intercept_), rtol=1e-9, atol=1e-7)
    close(predict((weight, bias), new), torch.from_numpy(model.predict(new.numpy())), 1e-11)


def offset_constant(n: int, seed: int) -> Tensor:
    x = random(n, D_IN, seed)
    x[:, 2] = 1000.0
    return x


def offset_collinear(n: int, seed: int) -> Tensor:
    return collinear(n, seed) + 4096


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make", [plain, wide, collinear, constant, zero, strong, weak, offset_constant, offset_collinear]
)
def test_intercept_is_least_squares_on_centred_samples_where_they_do_not_determine_the_map(
    make: Callable[[int, int], Tensor], way: Way
) -> None:
    x, new = make(N, 0), make(25, 7)
    y = targets(x)
    centred = x - x.mean(0)
    reference = torch.linalg.pinv(centred, rtol=1e-11) @ (y - y.mean(0))
    found = way(x, y, True, 0.0)
    for points in (x, new):
        close(predict(found, points), y.mean(0) + (points - x.mean(0)) @ reference, 1e-8)
    close(found[0].T, reference, 1e-7)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [0.01, 5.0])
@pytest.mark.parametrize("make", [plain, wide, collinear, nearly_collinear, constant, zero, everything])
def test_ridge_is_sklearns(
    make: Callable[[int, int], Tensor], ridge: float, intercept: bool, way: Way
) -> None:
    x, new = make(N, 0), make(25, 7)
    y = targets(x)
    weight, bias = way(x, y, intercept, ridge)
    model = Ridge(alpha=ridge, fit_intercept=intercept, solver="svd", tol=0).fit(x.numpy(), y.numpy())
    close(weight.T, torch.from_numpy(model.coef_).T, 1e-8)
    assert (bias is not None) == intercept
    close(predict((weight, bias), new), torch.from_numpy(model.predict(new.numpy())), 1e-8)


def test_solve_returns_a_map_with_what_it_is_of() -> None:
    x = plain(N, 0)
    y = targets(x)
    state = LeastSquares(D_IN, {"h.4": D_OUT}, source="h.1").update(x, y)
    found = state.solve(intercept=True, ridge=2.0, provenance=SEED)["h.4"]
    weight, bias = state.solution(intercept=True, ridge=2.0)
    assert bias is not None
    assert found.bias is not None
    assert (found.source, found.target, found.provenance) == ("h.1", "h.4", SEED)
    assert torch.equal(found.weight, weight.float())
    assert torch.equal(found.bias, bias.float())
    assert not torch.allclose(found.weight, state.solve(intercept=True)["h.4"].weight, rtol=1e-3)
    assert state.solve()["h.4"].bias is None


# Properties for any input


def matrices(rows: int, columns: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float64, (rows, columns), elements=st.floats(-100, 100, width=32))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    n, d_in, d_out = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return torch.from_numpy(draw(matrices(n, d_in))), torch.from_numpy(draw(matrices(n, d_out)))


@given(problems(), st.sampled_from([0.0, 0.5]), st.booleans(), st.data())
def test_residual_is_orthogonal_to_the_inputs_and_no_other_map_is_better(
    problem: tuple[Tensor, Tensor], ridge: float, intercept: bool, data: st.DataObject
) -> None:
    x, y = problem
    weight, bias = moments(x, y).update(x, y).solution(intercept=intercept, ridge=ridge)
    residual = y - predict((weight, bias), x)
    size = x.norm() + len(x) ** 0.5
    offset = 0.0 if bias is None else len(x) ** 0.5 * float(bias.norm())
    rounding = 1e-12 * float(size * (y.norm() + size * weight.norm() + offset))
    assert (x.T @ residual - ridge * weight.T).abs().max() <= rounding
    if intercept:
        assert residual.sum(0).abs().max() <= rounding

    def loss(w: Tensor, b: Tensor | None) -> float:
        return float((y - predict((w, b), x)).square().sum() + ridge * w.square().sum())

    step = torch.from_numpy(data.draw(matrices(*weight.shape))) * 10.0 ** -data.draw(st.integers(0, 4))
    shift = data.draw(st.floats(-3, 3))
    other = loss(weight + step, None if bias is None else bias + shift)
    assert other >= loss(weight, bias) * (1 - 1e-11) - 4 * rounding * (1 + float(step.norm()) + abs(shift))


@given(
    arrays(np.float64, (6, 4), elements=st.integers(-3, 3)),
    arrays(np.float64, (6, 2), elements=st.integers(-3, 3)),
    arrays(np.float64, (2, 4), elements=st.integers(-3, 3)),
)
def test_of_all_maps_with_these_predictions_the_norm_is_least(
    x: np.ndarray, y: np.ndarray, other: np.ndarray
) -> None:
    samples, towards = torch.from_numpy(x), torch.from_numpy(other)
    weight, _ = one_update(samples, torch.from_numpy(y), False, 0.0)
    unseen = torch.eye(4, dtype=torch.float64) - torch.linalg.pinv(samples, rtol=1e-10) @ samples
    torch.testing.assert_close(weight @ unseen, torch.zeros_like(weight), rtol=0, atol=1e-9)
    assert (weight + towards @ unseen).norm() >= weight.norm() - 1e-9


@given(
    problems(),
    st.lists(st.integers(0, 4), max_size=8),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12),
    st.booleans(),
)
@example((torch.ones(3, 1, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)), [1], [], True)
def test_any_partition_in_any_order_and_grouping_gives_the_whole(
    problem: tuple[Tensor, Tensor], sizes: list[int], merges: list[tuple[int, int]], intercept: bool
) -> None:
    # Of small integers, singular values are either rounding or far above it.
    x, y = (part.clamp(-6, 6).round() for part in problem)
    cuts = [min(cut, len(x)) for cut in np.cumsum([0, *sizes]).tolist()] + [len(x)]
    pieces = [(x[a:b], y[a:b]) for a, b in pairwise(cuts)]
    state = moments(x, y)
    for a, b in pieces:
        state.update(a, b)
    states = [moments(x, y).update(a, b) for a, b in pieces]
    for i, j in merges:
        if len(states) > 1:
            one = states.pop(i % len(states))
            states[j % len(states)].merge(one)
    whole = one_update(x, y, intercept, 0.0)
    for found in (state, reduce(LeastSquares.merge, states)):
        assert found.n == len(x)
        solution = found.solution(intercept=intercept, ridge=0.0)
        torch.testing.assert_close(predict(solution, x), predict(whole, x), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(solution[0], whole[0], rtol=1e-6, atol=1e-6)


# Several sites


SEED = Provenance(details={"seed": 4})
SITES = {"a.0": random(N, 4, 11), "b.0": random(N, 6, 12), "c.0": random(N, 3, 13), "d.0": random(N, 4, 14)}
PAIRS = [("b.0", "c.0"), ("a.0", "b.0"), ("b.0", "a.0"), ("a.0", "d.0"), ("b.0", "c.0"), ("c.0", "d.0")]


def batches(samples: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    for start in range(0, N, size):
        yield {site: vectors[start : start + size] for site, vectors in samples.items()}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kept", [0, fitting.KEPT])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
@pytest.mark.parametrize("intercept", [False, True])
def test_several_targets_at_once_are_the_same_as_one_by_one(
    intercept: bool, ridge: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "KEPT", kept)
    together = [
        list(fit_samples(SITES, PAIRS, intercept=intercept, ridge=ridge, provenance=SEED)),
        list(fit_stream(batches(SITES, 7), PAIRS, intercept=intercept, ridge=ridge, provenance=SEED)),
    ]
    for maps in together:
        assert [(m.source, m.target) for m in maps] == [
            ("b.0", "c.0"), ("b.0", "a.0"), ("a.0", "b.0"), ("a.0", "d.0"), ("c.0", "d.0"),
        ]  # fmt: skip
        for found in maps:
            weight, bias = one_update(SITES[found.source], SITES[found.target], intercept, ridge)
            torch.testing.assert_close(found.weight, weight)
            torch.testing.assert_close(found.bias, bias)
            assert found.provenance == SEED


def test_moments_of_targets_side_by_side_are_those_of_the_joined_target() -> None:
    x, parted = SITES["a.0"], [SITES["b.0"], SITES["c.0"].float(), SITES["d.0"]]
    apart = LeastSquares(4, 13).update(x[:5], [y[:5] for y in parted]).update(x[5:], [y[5:] for y in parted])
    joined = one_update(x, torch.cat([y.double() for y in parted], 1), False, 0.0)
    torch.testing.assert_close(apart.solution(intercept=False, ridge=0.0)[0], joined[0])


def test_numbers_are_layers_of_the_stream_and_provenance_is_the_samples_own() -> None:
    vectors = {"h.0": SITES["a.0"], "h.1": SITES["b.0"], "ln1_out.0": SITES["c.0"]}
    known = Provenance(data={"corpus": "words"})
    samples = make_activations(vectors, known)
    pairs: list[tuple[str | int, str | int]] = [(0, 1), ("h.0", 1), ("ln1_out.0", 0)]
    by_number = list(fit_samples(samples, pairs))
    assert [(m.source, m.target) for m in by_number] == [("h.0", "h.1"), ("ln1_out.0", "h.0")]
    fitted = known.with_details(n_fitted=N, intercept=False, ridge=0.0)
    assert [m.provenance for m in by_number] == [fitted] * 2
    assert next(fit_samples(samples, pairs, provenance=SEED)).provenance == SEED
    for one, other in zip(by_number, fit_stream([vectors], pairs), strict=True):
        torch.testing.assert_close(one.weight, other.weight)
        assert (one.source, one.target) == (other.source, other.target)


@pytest.mark.parametrize("kept", [0, fitting.KEPT])
def test_large_samples_are_factorised_in_chunks_that_give_the_same_maps(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(fit_samples(SITES, PAIRS, intercept=True))
    sizes: list[int] = []
    update = LeastSquares.update

    def watched(self: LeastSquares, x: Tensor, y: Any, **weights: Any) -> LeastSquares:
        sizes.append(len(x))
        return update(self, x, y, **weights)

    monkeypatch.setattr(LeastSquares, "update", watched)
    monkeypatch.setattr(sums, "_CHUNK", 9)
    monkeypatch.setattr(fitting, "KEPT", kept)
    in_chunks = list(fit_samples(SITES, PAIRS, intercept=True))
    # Eight samples for each dimension at least: of b 6 dimensions, of a 4, of c 3.
    assert sizes == [40, 32, 8, 24, 16]
    sizes.clear()
    streamed_maps = list(fit_stream(batches(SITES, 1), PAIRS, intercept=True))
    assert sum(sizes) == 3 * N
    assert max(sizes) < N
    for found in (in_chunks, streamed_maps):
        for one, other in zip(found, whole, strict=True):
            assert (one.source, one.target) == (other.source, other.target)
            torch.testing.assert_close(one.weight, other.weight)
            torch.testing.assert_close(one.bias, other.bias)


def test_samples_with_gradients_are_fitted_as_their_numbers() -> None:
    generator = torch.Generator().manual_seed(5)
    samples = {"h.0": torch.randn(20, 4, generator=generator), "h.1": torch.randn(20, 3, generator=generator)}
    weights = torch.rand(20, generator=generator)
    (plain,) = fit_samples(samples, [(0, 1)], weights=weights)
    leaves = {site: values.clone().requires_grad_() for site, values in samples.items()}
    (fitted,) = fit_samples(leaves, [(0, 1)], weights=weights.clone().requires_grad_())
    assert torch.equal(fitted.weight, plain.weight)
    assert not fitted.weight.requires_grad
    moments = LeastSquares(4, 3).update(leaves["h.0"], [leaves["h.1"]], weights=weights.requires_grad_())
    assert torch.equal(moments.solve()["y"].weight, plain.weight)


def test_fitting_leaves_the_samples_alone() -> None:
    before = {site: vectors.clone() for site, vectors in SITES.items()}
    list(fit_samples(SITES, PAIRS))
    list(fit_stream(batches(SITES, 7), PAIRS))
    for site, vectors in SITES.items():
        assert torch.equal(vectors, before[site])


# What is refused


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("seen_before", [0, 1, 5, 30])
@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("side", ["source", "target"])
def test_what_is_not_finite_is_refused_by_name_and_adds_nothing(
    side: str, row: int, seen_before: int, bad: float
) -> None:
    x, y = plain(N, 0), targets(plain(N, 0))
    state = LeastSquares(D_IN, {"h.30": D_OUT}, source="h.3").update(x[:seen_before], y[:seen_before])
    bad_x, bad_y = x[seen_before:].clone(), y[seen_before:].clone()
    (bad_x if side == "source" else bad_y)[row, 1] = bad
    with pytest.raises(InputError, match=rf"samples of h\.{3 if side == 'source' else 30} hold"):
        state.update(bad_x, bad_y)
    assert state.n == seen_before
    if seen_before:
        torch.testing.assert_close(
            state.solution(intercept=True, ridge=0.1),
            one_update(x[:seen_before], y[:seen_before], True, 0.1),
            rtol=0,
            atol=0,
        )
    state.update(x[seen_before:], y[seen_before:])
    close(predict(state.solution(intercept=False, ridge=0.0), x), x @ gelsd(x, y), 1e-12)


@pytest.mark.parametrize("bad", ["a.0", "b.0", "c.0"])
def test_batch_and_stream_name_the_site_that_is_not_finite(bad: str) -> None:
    samples = {site: vectors.half() for site, vectors in SITES.items()}
    samples[bad] = samples[bad] * 60000
    assert not samples[bad].isfinite().all()
    for fits in (fit_samples(samples, PAIRS), fit_stream(batches(samples, 7), PAIRS)):
        with pytest.raises(InputError, match=rf"samples of .*\b{bad}\b.* hold"):
            list(fits)


@pytest.mark.refused
@pytest.mark.parametrize("shape", [(N, D_OUT - 1), (N, D_OUT + 1), (N - 1, D_OUT), (N + 1, D_OUT)])
def test_targets_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    x = plain(N, 0)
    with pytest.raises((ValueError, RuntimeError)):
        LeastSquares(D_IN, D_OUT).update(x, random(*shape))


@pytest.mark.parametrize("names", [("h.0", "h.2"), ("h.1", "h.1"), ("h.2", "h.0")])
def test_moments_of_other_sites_are_not_merged(names: tuple[str, str]) -> None:
    x, y = plain(N, 0), targets(plain(N, 0))
    state = LeastSquares(D_IN, {"h.1": D_OUT}, source="h.0").update(x, y)
    other = LeastSquares(D_IN, {names[1]: D_OUT}, source=names[0]).update(x + 1, y)
    with pytest.raises(InputError, match=rf"h\.0 -> h\.1, got one of {names[0]} -> {names[1]}"):
        state.merge(other)
    assert state.n == N
    assert torch.equal(state.solution(intercept=False, ridge=0.0)[0], one_update(x, y, False, 0.0)[0])


def test_targets_in_another_order_and_norms_on_one_side_are_not_merged() -> None:
    state = LeastSquares(D_IN, {"h.1": 3, "h.2": 3})
    for other in (LeastSquares(D_IN, {"h.2": 3, "h.1": 3}), LeastSquares(D_IN, state.targets, norms=True)):
        with pytest.raises(InputError, match=r"^other must"):
            state.merge(other)


def test_merging_leaves_the_other_as_it_was() -> None:
    x, y = plain(N, 0), targets(plain(N, 0))
    other = moments(x, y).update(x[:20], y[:20])
    before = other.solution(intercept=True, ridge=0.0)
    moments(x, y).update(x[20:], y[20:]).merge(other).update(x, y)
    assert other.n == 20
    torch.testing.assert_close(other.solution(intercept=True, ridge=0.0), before, rtol=0, atol=0)


def test_without_samples_there_is_no_map() -> None:
    empty = {site: vectors[:0] for site, vectors in SITES.items()}
    state = LeastSquares(4, {"h.1": 3}, source="h.0")
    state.update(empty["a.0"], empty["c.0"]).merge(LeastSquares(4, {"h.1": 3}, source="h.0"))
    with pytest.raises(InputError, match=r"h\.0 -> h\.1 must have at least one sample"):
        state.solve()
    for fit in (fit_stream([], PAIRS), fit_stream([empty], PAIRS), fit_samples(empty, PAIRS)):
        with pytest.raises(InputError, match="at least one sample"):
            list(fit)


@pytest.mark.parametrize(
    "fit", [fit_samples, lambda samples, pairs, **how: fit_stream([samples], pairs, **how)]
)
def test_split_products_are_used_where_they_are_asked_for_and_give_the_same_maps(
    fit: Callable[..., Iterator[LinearMap]], monkeypatch: pytest.MonkeyPatch
) -> None:
    split = list[tuple[int, ...]]()

    def counted(a: Tensor, b: Tensor) -> Tensor:
        split.append(tuple(b.shape))
        return split_product(a, b)

    monkeypatch.setattr("matlens.linear.least_squares.split_product", counted)
    x = random(60, 5) * torch.tensor([1000.0, 1, 1, 1e-3, 1])
    samples = {"h.0": x, "h.1": x @ random(5, 5, 3) + random(60, 5, 4), "h.2": random(60, 5, 5)}
    pairs = [("h.0", "h.1"), ("h.0", "h.2")]
    whole, parted = (list(fit(samples, pairs, split=how)) for how in (False, True))
    assert split
    assert sum(width for _, width in split) == 10
    for ours, theirs in zip(parted, whole, strict=True):
        exact = torch.linalg.lstsq(x.double(), samples[ours.target].double(), driver="gelsd").solution.T
        for weight in (ours.weight.double(), theirs.weight.double()):
            assert torch.allclose(weight * x.abs().amax(0), exact * x.abs().amax(0), rtol=1e-6, atol=1e-6)


def test_moments_of_other_processes_split_their_products_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"h.0": random(60, 4), "h.1": random(60, 3, 1)}
    begin, end = ({site: of[part] for site, of in samples.items()} for part in (slice(30), slice(30, 60)))
    fits = sums.PairFits([("h.0", "h.1")], {"h.0": 4, "h.1": 3}, split=True)
    fits.update(begin)
    monkeypatch.setattr(parallel, "world_size", lambda: 2)
    monkeypatch.setattr(parallel, "gather", lambda parts, what: [parts])
    fits.reduce()
    monkeypatch.setattr(parallel, "world_size", lambda: 1)
    calls = list[int]()

    def counted(a: Tensor, b: Tensor) -> Tensor:
        calls.append(len(a))
        return split_product(a, b)

    monkeypatch.setattr("matlens.linear.least_squares.split_product", counted)
    fits.update(end)
    solved = fits["h.0"].solve()["h.1"]
    assert calls == [30]
    exact = torch.linalg.lstsq(samples["h.0"].double(), samples["h.1"].double()).solution.T
    torch.testing.assert_close(solved.weight.double(), exact, rtol=1e-5, atol=1e-6)
