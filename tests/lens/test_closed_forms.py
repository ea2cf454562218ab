"""Closed forms are what NumPy finds in float64 from all samples at once, streamed, merged or weighted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near, make_sentences

import matlens
from matlens import InputError, Lens, LinearMap, MapSet
from matlens.activations.activations import Activations
from matlens.activations.sinks import sink_rows
from matlens.data.examples import Examples
from matlens.lens import closed_forms, config
from matlens.lens.closed_forms import (
    STRENGTHS,
    LensLeastSquares,
    leave_one_out,
    lens_least_squares,
    row_keys,
    solve,
)
from matlens.lens.config import LensConfig, Method
from matlens.lens.maps import Standardisation
from matlens.linear.least_squares import LeastSquares

# One layer

D, N = 6, 40


def rows(n: int = N, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows as streams have them: means far from zero, and coordinates a thousand times larger than others."""
    generator = np.random.default_rng(seed)
    scales = np.array([1000.0, 30.0, 1.0, 1.0, 0.5, 0.1])
    x = (generator.normal(size=(n, D)) + 2) * scales
    y = x @ generator.normal(size=(D, D)) * 0.3 + x + 5 * generator.normal(size=(n, D)) + 3
    return x, y, generator.uniform(0.2, 3, n)


def moments_of(x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> LeastSquares:
    moments = LeastSquares(D, D)
    for part in (slice(0, 7), slice(7, None)):
        of_part = None if weights is None else torch.from_numpy(weights[part])
        moments.update(torch.from_numpy(x[part]), torch.from_numpy(y[part]), weights=of_part)
    return moments


def tensors(x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> list[torch.Tensor]:
    given = (x, y, np.ones(len(x)) if weights is None else weights)
    return [torch.from_numpy(part) for part in given]


def reference(
    x: np.ndarray,
    y: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    intercept: bool = False,
    ridge: float = 0.0,
    identity: bool = False,
    rank: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias by least squares on stacked rows, the penalty as further rows of data."""
    roots = np.sqrt(np.ones(len(x)) if weights is None else weights)[:, None]
    design = np.hstack([x, np.ones((len(x), int(intercept)))]) * roots
    penalty = np.sqrt(ridge) * np.eye(D, design.shape[1])
    target = np.sqrt(ridge) * np.eye(D) * identity
    solution = np.linalg.lstsq(np.vstack([design, penalty]), np.vstack([y * roots, target]), rcond=None)[0]
    weight, bias = solution[:D].T, solution[D] if intercept else np.zeros(D)
    if rank is not None:
        mean = np.average(x, 0, weights) if intercept else np.zeros(D)
        fitted = (x - mean) @ weight.T * roots
        directions = np.linalg.svd(fitted, full_matrices=False)[2][:rank]
        projection = directions.T @ directions
        centre = bias + weight @ mean
        weight, bias = projection @ weight, centre - projection @ weight @ mean
    return weight, bias


def assert_is(linear: LinearMap, weight: np.ndarray, bias: np.ndarray) -> None:
    matrix = linear.matrix.double().numpy()
    np.testing.assert_allclose(matrix, weight, rtol=2e-5, atol=1e-5 * np.abs(weight).max())
    given = np.zeros(D) if linear.bias is None else linear.bias.numpy()
    np.testing.assert_allclose(given, bias, rtol=1e-4, atol=1e-5 * max(np.abs(bias).max(), 1))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("options", "penalty"),
    [({}, 0), ({"rank": 2}, 0), ({"ridge": 0.01}, 0.01), ({"ridge": 0.01, "toward": "identity"}, 0.01)],
)
def test_closed_forms_are_least_squares_on_the_samples(
    options: dict[str, Any], penalty: float, intercept: bool, weighted: bool
) -> None:
    x, y, weights = rows()
    used = weights if weighted else None
    mean = np.average(x, 0, used) if intercept else 0
    unit = ((x - mean) ** 2 * (1 if used is None else used[:, None])).sum() / D
    expected = reference(
        x, y, weights=used, intercept=intercept, ridge=penalty * unit, identity="toward" in options,
        rank=options.get("rank"),
    )  # fmt: skip
    method = LensConfig(intercept=intercept, weighted=weighted, **options)
    linear, ridge = solve(method, moments_of(x, y, used), *tensors(x, y, used))
    assert_is(linear, *expected)
    assert ridge == penalty


def test_a_map_of_full_rank_is_dense() -> None:
    x, y, _ = rows()
    full, dense, two = (
        solve(LensConfig(rank=rank), moments_of(x, y), *tensors(x, y))[0] for rank in (D, None, 2)
    )
    assert full.right is None
    assert torch.equal(full.matrix, dense.matrix)
    assert {name: tuple(part.shape) for name, part in two.parts.items()} == {
        "weight": (D, 2), "right": (2, D),
    }  # fmt: skip


def test_the_map_of_low_rank_is_the_best_of_its_rank() -> None:
    x, y, _ = rows()
    best = solve(LensConfig(rank=2), moments_of(x, y), *tensors(x, y))[0].matrix.double().numpy()
    error = ((x @ best.T - y) ** 2).sum()
    generator = np.random.default_rng(3)
    left, right = np.linalg.svd(best)[0][:, :2], np.linalg.svd(best)[2][:2]
    for _ in range(50):  # of rank 2 again: near it, and with its best right factor for another left one
        near = left + 1e-3 * generator.normal(size=left.shape)
        basis = np.linalg.qr(near)[0]
        other = basis @ basis.T @ reference(x, y)[0]
        assert ((x @ other.T - y) ** 2).sum() >= error * (1 - 1e-9)
    assert np.linalg.matrix_rank(best, tol=1e-4) == 2
    assert right.shape == (2, D)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("toward", ["zero", "identity"])
def test_leaving_one_out_is_fitting_on_all_others(toward: Any, intercept: bool, weighted: bool) -> None:
    x, y, weights = rows(14)
    method = LensConfig(ridge="loo", toward=toward, intercept=intercept, weighted=weighted)
    used = weights if method.weighted else None
    shift = x if toward == "identity" else 0
    errors = leave_one_out(moments_of(x, y - shift, used), *tensors(x, y - shift, used), intercept=intercept)
    centre = np.average(x, 0, used) if method.intercept else 0
    unit = ((x - centre) ** 2 * (1 if used is None else used[:, None])).sum() / D
    counts = np.ones(len(x)) if used is None else used
    brute = np.zeros(len(STRENGTHS))
    for s, strength in enumerate(STRENGTHS):
        for i in range(len(x)):
            others = np.arange(len(x)) != i
            weight, bias = reference(
                x[others], y[others], weights=None if used is None else used[others],
                intercept=method.intercept, ridge=strength * unit, identity=method.toward == "identity",
            )  # fmt: skip
            brute[s] += counts[i] * ((weight @ x[i] + bias - y[i]) ** 2).sum()
    np.testing.assert_allclose(errors.numpy(), brute, rtol=2e-5)
    assert len(set(brute.round(6))) > len(STRENGTHS) // 2  # the strengths make a difference
    _, ridge = solve(method, moments_of(x, y, used), *tensors(x, y, used))
    assert ridge == STRENGTHS[int(brute.argmin())]


def test_keys_are_those_of_splitmix64() -> None:
    """Which rows leave-one-out looks at hangs on them, and moments of parts are merged by them."""

    def mixed(tokens: list[int], place: int) -> int:
        content = b"".join(token.to_bytes(8, "little") for token in tokens)
        z = int.from_bytes(blake2b(content, digest_size=8).digest(), "little")
        z = (z + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z >> 1

    sentences = [[5, 6, 7], [8], [300, 2, 70_000, 1]]
    examples = Examples(np.concatenate(sentences), np.array([0, 3, 4, 8]), np.array([1, 0, 3]), {})
    expected = [mixed(tokens, place) for tokens in sentences for place in range(len(tokens))]
    assert row_keys(examples, drawn=False).tolist() == expected
    assert row_keys(examples, drawn=True).tolist() == [expected[i] for i in (1, 3, 7)]


def test_leave_one_out_chooses_among_half_powers_of_ten() -> None:
    np.testing.assert_allclose(STRENGTHS, np.logspace(-10, 2, 25), rtol=1e-12)


# All layers

PRESETS = ["mat", "affine", "ridge", "ridge-identity", "weighted", "normed", "one-jump"]
METHODS = (
    *config.closed_forms(PRESETS).values(),
    LensConfig(rank=4), LensConfig(standardise=True, intercept=True, rank=5),
    LensConfig(weighted=True, ridge="loo"),
)  # fmt: skip
WITHOUT = tuple(
    LensConfig(sinks="exclude", **options)
    for options in ({}, {"ridge": "loo"}, {"weighted": True}, {"standardise": True}, {"shared_map": True})
)


@pytest.fixture(scope="module")
def model(small_model: Callable[[str], Any]) -> Any:
    """A model two of whose tokens are sinks."""
    return small_model("llama-sinks")


@pytest.fixture(scope="module")
def data(model: Any) -> Activations:
    """The stream at all tokens of forty sentences."""
    examples = matlens.make_examples(model, make_sentences())
    return matlens.collect(model, examples, positions="all", progress=False)


def assert_same(ours: Lens, theirs: Lens, tolerance: float = 1e-4) -> None:
    h = torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(1))
    assert ours.layers == theirs.layers
    for layer in ours.layers:
        assert_near(ours(h, layer), theirs(h, layer), tolerance)


def rows_of(data: Activations, name: str) -> torch.Tensor:
    return ~sink_rows(data) if "without" in name else torch.ones(data.n_rows, dtype=torch.bool)


def test_mat_is_the_set_of_maps_that_are_fitted_otherwise(model: Any, data: Activations) -> None:
    methods = ["mat", LensConfig(sinks="exclude"), "affine", LensConfig(intercept=True, sinks="exclude")]
    lenses = Lens.fit(model, data, method=methods)
    names = list(lenses)
    assert 0 < int(sink_rows(data).sum()) < data.n_rows // 4
    for name, lens in lenses.items():
        rows = rows_of(data, name)
        expected = MapSet.fit(data, rows=rows, intercept="affine" in name, progress=False)
        assert_same(lens, Lens.from_maps(expected))
        assert lens.n_samples == int(rows.sum())
        assert lens.method == name
    h = data[0][:9]
    assert not torch.allclose(lenses[names[0]](h, 0), lenses[names[1]](h, 0), rtol=1e-2)


def test_lenses_of_too_few_tokens_are_warned_of_once_but_not_with_a_ridge(
    model: Any, data: Activations, recwarn: pytest.WarningsRecorder
) -> None:
    def warnings_of(n: int, *methods: Method) -> list[str]:
        recwarn.clear()
        Lens.fit(model, data, method=methods, rows=torch.arange(data.n_rows) < n, progress=False)
        return [str(caught.message) for caught in recwarn if caught.category is matlens.InputWarning]

    warnings.simplefilter("always", matlens.InputWarning)
    for n in (D_MODEL - 1, D_MODEL + 4):
        (message,) = warnings_of(n, "mat", "affine", "normed", "one-jump", "id")
        assert f"{n}" in message
        assert not warnings_of(n, "ridge", LensConfig(ridge=0.1), "ridge-identity", "id")
    assert f"of {3 * N_LAYERS + 1} fits" in message  # one-jump is one fit for all layers
    assert not warnings_of(data.n_rows, "normed")
    recwarn.clear()
    Lens.fit(model, data.head(2), method="tuned", progress=False)
    assert [caught.category for caught in recwarn] == [matlens.InputWarning]


@pytest.mark.parametrize(
    "method",
    [
        "normed", "weighted", LensConfig(weighted=True, sinks="exclude"),
        LensConfig(standardise=True, intercept=True, sinks="exclude"),
    ],
)  # fmt: skip
def test_rows_are_weighed_and_standardised_as_defined(method: Method, model: Any, data: Activations) -> None:
    lens = Lens.fit(model, data, method=method)
    name = lens.method
    rows = rows_of(data, name).numpy()
    x, y = (data[layer].double().numpy()[rows] for layer in (1, N_LAYERS))
    if "normed" in name:
        eps = model.cfg.eps
        x, y = (v / np.sqrt((v**2).mean(1, keepdims=True) + eps) for v in (x, y))
        root = np.ones((len(x), 1))
    else:
        root = 1 / np.linalg.norm(y, axis=1, keepdims=True)
    design = np.hstack([x, np.ones((len(x), int("affine" in name)))])
    solution = np.linalg.lstsq(design * root, y * root, rcond=None)[0]
    linear = lens.maps[1]
    assert linear is not None
    assert_near(linear.matrix, torch.from_numpy(solution[:D_MODEL].T))
    if "affine" in name:
        assert_near(linear.parts["bias"], torch.from_numpy(solution[D_MODEL]))
    assert lens.norm == (Standardisation("rms", model.cfg.eps) if "normed" in name else None)


@pytest.mark.parametrize("options", [{}, {"sinks": "exclude"}, {"intercept": True}, {"rank": 3}])
def test_one_map_for_all_layers_is_the_fit_on_their_union(
    options: dict[str, Any], model: Any, data: Activations
) -> None:
    lens = Lens.fit(model, data, method=LensConfig(shared_map=True, **options))
    name = lens.method
    rows = rows_of(data, name).numpy()
    x = np.vstack([data[layer].double().numpy()[rows] for layer in range(N_LAYERS)])
    y = np.vstack([data[N_LAYERS].double().numpy()[rows]] * N_LAYERS)
    design = np.hstack([x, np.ones((len(x), int("affine" in name)))])
    solution = np.linalg.lstsq(design, y, rcond=None)[0]
    expected = solution[:D_MODEL].T
    if "narrow" in name:
        directions = np.linalg.svd(x @ expected.T, full_matrices=False)[2][:3]
        expected = directions.T @ directions @ expected
    assert_near(lens.matrix(2), torch.from_numpy(expected), 1e-4)
    assert lens.n_parameters == (6 if "narrow" in name else D_MODEL) * D_MODEL + D_MODEL * ("affine" in name)


def lens_of(moments: LensLeastSquares, method: Any) -> Lens:
    (maps,) = moments.solve(method).values()
    return Lens(**vars(maps))


def test_streamed_is_collected_and_parts_are_whole(
    model: Any, data: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = [*METHODS, *WITHOUT]
    whole = Lens.fit(model, data, method=methods)
    monkeypatch.setattr(closed_forms, "_CHUNK", 64)
    streamed = lens_least_squares(model, data.examples, methods, batch_tokens=60, progress=False)
    merged = LensLeastSquares(data.provenance, methods, norm=streamed.norm)
    for index in np.array_split(np.arange(data.n_rows), 8):
        merged.update(samples(data, merged, index))
    for method, expected in zip(methods, whole.values(), strict=True):
        of_parts = lens_of(merged, method)
        assert_same(lens_of(streamed, method), expected, 1e-3)
        assert_same(of_parts, expected, 1e-3)
        assert of_parts.n_samples == expected.n_samples
        strengths = of_parts.provenance.details.get("strengths")
        assert strengths == expected.provenance.details.get("strengths")


def samples(data: Activations, moments: LensLeastSquares, index: Any, weights: Any = None) -> Any:
    """Some of the samples, as an update takes them."""
    index = torch.as_tensor(index)
    keys = torch.from_numpy(row_keys(data.examples, drawn=False))[index]
    own = {"places": torch.from_numpy(data.places)[index], "keys": keys}
    of_rows = torch.ones(len(keys)).double() if weights is None else weights[index].double()
    return {site: data[site][index] for site in moments.sites} | own | {"weights": of_rows}


def some_rows(data: Activations) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).random(data.n_rows) < 0.7)


def test_rows_that_are_chosen_are_fitted_as_if_they_were_all(
    model: Any, data: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, methods = some_rows(data), [*METHODS, *WITHOUT]
    monkeypatch.setattr(closed_forms, "_CHUNK", 100)
    chosen = Lens.fit(model, data, method=methods, rows=rows)
    streamed = Lens.fit(model, data.examples, method=methods, rows=rows, batch_tokens=60, progress=False)
    moments = LensLeastSquares(data.provenance, methods, norm=chosen["normed"].norm)
    moments.update(samples(data, moments, rows.nonzero()[:, 0]))
    for method in methods:
        expected = lens_of(moments, method)
        for lens in (chosen[expected.method], streamed[expected.method]):
            assert_same(lens, expected, 1e-3)
            assert lens.n_samples == expected.n_samples
            details, others = lens.provenance.details, expected.provenance.details
            assert details.get("strengths") == others.get("strengths")
            assert "rows" in details
    whole = Lens.fit(model, data, method="mat")
    assert not torch.allclose(whole(data[1], 1), chosen["mat"](data[1], 1), rtol=1e-2)


def test_a_row_of_weight_two_is_two_rows_and_one_of_weight_zero_is_none(
    model: Any, data: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = [replace(method, ridge=0.1) if method.ridge == "loo" else method for method in METHODS]
    times = torch.from_numpy(np.random.default_rng(6).integers(0, 3, data.n_rows))
    monkeypatch.setattr(closed_forms, "_CHUNK", 100)
    lenses = Lens.fit(model, data, method=methods, weights=times.float())
    repeated = torch.arange(data.n_rows).repeat_interleave(times)
    moments = LensLeastSquares(data.provenance, methods, norm=lenses["normed"].norm)
    moments.update(samples(data, moments, repeated))
    for method, lens in zip(methods, lenses.values(), strict=True):
        assert_same(lens, lens_of(moments, method), 1e-3)
        assert lens.n_samples == int((times > 0).sum())
    both = Lens.fit(model, data, method="affine", weights=times.float(), rows=some_rows(data))
    expected = MapSet.fit(data, rows=some_rows(data), weights=times.float(), intercept=True, progress=False)
    assert_same(both, Lens.from_maps(expected))
    assert both.provenance.details["weights"] != lenses["affine"].provenance.details["weights"]


def test_leave_one_out_looks_at_the_rows_of_least_keys(
    model: Any, data: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_forms, "_HELD_OUT", 30)
    monkeypatch.setattr(closed_forms, "_CHUNK", 50)
    moments = lens_least_squares(model, data, ["ridge", LensConfig(sinks="exclude")], progress=False)
    lens = lens_of(moments, "ridge")
    keys = row_keys(data.examples, drawn=False)
    clear = moments._held_out["keys"].tolist()
    aside = moments._aside["keys"].tolist()
    assert sorted([*clear, *aside])[:30] == sorted(keys.tolist())[:30]
    assert len(lens.provenance.details["strengths"]) == N_LAYERS


def test_drawn_positions_and_chosen_layers(model: Any, small_model: Callable[[str], Any]) -> None:
    bert = small_model("bert")
    examples = matlens.make_examples(bert, make_sentences())
    lens = Lens.fit(
        bert, examples, method=LensConfig(ridge=0.1), positions="drawn", layers=[-2], progress=False
    )
    drawn = matlens.collect(bert, examples, progress=False)
    x, y = (drawn[layer].double() for layer in (2, 3))
    ridge = 0.1 * x.square().sum() / D_MODEL
    expected = torch.linalg.solve(x.T @ x + ridge * torch.eye(D_MODEL), x.T @ y).T
    assert lens.layers == (2,)
    assert_near(lens.matrix(2), expected.float())
    assert lens.provenance.positions == "drawn"
    corpus = Lens.fit(model, make_sentences(), method="id")
    assert set(corpus.maps.values()) == {None}
    assert corpus.trajectory("w3 w4").layers == (0, 1, 2, 3)


@pytest.mark.refused
def test_what_cannot_be_fitted_is_refused(
    model: Any, data: Activations, small_model: Callable[[str], Any]
) -> None:
    with pytest.raises(InputError, match="do not belong together"):
        Lens.fit(small_model("llama"), data)
    with pytest.raises(InputError, match="does not begin with RMSNorm or LayerNorm"):
        Lens.fit(small_model("bert"), data, method="normed")
    with pytest.raises(InputError, match="method must be one of"):
        Lens.fit(model, data, method="best")
    some = matlens.collect(model, data.examples.head(3), [1, 3], progress=False)
    with pytest.raises(InputError, match=r"lack h\.0, h\.2"):
        Lens.fit(model, some)
    assert Lens.fit(model, some, layers=[1], method=LensConfig(ridge=1.0)).layers == (1,)
    with pytest.raises(InputError, match=r"lack h\.0, h\.2"):
        Lens.fit(model, some, layers=[1], method=LensConfig(sinks="exclude"))
    with pytest.raises(InputError, match="must have one or more of 0 to 2"):
        Lens.fit(model, data, layers=[3])
    with pytest.raises(InputError, match="rows must have a value"):
        Lens.fit(model, data, rows=torch.ones(3, dtype=torch.bool))
    with pytest.raises(InputError, match="select at least one sample"):
        Lens.fit(model, data.examples, weights=torch.zeros(data.n_rows))
    with pytest.raises(InputError, match="trained lenses take neither"):
        Lens.fit(model, data, method=["mat", "tuned"], rows=torch.ones(data.n_rows, dtype=torch.bool))
    moments = LensLeastSquares(data.provenance, "mat")
    with pytest.raises(InputError, match="at least one sample"):
        moments.solve("mat")
    with pytest.raises(InputError, match="methods must be of"):
        moments.solve("affine")
    with pytest.raises(InputError, match="needs a norm"):
        LensLeastSquares(data.provenance, "normed")
    given = samples(data, moments, range(4))
    with pytest.raises(InputError, match=r"^weights must be"):
        moments.update(given | {"weights": torch.tensor([1.0, 1.0, 1.0, -1.0])})
    with pytest.raises(InputError, match="not finite"):
        moments.update(given | {"h.1": torch.full((4, D_MODEL), float("nan"))})


def test_a_sink_that_was_not_kept_aside_is_not_passed_over(data: Activations) -> None:
    moments = LensLeastSquares(data.provenance, LensConfig(sinks="exclude"))
    for size, n in ((1000.0, 2000), (1.0, 6000)):
        rows = {site: torch.full((n, D_MODEL), size) for site in moments.sites}
        ones = torch.ones(n)
        moments.update(rows | {"places": ones.long(), "keys": ones.long(), "weights": ones.double()})
    with pytest.raises(InputError, match="mixed order"):
        moments.solve(LensConfig(sinks="exclude"))


def test_a_map_of_standardized_vectors_is_not_patched_in_alone(model: Any, data: Activations) -> None:
    lens = Lens.fit(model, data, method="normed+affine")
    with pytest.raises(InputError, match="standardised"), matlens.patched(model, [lens.maps[1]]):
        pass


def test_norms_are_kept_only_where_sinks_are_excluded(data: Activations) -> None:
    for method, n in (("mat", 0), (LensConfig(sinks="exclude"), data.n_rows)):
        statistics = LensLeastSquares(data.provenance, method)
        statistics.update(samples(data, statistics, range(data.n_rows)))
        assert sum(len(part["norms"]) for part in statistics._seen) == n
