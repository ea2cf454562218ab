"""Perplexity is the exponential of Hugging Face's own loss, sentence by sentence, changed models included."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hand_controlled import CHOSEN, controlled_by_hand
from scipy import stats

from matlens import make_examples
from matlens.data.making import make_windows
from matlens.ffn.control import controlled
from matlens.ffn.perplexity import TextLosses, text_losses

Models = Callable[[str], Any]


def test_the_interval_of_few_texts_is_that_of_a_ratio_of_sums():
    """The delta method for a ratio of two means, by sample variances and covariance (Cochran 1977, 6.4)."""
    lost, counted = np.array([7.0, 3.0, 11.0, 4.0]), np.array([3, 1, 4, 2])
    r, ((of_lost, both), (_, of_counted)) = lost.sum() / counted.sum(), np.cov(lost, counted)
    error = math.sqrt((of_lost + r**2 * of_counted - 2 * r * both) / 4) / counted.mean()
    half = stats.t.ppf(0.975, 3) * error
    estimate = TextLosses(lost, counted).perplexity()
    expected = math.exp(r), math.exp(r - half), math.exp(r + half)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(expected)


def test_a_ratio_is_that_of_the_perplexities_and_surer_than_they():
    rng = np.random.default_rng(1)
    counted = rng.integers(5, 40, 50)
    base = TextLosses(rng.normal(3, 1, 50) * counted, counted)
    changed = TextLosses(base.total + rng.normal(0.3, 0.05, 50) * counted, counted)
    ratio = changed.ratio(base)
    assert ratio.value == pytest.approx(changed.perplexity().value / base.perplexity().value)
    assert ratio.low < ratio.value < ratio.high
    assert ratio.high / ratio.low < base.perplexity().high / base.perplexity().low
    same = base.ratio(base)
    assert (same.value, same.low, same.high) == (1, 1, 1)
    lost = TextLosses(np.array([9e3, 2e3]), np.array([2, 2]))  # nats: no final norm bounds logits
    assert lost.perplexity().value == lost.perplexity().high == math.inf
    assert base.ratio(TextLosses(base.total + 800 * counted, counted)).value < 1e-300
    lonely = TextLosses(np.array([3.0]), np.array([2])).perplexity()
    assert lonely.value == pytest.approx(math.exp(1.5))
    assert math.isnan(lonely.low)


@pytest.mark.parametrize("chosen", [{}, CHOSEN], ids=["unchanged", "controlled"])
@pytest.mark.parametrize("name", ["gptj", "gemma2"])
def test_it_is_hugging_faces_loss(name, chosen, small_model, plain_model, sentences, monkeypatch):
    monkeypatch.setattr("matlens.ffn.perplexity._PLACES", 7)
    model, plain = small_model(name), plain_model(name)
    for texts in (make_examples(model, sentences), make_windows(model, sentences, size=20)):
        lost, counted = [], []
        with controlled_by_hand(name, plain, chosen), torch.inference_mode():
            for ids in np.split(texts.tokens, texts.offsets[1:-1]):
                tokens = torch.from_numpy(ids).long()[None]
                counted.append(len(ids) - 1)
                lost.append(float(plain(tokens, labels=tokens).loss) * counted[-1])
        for batch_tokens in (1, 70):
            with controlled(model, chosen) if chosen else nullcontext():
                ours = text_losses(model, texts, batch_tokens=batch_tokens, progress=False)
            np.testing.assert_array_equal(ours.n_tokens, counted)
            np.testing.assert_allclose(ours.total, lost, rtol=2e-5)
        assert ours.perplexity().value == pytest.approx(math.exp(sum(lost) / sum(counted)), rel=1e-4)
