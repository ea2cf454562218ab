"""Measures of lenses, against NumPy in float64 from the model's own scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from matlens import Lens, Readout
from matlens.lens.judgement import judge_scores
from matlens.lens.measures import lens_r2, lens_scores

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
    assert judged.rank.tolist() == (1 + (p > of_first[:, None]).sum(1)).tolist()
    np.testing.assert_allclose(judged.surprisal.numpy(), -of_first, rtol=1e-4)
    np.testing.assert_allclose(judged.divergence.numpy(), (np.exp(p) * (p - q)).sum(1), rtol=1e-3, atol=1e-5)
    loud = {"loud": lambda part: 30 * readout.logits(validation[1][part])}
    q = log_softmax(30 * readout.logits(validation[1]).double().numpy())
    divergence = judge_scores(readout, validation[last], loud, progress=False)["loud"].divergence
    np.testing.assert_allclose(divergence.numpy(), (np.exp(p) * (p - q)).sum(1), rtol=1e-3)
    assert np.abs(divergence.numpy() / (np.exp(q) * (q - p)).sum(1) - 1).max() > 0.1  # the other way round
    itself = judge_scores(readout, validation[last], {0: lens_scores(lens, validation[last], last)})[0]
    assert itself.rank.tolist() == [1] * len(p)
    torch.testing.assert_close(itself.divergence, torch.zeros(len(p)), atol=1e-5, rtol=0)


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
