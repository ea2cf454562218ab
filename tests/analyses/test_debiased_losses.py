"""Losses under Self-Debiasing are those of the formula's probabilities, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from control.baselines import SelfDebiasing
from control.perplexity import debiased_losses
from self_debiasing import debiased_probabilities

from matlens import make_examples
from matlens.data.corpus import Corpus
from matlens.ffn.perplexity import text_losses

Models = Callable[[str], Any]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_under_self_debiasing_it_is_that_of_the_formulas_probabilities(
    name: str, small_model: Models, plain_model: Models, sentences: Corpus
) -> None:
    model, plain = small_model(name), plain_model(name)
    few = Corpus("few", sentences.sentences[:4], 4, 0, 0, 0)
    debiasing = SelfDebiasing(["threat", "profanity"], decay=2000.0)
    lost = []
    for sentence in few.sentences:
        ids = model.tokenizer(sentence)["input_ids"]
        total = 0.0
        for place in range(1, len(ids)):
            rows = []
            for prefix in ("", *debiasing.prefixes):
                read = [*model.tokenizer(prefix)["input_ids"], *ids[:place]]
                with torch.inference_mode():
                    rows.append(plain(torch.tensor([read])).logits[0, -1].double().tolist())
            total -= math.log(debiased_probabilities(rows[0], rows[1:], 2000.0, 0.01)[ids[place]])
        lost.append(total)
    for batch_tokens in (1, 1000):
        ours = debiased_losses(model, make_examples(model, few), debiasing, batch_tokens=batch_tokens)
        np.testing.assert_allclose(ours.total, lost, rtol=1e-4)
    unchanged = text_losses(model, few, progress=False)
    assert not np.allclose(unchanged.total, lost, rtol=1e-3)


def test_without_decay_self_debiasing_has_the_models_own(small_model: Models, sentences: Corpus) -> None:
    model = small_model("neox")
    losses = text_losses(model, sentences, progress=False)
    debiased = debiased_losses(model, make_examples(model, sentences), SelfDebiasing(decay=0.0))
    np.testing.assert_allclose(losses.total, debiased.total, rtol=1e-5)
