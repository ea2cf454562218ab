"""Closed forms are NumPy's in float64 from all samples at once; trained lenses take the steps written out."""

from __future__ import annotations

import warnings
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, WORDS, make_sentences, save_with_ends
from sentences import corpus_of
from small_lenses import linear, numbers
from torch import Tensor

import matlens
from matlens import InputError, Lens, LensConfig, Readout
from matlens.activations.activations import Activations
from matlens.activations.sinks import sink_rows
from matlens.data.examples import Examples
from matlens.lens import closed_forms
from matlens.lens.closed_forms import STRENGTHS, leave_one_out, row_keys, solve
from matlens.lens.comparison import compare_lenses, default_methods
from matlens.lens.config import parse_methods
from matlens.lens.maps import Standardisation
from matlens.lens.trained import (
    LayerTraining,
    best_start,
    divergence,
    draw_tokens,
    fit_jacobian,
    passes_for,
    steps_for,
    token_chances,
)
from matlens.linear.least_squares import LeastSquares


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
    warnings.simplefilter("always", matlens.InputWarning)
    shared, rows = LensConfig(shared_map=True), torch.arange(data.n_rows) < D_MODEL + 4
    for methods, n in ((["mat", "affine", shared], 1), ([LensConfig(ridge="loo"), "id"], 0), ([shared], 0)):
        recwarn.clear()  # a shared map has the samples of all layers
        Lens.fit(model, data, method=methods, rows=rows, progress=False)
        assert [caught.category for caught in recwarn] == n * [matlens.InputWarning]
    recwarn.clear()
    Lens.fit(model, data.head(2), method="tuned", progress=False)
    assert [caught.category for caught in recwarn] == [matlens.InputWarning]


@pytest.mark.refused
def test_what_cannot_be_fitted_is_refused(model, data, small_model):
    with pytest.raises(InputError):
        Lens.fit(small_model("llama"), data)
    with pytest.raises(InputError, match="does not begin with RMSNorm or LayerNorm"):
        Lens.fit(small_model("bert"), data.examples, method=LensConfig(standardise=True))
    some = matlens.collect(model, data.examples.head(3), [1, 3], progress=False)
    with pytest.raises(InputError, match=r"lack h\.0, h\.2"):
        Lens.fit(model, some, layers=[1], method=LensConfig(sinks="exclude"))
    with pytest.raises(InputError, match="select at least one sample"):
        Lens.fit(model, data.examples, weights=torch.zeros(data.n_rows))
    with pytest.raises(InputError, match="None for trained lenses"):
        Lens.fit(model, data, method=["mat", "tuned"], rows=torch.ones(data.n_rows, dtype=torch.bool))


# One layer


def pairs(n: int = 400) -> tuple[Tensor, Tensor]:
    """``h^l``, and an ``h^L`` that is a map of it and noise."""
    h = numbers(n, D_MODEL)
    return h, h @ numbers(D_MODEL, D_MODEL, seed=1) / 4 + 0.5 * numbers(n, D_MODEL, seed=2)


def mean_divergence(
    readout: Readout, weight: Tensor, h: Tensor, last: Tensor, *, norm: Any = None, bias: Any = 0,
    scale: Any = 1
) -> float:  # fmt: skip
    """By NumPy in float64, from the model's own scores."""
    p = readout.logits(last).double().numpy()
    q = readout.logits((h if norm is None else norm(h)) @ weight.T + bias).double().numpy() * float(scale)
    p, q = (s - np.log(np.exp(s - s.max(1, keepdims=True)).sum(1, keepdims=True)) - s.max(1, keepdims=True)
            for s in (p, q))  # fmt: skip
    return float((np.exp(p) * (p - q)).sum(1).mean())


def test_tokens_are_sampled_by_their_weights_and_meet_the_normaliser_without_bias():
    weights = torch.tensor([100.0, 8.0, 4.0, 4.0, 2.0, 0.0, 0.0, 2.0])
    chances = token_chances(weights, 4)
    assert chances[0] == 1
    assert float(chances.sum()) == pytest.approx(4, rel=1e-4)
    assert bool((chances > 0).all())
    assert float(chances[2] / chances[4]) == pytest.approx(2, rel=0.02)
    torch.testing.assert_close(token_chances(weights, 8), torch.ones(8))
    scores, generator = 2 * numbers(40), torch.Generator().manual_seed(0)
    chances, sums, counts = token_chances(scores.softmax(0).sqrt(), 12), [], torch.zeros(40)
    for _ in range(3000):
        tokens, offset = draw_tokens(chances, generator)
        counts[tokens] += 1
        torch.testing.assert_close(offset, chances[tokens].log())
        sums.append(float((scores[tokens] - offset).exp().sum()))
    assert bool(((counts / 3000 - chances).abs() < 0.04).all())
    exact = float(scores.exp().sum())
    assert np.mean(sums) == pytest.approx(exact, abs=4 * np.std(sums) / 3000**0.5)
    assert np.mean(sums) != pytest.approx(exact * 12 / 40, rel=0.2)


@pytest.mark.parametrize("name", ["bert", "gemma2", "granite"])
def test_scores_of_some_tokens_are_those_of_all(name, small_model):
    readout = Readout(small_model(name))
    h, tokens = numbers(6, D_MODEL), torch.tensor([40, 3, 17])
    everything = readout.logits(h)
    torch.testing.assert_close(readout.logits(h, gradients=True), everything)
    torch.testing.assert_close(readout.logits(h, tokens=tokens), everything[:, tokens])
    moving = h.clone().requires_grad_()
    readout.logits(moving, tokens=tokens, gradients=True)[0, 1].backward()
    step = torch.zeros_like(h)
    step[0, 2] = 1e-2
    slope = (readout.logits(h + step) - readout.logits(h - step))[0, 3] / 2e-2
    assert moving.grad is not None
    assert float(moving.grad[0, 2]) == pytest.approx(float(slope), rel=0.02, abs=1e-5)
    assert all(weight.grad is None for weight in small_model(name).parameters())


@pytest.mark.parametrize(("name", "standardised"), [("llama", True), ("bert", False)])
def test_polishing_makes_the_divergence_less_on_other_samples(name, standardised, small_model):
    model = small_model(name)
    readout, (h, last) = Readout(model), pairs()
    norm = Standardisation.from_model(model) if standardised else None
    weight = 0.3 * numbers(D_MODEL, D_MODEL, seed=5)

    def polished(rate: float) -> dict[str, Tensor]:
        training = LayerTraining(readout, h[:300], last[:300], start=linear(1, weight), norm=norm)
        training.polish(steps=30, batch=20, tokens=30, rate=rate)
        return training.result()

    made = polished(0.1)
    before = mean_divergence(readout, weight, h[300:], last[300:], norm=norm)
    after = mean_divergence(readout, h=h[300:], last=last[300:], norm=norm, **made)
    assert after < 0.7 * before
    torch.testing.assert_close(polished(0.1)["weight"], made["weight"], rtol=0, atol=0)
    torch.testing.assert_close(polished(0.0)["weight"], weight)
    # Scores that are right but for a factor of two lose it, at most a hundredth of it at a step.
    training = LayerTraining(readout, last, last, start=linear(1, torch.eye(D_MODEL)), scale=2.0)
    training.polish(steps=60, batch=20, tokens=30, rate=0.0)
    assert 1 < training.result()["scale"] < 1.7


def test_a_step_of_polishing_has_the_singular_vectors_of_the_gradient(small_model):
    """All tokens are sampled, so the gradient is that of the exact divergence."""
    readout, (h, last) = Readout(small_model("llama")), pairs(32)
    weight = 0.3 * numbers(D_MODEL, D_MODEL, seed=5)
    training = LayerTraining(readout, h, last, start=linear(1, weight))
    training.polish(steps=1, batch=32, tokens=60, rate=0.1)
    moving = weight.clone().requires_grad_()
    q, p = readout.logits(h @ moving.T, gradients=True).log_softmax(1), readout.log_probs(last)
    (p.exp() * (p - q)).sum(1).mean().backward()
    u, _, vh = torch.linalg.svd(moving.grad)
    singular = torch.diag(u.T @ (weight - training.result()["weight"]) @ vh.T) / 0.1
    # Newton-Schulz brings singular values near 1, except those that are tiny against the largest.
    assert bool(((singular > -0.01) & (singular < 1.25)).all())
    assert int((singular > 0.6).sum()) > D_MODEL // 3


def test_refinement_takes_the_steps_of_nesterovs_momentum(small_model):
    """Written out; all tokens are sampled, so that the gradients are those of the exact divergence."""
    readout, (h, last) = Readout(small_model("llama")), pairs(48)
    weight, rate, n_steps = 0.3 * numbers(D_MODEL, D_MODEL, seed=5), 0.1, 3
    training = LayerTraining(readout, h, last, start=linear(1, weight), seed=4)
    training.polish(steps=n_steps, batch=16, tokens=60, rate=rate)
    generator = torch.Generator().manual_seed(4)
    torch.randperm(len(h), generator=generator)  # the samples that the tokens' chances are from
    batches = torch.randperm(len(h), generator=generator).split(16)
    parts = [weight.clone(), torch.zeros(D_MODEL), torch.zeros(())]
    momentum, adam = torch.zeros_like(weight), torch.optim.Adam
    optimizers = [adam([parts[1]], lr=1e-3), adam([parts[2]], lr=1e-2)]
    for step, rows in enumerate(batches):
        moving = [part.clone().requires_grad_() for part in parts]
        scores = moving[2].exp() * readout.logits(h[rows] @ moving[0].T + moving[1], gradients=True)
        p = readout.log_probs(last[rows])
        gradient, *others = torch.autograd.grad((p.exp() * (p - scores.log_softmax(1))).sum(1).mean(), moving)
        left = 1 - step / n_steps
        momentum = 0.9 * momentum + gradient
        u, s, vh = torch.linalg.svd((gradient + 0.9 * momentum).double())
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        parts[0] = parts[0] - rate * left * (u @ s.diag() @ vh).float()
        for optimizer, part, slope, full in zip(optimizers, parts[1:], others, (1e-3, 1e-2), strict=True):
            optimizer.param_groups[0]["lr"], part.grad = full * left, slope
            optimizer.step()
    made = training.result()
    assert float((made["weight"] - parts[0]).abs().max()) < 0.02 * rate
    torch.testing.assert_close(made["bias"], parts[1], rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(made["scale"], parts[2].exp(), rtol=1e-4, atol=0)


def test_sampled_tokens_are_reweighted_in_both_distributions():
    """Equal scores have no divergence, and the mean over samples is near that of all tokens."""
    p, q, generator = 2 * numbers(5, 400), 2 * numbers(5, 400, seed=1), torch.Generator().manual_seed(0)
    chances = token_chances((p.softmax(1) + q.softmax(1)).square().sum(0).sqrt(), 150)
    exact, found = divergence(q, p), []
    for _ in range(200):
        tokens, offset = draw_tokens(chances, generator)
        assert len(tokens) < 200
        of_equal = divergence(p[:, tokens], p[:, tokens], offset)
        torch.testing.assert_close(of_equal, torch.zeros(5), rtol=0, atol=1e-6)
        found.append(divergence(q[:, tokens], p[:, tokens], offset))
    torch.testing.assert_close(torch.stack(found).mean(0), exact, rtol=0.05, atol=0)


def test_the_scale_is_the_best_of_those_tried(small_model):
    readout, (h, last) = Readout(small_model("llama")), pairs(200)
    weight = numbers(D_MODEL, D_MODEL, seed=7)
    scales = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    losses = [mean_divergence(readout, weight, h, last, scale=scale) for scale in scales]
    training = LayerTraining(readout, h, last, start=linear(1, weight))
    training.rescale()
    assert float(training.result()["scale"]) == pytest.approx(scales[int(np.argmin(losses))])
    assert training.result()["scale"] < 1
    torch.testing.assert_close(training.result()["weight"], weight)


@pytest.mark.parametrize(("steps", "batch"), [(2, None), (3, 8)])
def test_tuning_takes_the_steps_of_the_recipe(small_model, steps, batch):
    """Steps written out: Nesterov's momentum, decay of weights, bounded gradients, falling rate."""
    readout, (h, last) = Readout(small_model("llama")), pairs(8)
    training = LayerTraining(readout, h, last, seed=3)
    training.tune(steps=steps, rate=4.0, batch=batch)
    tuned = training.result()

    def gradients(a: Tensor, b: Tensor) -> list[Tensor]:
        parts = [part.clone().requires_grad_() for part in (a, b)]
        scores = readout.logits(h + h @ parts[0].T + parts[1], gradients=True)
        p = readout.log_probs(last)
        loss = (p.exp() * (p - scores.log_softmax(1))).sum(1).mean()
        found = torch.autograd.grad(loss, parts)
        norm = torch.sqrt(torch.stack([g.square().sum() for g in found]).sum())
        return [g / norm.clamp(min=1) + 1e-3 * part.detach() for g, part in zip(found, parts, strict=True)]

    parts = [torch.zeros(D_MODEL, D_MODEL), torch.zeros(D_MODEL)]
    momenta = None
    for rate in np.linspace(0.4, 0, steps + 1)[:-1]:
        step = gradients(*parts)
        momenta = step if momenta is None else [0.9 * m + g for m, g in zip(momenta, step, strict=True)]
        parts = [part - rate * (g + 0.9 * m) for part, g, m in zip(parts, step, momenta, strict=True)]
    torch.testing.assert_close(tuned["weight"], parts[0] + torch.eye(D_MODEL), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(tuned["bias"], parts[1], rtol=1e-4, atol=1e-6)
    assert tuned["scale"] == 1


# All layers


@pytest.fixture(scope="module")
def corpus():
    return make_sentences().split(n_train=12, n_validation=2)[0]


@pytest.mark.refused
def test_what_cannot_be_trained_is_refused(small_model, corpus):
    model = small_model("llama")
    readout, (h, last) = Readout(model), pairs(20)
    training = LayerTraining(readout, h, last)
    training.polish(rate=1e39)
    with pytest.raises(InputError, match="diverged"):
        training.result()
    few = matlens.collect(model, matlens.make_examples(model, corpus), [1], progress=False)
    with pytest.raises(InputError):
        Lens.fit(small_model("gpt2"), few, method="tuned")
    with pytest.raises(InputError, match="lack"):
        Lens.fit(model, few, method="tuned")


# Jacobians


def test_it_is_the_mean_over_sources_of_the_sum_over_later_targets(small_model):
    model, text = small_model("gpt2"), " ".join(WORDS[3:12])
    lens = fit_jacobian(model, corpus_of([text, "w1 w2"]), layers=[0, 2], skip=1, progress=False)
    assert list(lens.maps) == [2]
    assert lens.maps[2].parts.keys() == {"weight"}
    tokens = model.to_tokens(text)

    def onward(h: torch.Tensor) -> torch.Tensor:
        out = []
        model.run_with_hooks(
            tokens,
            fwd_hooks=[
                ("blocks.1.hook_out", lambda value, hook: h[None]),
                (f"blocks.{model.cfg.n_layers - 1}.hook_out", lambda value, hook: out.append(value[0])),
            ],
        )
        return out[0]

    stream = []
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_out", lambda v, hook: stream.append(v[0]))])
    whole = torch.autograd.functional.jacobian(onward, stream[0].clone())
    n = len(stream[0])
    counted = range(1, n - 1)  # neither the first, which is skipped, nor the last
    expected = sum(whole[t, :, s] for s in counted for t in counted if t >= s) / len(counted)
    torch.testing.assert_close(lens.matrix(2), expected, rtol=1e-3, atol=1e-5)
    assert lens.provenance.details["n_fitted"] == 1  # the second text is too short
    assert lens.provenance.details["n_tokens"] == n


def test_a_jacobian_lens_reads_one_bos(tmp_path):
    model, text = matlens.load(save_with_ends(tmp_path, front=True), device="cpu"), " ".join(WORDS[3:12])
    one, two = (
        fit_jacobian(model, corpus_of([given]), layers=[2], skip=1, progress=False)
        for given in (text, f"w49 {text}")
    )
    assert one.provenance.details["n_tokens"] == two.provenance.details["n_tokens"] == 10
    torch.testing.assert_close(one.matrix(2), two.matrix(2), rtol=0, atol=0)


def test_a_jacobian_lens_is_taken_on_the_longest_sentences(small_model):
    model, corpus = small_model("llama"), make_sentences()
    lens = Lens.fit(model, corpus, method="jacobian", layers=[2], n_prompts=2, longest=20, progress=False)
    longest = sorted(corpus.sentences, key=lambda text: (-len(text.split()), text))[:2]
    two = replace(corpus, sentences=tuple(longest))
    torch.testing.assert_close(
        lens.matrix(2), fit_jacobian(model, two, layers=[2], longest=20, progress=False).matrix(2)
    )
    assert lens.provenance.corpus == "words"
    assert lens.provenance.details["longest"] == 20


def test_a_corpus_gives_every_method_what_its_vectors_give(small_model, corpus, tmp_path):
    model, names = small_model("llama"), ["tuned", "mat", "polished", "scaled"]
    lenses = Lens.fit(model, corpus, method=names, layers=[1], folder=tmp_path / "rows", progress=False)
    assert (tmp_path / "rows" / "config.json").exists()
    rows = matlens.collect(model, matlens.make_examples(model, corpus), positions="all", progress=False)
    readout, h, last = Readout(model), rows[1], rows[N_LAYERS]
    start = Lens.fit(model, rows, method=LensConfig(standardise=True, intercept=True), progress=False)
    mat = Lens.fit(model, rows, method="mat", progress=False)
    expected = {"mat": {"weight": mat.matrix(1), "scale": 1}}
    for name, way in (("polished", "polish"), ("scaled", "rescale"), ("tuned", "tune")):
        options = {} if name == "tuned" else {"start": start.maps[1], "norm": start.norm}
        training = LayerTraining(readout, h, last, **options)
        getattr(training, way)()
        expected[name] = training.result()
    assert list(lenses) == names
    for name, parts in expected.items():
        ours = lenses[name]
        torch.testing.assert_close(ours.matrix(1), parts["weight"], rtol=1e-3, atol=1e-4)
        assert ours.scales.get(1, 1) == pytest.approx(float(parts["scale"]), rel=1e-3)
        assert (ours.method, ours.layers) == (name, (1,))
        assert ours.norm == (start.norm if name in ("polished", "scaled") else None)
        assert ours.provenance.corpus == corpus.name
        assert ours.n_samples == len(h)
    assert lenses["polished"].provenance.details["seed"] == 0


def test_no_sample_is_seen_more_than_twice():
    assert steps_for(100_000, 48, 1024) == (48, 1024)
    assert steps_for(10_000, 48, 1024) == (48, 416)
    assert steps_for(1_000, 48, 1024) == (15, 128)
    assert steps_for(5, 48, 1024) == (1, 128)
    assert [passes_for(n) for n in (5, 60_000, 96_000)] == [2, 2, 1.25]


def test_a_masked_model_is_compared_at_its_masks(small_model, tmp_path):
    model, parts = small_model("bert"), make_sentences().split(n_train=30, n_validation=10, seed=0)
    made = compare_lenses(model, parts, tmp_path, methods=["id", "affine", "polished"], progress=False)
    assert made.origin["n_rows"] == 30
    assert made.origin["layers"] == [1, 2]
    assert made.evaluations is None
    again = compare_lenses(model, parts, tmp_path, methods=["affine"], progress=False)
    seeded = compare_lenses(model, parts, tmp_path / "3", methods=["affine"], seed=3, progress=False)
    alone = Lens.fit(
        model, parts[0], method="affine", layers=[1, 2], positions="sampled", seed=3, progress=False
    )
    assert seeded.lenses["affine"].digest == alone.digest != made.lenses["affine"].digest
    rows = [
        t[(t["method"] == "affine") & t["layer"].notna()].reset_index(drop=True)
        for t in (made.report, again.report)
    ]
    assert rows[0].equals(rows[1])
    assert not any(isinstance(it, LensConfig) and it.standardise for it in default_methods(model))
    assert list(parse_methods(default_methods(small_model("llama")))) == [
        "id", "mat", "affine", "ridge=loo+toward=identity", "weighted", "standardise",
        "standardise+intercept", "scaled", "polished",
    ]  # fmt: skip


def test_a_masked_model_starts_from_vectors_as_they_are(small_model, corpus):
    model = small_model("bert")
    assert best_start(model) == LensConfig(intercept=True)
    lens = Lens.fit(model, corpus, method="polished", positions="sampled", layers=[1], progress=False)
    assert lens.norm is None
    assert lens.maps[1] is not None
    assert lens.maps[1].bias is not None
    assert lens.n_samples == len(corpus)
    assert lens.provenance.positions == "sampled"
