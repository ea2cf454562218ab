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
from conftest import D_MODEL, N_LAYERS, make_sentences

import matlens
from matlens import InputError, Lens
from matlens.activations.activations import Activations
from matlens.activations.sinks import sink_rows
from matlens.data.examples import Examples
from matlens.lens import closed_forms
from matlens.lens.closed_forms import STRENGTHS, leave_one_out, row_keys, solve
from matlens.lens.config import LensConfig, Method
from matlens.lens.maps import Standardisation
from matlens.linear.least_squares import LeastSquares

Models = Callable[[str], Any]


def reference(x: np.ndarray, y: np.ndarray, weights: np.ndarray, config: LensConfig) -> tuple[Any, Any]:
    """Weight and bias by least squares on stacked rows, the penalty as further rows of data."""
    d = x.shape[1]
    center = np.average(x, 0, weights) if config.intercept else np.zeros(d)
    roots = np.sqrt(weights)[:, None]
    penalty = float(config.ridge) * (((x - center) * roots) ** 2).sum() / d
    design = np.hstack([x, np.ones((len(x), int(config.intercept)))]) * roots
    rows = np.sqrt(penalty) * np.eye(d, design.shape[1])
    pulled = np.sqrt(penalty) * np.eye(d) * (config.toward == "identity")
    solution = np.linalg.lstsq(np.vstack([design, rows]), np.vstack([y * roots, pulled]), rcond=None)[0]
    weight, bias = solution[:d].T, solution[d] if config.intercept else np.zeros(d)
    if config.rank is not None:
        directions = np.linalg.svd((x - center) @ weight.T * roots, full_matrices=False)[2][: config.rank]
        projection = directions.T @ directions
        bias = (bias + weight @ center) - projection @ weight @ center if config.intercept else bias
        weight = projection @ weight
    return weight, bias


# One layer

D, N = 6, 40


def samples_of_one_layer(n: int = N) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As streams have them: means far from zero, and dimensions a thousand times larger than others."""
    generator = np.random.default_rng(0)
    scales = np.array([1000.0, 30.0, 1.0, 1.0, 0.5, 0.1])
    x = (generator.normal(size=(n, D)) + 2) * scales
    y = x @ generator.normal(size=(D, D)) * 0.3 + x + 5 * generator.normal(size=(n, D)) + 3
    return x, y, generator.uniform(0.2, 3, n)


def sums_of(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> LeastSquares:
    sums = LeastSquares(D, D)
    for part in (slice(0, 7), slice(7, None)):
        sums.update(*(torch.from_numpy(of[part]) for of in (x, y)), weights=torch.from_numpy(weights[part]))
    return sums


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"rank": 2}, {"ridge": 0.01}, {"ridge": 0.01, "toward": "identity"}], ids=str
)
def test_closed_forms_are_least_squares_on_weighted_samples(options, intercept):
    x, y, weights = samples_of_one_layer()
    config = LensConfig(intercept=intercept, **options)
    weight, bias = reference(x, y, weights, config)
    linear, ridge = solve(config, sums_of(x, y, weights), *map(torch.from_numpy, (x, y, weights)))
    np.testing.assert_allclose(linear.matrix, weight, rtol=2e-5, atol=1e-5 * np.abs(weight).max())
    assert ridge == config.ridge
    assert (linear.bias is not None) == intercept
    if linear.bias is not None:
        np.testing.assert_allclose(linear.bias, bias, rtol=1e-4, atol=1e-5 * np.abs(bias).max())
    if config.rank is not None:
        assert {name: part.shape for name, part in linear.parts.items() if name != "bias"} == {
            "weight": (D, 2), "right": (2, D)
        }  # fmt: skip
        full, _ = solve(
            replace(config, rank=D), sums_of(x, y, weights), *map(torch.from_numpy, (x, y, weights))
        )
        assert full.right is None


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("toward", ["zero", "identity"])
def test_leaving_one_out_is_fitting_on_all_others(toward, intercept):
    x, y, weights = samples_of_one_layer(14)
    shifted = y - x if toward == "identity" else y
    sums, config = sums_of(x, shifted, weights), LensConfig(ridge="loo", toward=toward, intercept=intercept)
    errors = leave_one_out(sums, *map(torch.from_numpy, (x, shifted, weights)), intercept=intercept)
    center = np.average(x, 0, weights) if intercept else 0
    unit = ((x - center) ** 2 * weights[:, None]).sum()
    brute = np.zeros(len(STRENGTHS))
    for i in range(len(x)):
        others = np.arange(len(x)) != i
        center = np.average(x[others], 0, weights[others]) * intercept
        of_others = ((x - center) ** 2 * weights[:, None])[others].sum()
        for s, strength in enumerate(STRENGTHS):  # the same penalty as of all samples
            same = replace(config, ridge=strength * unit / of_others)
            weight, bias = reference(x[others], y[others], weights[others], same)
            brute[s] += weights[i] * ((weight @ x[i] + bias - y[i]) ** 2).sum()
    np.testing.assert_allclose(errors.numpy(), brute, rtol=2e-5)
    assert len(set(brute.round(6))) > len(STRENGTHS) // 2  # the strengths make a difference
    _, ridge = solve(config, sums_of(x, y, weights), *map(torch.from_numpy, (x, y, weights)))
    assert ridge == STRENGTHS[int(brute.argmin())]
    np.testing.assert_allclose(STRENGTHS, np.logspace(-10, 2, 25), rtol=1e-12)


def test_keys_are_those_of_splitmix64():
    """They decide which samples leave-one-out looks at."""

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
    assert row_keys(examples.at_positions("all")).tolist() == expected
    assert row_keys(examples).tolist() == [expected[i] for i in (1, 3, 7)]


# All layers

CONFIGS = [
    LensConfig(**options)
    for options in (
        {}, {"intercept": True}, {"ridge": 0.1}, {"ridge": "loo", "toward": "identity"},
        {"weighted": True, "ridge": "loo"}, {"standardise": True, "intercept": True, "rank": 5},
        {"shared_map": True}, {"sinks": "exclude", "ridge": "loo", "intercept": True},
        {"sinks": "exclude", "weighted": True}, {"sinks": "exclude", "standardise": True},
        {"sinks": "exclude", "shared_map": True, "rank": 3},
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def model(small_model):
    """A model two of whose tokens are sinks."""
    return small_model("llama-sinks")


@pytest.fixture(scope="module")
def data(model):
    """The stream at all tokens of forty sentences."""
    examples = matlens.make_examples(model, make_sentences())
    return matlens.collect(model, examples, positions="all", progress=False)


def check_against_reference(lens: Lens, config: LensConfig, data: Activations, weights: np.ndarray) -> None:
    sinks, last = sink_rows(data).numpy(), data[N_LAYERS].double().numpy()
    used = (weights > 0) & (~sinks if config.sinks == "exclude" else True)
    eps = float(lens.norm.eps) if lens.norm is not None else 0.0

    def entering(v: np.ndarray) -> np.ndarray:
        return v / np.sqrt((v**2).mean(1, keepdims=True) + eps) if config.standardise else v

    counts = weights / (last**2).sum(1) if config.weighted else weights
    assert lens.n_samples == used.sum()
    assert lens.method == config.name
    for group in [range(N_LAYERS)] if config.shared_map else [[layer] for layer in range(N_LAYERS)]:
        x = np.vstack([entering(data[layer].double().numpy())[used] for layer in group])
        y, w = np.vstack([entering(last)[used]] * len(group)), np.tile(counts[used], len(group))
        for layer in group:
            strengths = lens.provenance.details.get("strengths", {})
            fixed = replace(config, ridge=strengths.get(str(layer), config.ridge))
            weight, bias = reference(x, y, w, fixed)
            h = data[layer].double().numpy()[~sinks]
            expected = entering(h) @ weight.T + bias
            error = np.linalg.norm(lens(data[layer], layer).numpy()[~sinks] - expected)
            assert error < 2e-3 * np.linalg.norm(expected), (config, layer)


def test_all_layers_are_those_of_the_reference_collected_or_streamed_with_weights(model, data, monkeypatch):
    """A sample of weight two is two samples, and one of weight zero or that is not selected is none."""
    generator, n_sinks = np.random.default_rng(6), int(sink_rows(data).sum())
    weights, rows = generator.integers(0, 3, data.n_rows), generator.random(data.n_rows) < 0.8
    assert 0 < n_sinks < data.n_rows // 4
    collected = Lens.fit(model, data, method=CONFIGS)
    monkeypatch.setattr(closed_forms, "_CHUNK", 64)
    options: dict[str, Any] = {
        "weights": torch.from_numpy(weights).float(), "rows": torch.from_numpy(rows), "progress": False
    }  # fmt: skip
    streamed = Lens.fit(model, data.examples, method=CONFIGS, batch_tokens=60, **options)
    for config in CONFIGS:
        check_against_reference(collected[config.name], config, data, np.ones(data.n_rows))
        check_against_reference(streamed[config.name], config, data, weights * rows)
        details = collected[config.name].provenance.details
        assert details.get("n_sinks") == (n_sinks if config.sinks == "exclude" else None)
    shared, standardised = collected["shared_map"], collected["standardise+sinks=exclude"]
    assert shared.n_parameters == D_MODEL**2
    assert shared.maps[1] is not None
    assert shared.maps[1].source == "h.1"
    assert standardised.norm == Standardisation("rms", model.cfg.eps)
    with pytest.raises(InputError, match="standardised"):
        matlens.patched(model, [standardised.maps[1]]).__enter__()
    unweighted = Lens.fit(model, data, method="mat", rows=options["rows"], layers=[1])
    assert unweighted.provenance.details["rows"] != streamed["mat"].provenance.details["rows"]
    assert "weights" not in unweighted.provenance.details


def test_leave_one_out_looks_at_the_samples_with_the_smallest_keys(model, data, monkeypatch):
    monkeypatch.setattr(closed_forms, "_HELD_OUT", 150)
    monkeypatch.setattr(closed_forms, "_CHUNK", 50)
    seen: list[list[float]] = []

    def noted(config: LensConfig, sums: LeastSquares, x: torch.Tensor, *rest: Any) -> Any:
        seen.append(sorted(x[:, 0].tolist()))
        return solve(config, sums, x, *rest)

    monkeypatch.setattr(closed_forms, "solve", noted)
    configs = [LensConfig(ridge="loo"), LensConfig(ridge="loo", sinks="exclude")]
    Lens.fit(model, data.examples, method=configs, layers=[1], batch_tokens=60, progress=False)
    keys, sinks = row_keys(data.examples.at_positions("all")), sink_rows(data).numpy()
    for ours, allowed in zip(seen, (keys >= 0, ~sinks), strict=True):
        smallest = np.argsort(np.where(allowed, keys, np.iinfo(np.int64).max))[:150]
        assert ours == pytest.approx(sorted(data[1][smallest, 0].double().tolist()), rel=1e-4)
    assert seen[0] != pytest.approx(seen[1], rel=1e-4)


def test_lenses_of_too_few_tokens_are_warned_of_once_but_not_with_a_ridge(model, data, recwarn):
    def warnings_of(n: int, *methods: Method) -> list[str]:
        recwarn.clear()
        Lens.fit(model, data, method=methods, rows=torch.arange(data.n_rows) < n, progress=False)
        return [str(caught.message) for caught in recwarn if caught.category is matlens.InputWarning]

    warnings.simplefilter("always", matlens.InputWarning)
    standardised, shared = LensConfig(standardise=True), LensConfig(shared_map=True)
    for n in (D_MODEL - 1, D_MODEL + 4):
        (message,) = warnings_of(n, "mat", "affine", standardised, shared, "id")
        assert f"{n}" in message
        assert not warnings_of(n, LensConfig(ridge="loo"), LensConfig(ridge=0.1), "id")
    # A shared map has the samples of all layers.
    assert not warnings_of(D_MODEL + 4, shared)
    assert not warnings_of(data.n_rows, standardised)
    recwarn.clear()
    Lens.fit(model, data.head(2), method="tuned", progress=False)
    assert [caught.category for caught in recwarn] == [matlens.InputWarning]


@pytest.mark.refused
def test_what_cannot_be_fitted_is_refused(model, data, small_model):
    with pytest.raises(InputError, match="do not belong together"):
        Lens.fit(small_model("llama"), data)
    with pytest.raises(InputError, match="does not begin with RMSNorm or LayerNorm"):
        Lens.fit(small_model("bert"), data.examples, method=LensConfig(standardise=True))
    some = matlens.collect(model, data.examples.head(3), [1, 3], progress=False)
    with pytest.raises(InputError, match=r"lack h\.0, h\.2"):
        Lens.fit(model, some)
    assert Lens.fit(model, some, layers=[1], method=LensConfig(ridge=1.0)).layers == (1,)
    with pytest.raises(InputError, match=r"lack h\.0, h\.2"):
        Lens.fit(model, some, layers=[1], method=LensConfig(sinks="exclude"))
    with pytest.raises(InputError, match="layers must be between 0 and 2"):
        Lens.fit(model, data, layers=[3])
    with pytest.raises(InputError, match="select at least one sample"):
        Lens.fit(model, data.examples, weights=torch.zeros(data.n_rows))
    with pytest.raises(InputError, match="None for trained lenses"):
        Lens.fit(model, data, method=["mat", "tuned"], rows=torch.ones(data.n_rows, dtype=torch.bool))
