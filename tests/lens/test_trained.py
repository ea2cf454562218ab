"""Trained lenses: the loss is the divergence, a sample of tokens stands for all, training improves maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, WORDS, make_sentences
from sentences import corpus_of
from small_lenses import linear, numbers
from torch import Tensor

import matlens
from matlens import InputError, Lens, LensConfig, Readout
from matlens.lens.maps import Standardisation
from matlens.lens.trained import (
    LayerTraining,
    draw_tokens,
    fit_jacobian,
    passes_for,
    steps_for,
    token_chances,
)

Models = Callable[[str], Any]


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
    with pytest.raises(InputError, match="as many samples"):
        LayerTraining(readout, h[:5], last)
    training = LayerTraining(readout, h, last)
    training.polish(rate=1e39)
    with pytest.raises(InputError, match="diverged"):
        training.result()
    few = matlens.collect(model, matlens.make_examples(model, corpus), [1], progress=False)
    with pytest.raises(InputError, match="corpus must be a Corpus"):
        Lens.fit(model, few, method="jacobian")
    with pytest.raises(InputError, match="do not belong"):
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


@pytest.mark.refused
def test_what_has_no_jacobian_lens_is_refused(small_model):
    few = corpus_of(["w1 w2 w3"])
    with pytest.raises(InputError, match="cannot fit a Jacobian lens here"):
        fit_jacobian(small_model("bert"), few, layers=[1], skip=0)
    with pytest.raises(InputError, match="above 0"):
        fit_jacobian(small_model("gpt2"), few, layers=[0])
    with pytest.raises(InputError, match="more than 17 tokens"):
        fit_jacobian(small_model("gpt2"), few, layers=[1], progress=False)


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
