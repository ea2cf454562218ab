"""Measures of lenses, against NumPy in float64 from the model's own scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from matlens import InputError, Lens, Readout
from matlens.judging.measures import Judgement, judge_scores, lens_r2, lens_scores

Settings = Callable[[str], Any]


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_each_token_is_judged_by_the_model_s_own_distribution(name: str, setting: Settings) -> None:
    model, _, validation = setting(name)
    readout, lens, last = Readout(model), Lens.identity(model), model.cfg.n_layers
    judged = judge_scores(
        readout, validation[last], {"id": lens_scores(lens, validation[1], 1)}, progress=False
    )["id"]
    p = log_softmax(readout.logits(validation[last]).double().numpy())
    q = log_softmax(readout.logits(validation[1]).double().numpy())
    first = q.argmax(1)
    of_first = p[np.arange(len(p)), first]
    assert judged.rank.tolist() == (p > of_first[:, None]).sum(1).tolist()
    np.testing.assert_allclose(judged.surprisal.numpy(), -of_first, rtol=1e-4)
    np.testing.assert_allclose(judged.divergence.numpy(), (np.exp(p) * (p - q)).sum(1), rtol=1e-3, atol=1e-5)
    loud = {"loud": lambda part: 30 * readout.logits(validation[1][part])}
    q = log_softmax(30 * readout.logits(validation[1]).double().numpy())
    divergence = judge_scores(readout, validation[last], loud, progress=False)["loud"].divergence
    np.testing.assert_allclose(divergence.numpy(), (np.exp(p) * (p - q)).sum(1), rtol=1e-3)
    assert np.abs(divergence.numpy() / (np.exp(q) * (q - p)).sum(1) - 1).max() > 0.1  # the other way round
    itself = judge_scores(readout, validation[last], {0: lens_scores(lens, validation[last], last)})[0]
    assert itself.rank.tolist() == [0] * len(p)
    torch.testing.assert_close(itself.divergence, torch.zeros(len(p)), atol=1e-5, rtol=0)


def test_estimates_are_means_with_their_intervals() -> None:
    judged = Judgement(torch.tensor([0, 3, 0, 7, 40]), torch.arange(5.0), torch.tensor([1.0, 2, 4, 8, 16]))
    estimates = judged.estimates()
    values = {key: estimate.value for key, estimate in estimates.items()}
    assert values == {
        ("precision", 1): 0.4, ("precision", 5): pytest.approx(0.6), ("precision", 10): pytest.approx(0.8),
        ("surprisal", None): 2.0, ("kl", None): pytest.approx(6.2),
    }  # fmt: skip
    assert 0 < estimates["precision", 1].low < 0.4 < estimates["precision", 1].high < 1


def test_differences_are_paired() -> None:
    base = torch.linspace(0, 50, 20)
    ours = Judgement(torch.zeros(20, dtype=torch.long), base + 1 + 0.1 * torch.sin(base), base)
    theirs = Judgement(torch.tensor([0, 5] * 10), base, base)
    differences = ours.differences(theirs)
    expected = stats.ttest_rel(ours.surprisal.double(), theirs.surprisal.double()).confidence_interval()
    assert differences["surprisal", None].low == pytest.approx(expected.low)
    assert differences["surprisal", None].high == pytest.approx(expected.high)
    assert differences["surprisal", None].high < 1.2  # unpaired, an interval as wide as the spread
    assert differences["precision", 1].value == 0.5
    assert theirs.differences(ours)["precision", 1].value == -0.5
    assert differences["kl", None].value == 0
    with pytest.raises(InputError, match="same tokens"):
        ours.differences(Judgement(*(part[:3] for part in theirs)))


def test_r2_is_of_what_the_lens_stands_in_for(setting: Settings) -> None:
    model, train, validation = setting("llama")
    last = model.cfg.n_layers
    h, truth = validation[1], validation[last]
    plain, normed = (Lens.fit(model, train, method=name, progress=False) for name in ("mat", "normed+affine"))

    def reference(stand_in: torch.Tensor, target: torch.Tensor) -> float:
        y, z = target.double().numpy(), stand_in.double().numpy()
        return float((1 - ((y - z) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)).mean())

    assert lens_r2(plain, h, truth, 1).value == pytest.approx(reference(plain(h, 1), truth))
    unit = truth / truth.square().mean(1, keepdim=True).sqrt()
    assert lens_r2(normed, h, truth, 1).value == pytest.approx(reference(normed(h, 1), unit), abs=1e-3)
    rows = torch.arange(len(h)) % 3 > 0
    part = lens_r2(plain, h, truth, 1, rows=rows)
    assert part.value == pytest.approx(reference(plain(h[rows], 1), truth[rows]))
    assert part.n == int(rows.sum()) != len(h)
    assert part.value != pytest.approx(lens_r2(plain, h, truth, 1, rows=~rows).value)


@pytest.mark.refused
def test_what_cannot_be_judged_is_refused(setting: Settings) -> None:
    model, _, validation = setting("llama")
    readout, truth = Readout(model), validation[model.cfg.n_layers]
    with pytest.raises(InputError, match="nothing to judge"):
        judge_scores(readout, truth, {})
    with pytest.raises(InputError, match="not finite"):
        judge_scores(readout, truth, {"x": lambda part: torch.full((len(truth[part]), 60), torch.nan)})
    with pytest.raises(InputError, match="60 tokens"):
        judge_scores(readout, truth, {"x": lambda part: torch.zeros(len(truth[part]), 59)})
