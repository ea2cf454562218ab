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

from matlens.data.corpus import Corpus
from matlens.data.making import make_windows
from matlens.ffn.control import controlled
from matlens.ffn.perplexity import TextLosses, text_losses

Models = Callable[[str], Any]


@torch.inference_mode()
def plain_losses(plain: Any, tokenizer: Any, corpus: Corpus) -> TextLosses:
    """From the loss that Hugging Face gives for labels, one sentence at a time."""
    lost, counted = [], []
    for sentence in corpus.sentences:
        ids = torch.tensor([tokenizer(sentence)["input_ids"]])
        counted.append(ids.shape[1] - 1)
        lost.append(float(plain(ids, labels=ids).loss) * counted[-1])
    return TextLosses(np.array(lost), np.array(counted))


def assert_alike(ours: TextLosses, theirs: TextLosses) -> None:
    np.testing.assert_array_equal(ours.n_tokens, theirs.n_tokens)
    np.testing.assert_allclose(ours.total, theirs.total, rtol=2e-5)


@pytest.mark.parametrize("control", [False, True], ids=["unchanged", "controlled"])
@pytest.mark.parametrize("name", ["gpt2", "gptj", "gemma2"])
def test_it_is_hugging_faces_loss(name, control, small_model, plain_model, sentences):
    model, plain = small_model(name), plain_model(name)
    with controlled_by_hand(name, plain, CHOSEN if control else {}):
        expected = plain_losses(plain, model.tokenizer, sentences)
    with controlled(model, CHOSEN) if control else nullcontext():
        by_batch_size = [text_losses(model, sentences, batch_tokens=n, progress=False) for n in (1, 70)]
    for ours in by_batch_size:
        assert_alike(ours, expected)
    total = math.exp(expected.total.sum() / expected.n_tokens.sum())
    assert by_batch_size[0].perplexity().value == pytest.approx(total, rel=1e-4)
    assert by_batch_size[0].perplexity().n == 40


def test_running_text_is_read_in_separate_windows(small_model, plain_model, sentences, monkeypatch):
    """As Hugging Face gives the loss of every window."""
    monkeypatch.setattr("matlens.ffn.perplexity._PLACES", 7)  # read part by part
    model, plain = small_model("llama"), plain_model("llama")
    ids = model.tokenizer(" ".join(sentences.sentences))["input_ids"]
    expected = []
    for start in range(0, len(ids), 20):
        window = torch.tensor([ids[start : start + 20]])
        with torch.inference_mode():
            expected.append(float(plain(window, labels=window).loss) * (window.shape[1] - 1))
    losses = text_losses(model, make_windows(model, sentences, size=20), progress=False)
    np.testing.assert_allclose(losses.total, expected, rtol=2e-5)
    assert losses.n_tokens.sum() == len(ids) - len(expected)


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
