"""Continuations of plain models, their losses by another, and their measures, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from calibration_texts import running_text
from cuts.continuations import beginnings, compare, continuation_losses, continue_prompts, measures

from matlens.data import make_windows

PROMPTS = torch.tensor([[7, 3, 31, 12, 9], [29, 30, 22, 8, 17], [4, 4, 5, 6, 11]])
N = 7


@torch.no_grad()
def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits.double()


def written_by_hand(model: Any, noise: np.ndarray | None) -> list[list[int]]:
    texts = [prompt.tolist() for prompt in PROMPTS]
    for step in range(N):
        for i, ids in enumerate(texts):
            scores = next_logits(model, ids).numpy()
            ids.append(int((scores + (0 if noise is None else noise[step, i])).argmax()))
    return [ids[PROMPTS.shape[1] :] for ids in texts]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_continuations_are_those_of_one_pass_a_token(name, plain_model):
    model = plain_model(name)
    assert continue_prompts(model, PROMPTS, N).tolist() == written_by_hand(model, None)
    generator = torch.Generator().manual_seed(5)
    size = (len(PROMPTS), model.config.vocab_size)
    draws = np.stack([torch.rand(size, generator=generator, dtype=torch.float64).numpy() for _ in range(N)])
    sampled = continue_prompts(model, PROMPTS, N, seed=5)
    assert sampled.tolist() == written_by_hand(model, -np.log(-np.log(draws)))
    assert torch.equal(sampled, continue_prompts(model, PROMPTS, N, seed=5))
    assert not torch.equal(sampled, continue_prompts(model, PROMPTS, N, seed=6))


def test_losses_are_of_the_written_tokens_alone(plain_model):
    model = plain_model("llama")
    written = torch.tensor([[1, 2, 3, 40], [9, 9, 9, 9], [30, 2, 17, 8]])
    losses = continuation_losses(model, PROMPTS, written)
    for i, tokens in enumerate(written.tolist()):
        ids = PROMPTS[i].tolist()
        for j, token in enumerate(tokens):
            expected = -float(next_logits(model, ids).log_softmax(-1)[token])
            assert float(losses[i, j]) == pytest.approx(expected, rel=1e-4)
            ids.append(token)
    assert losses.shape == written.shape


END = 0


def test_measures_by_hand():
    written = torch.tensor([
        [5, 6, 5, 6, 5, 6, 5, 6],  # 4-grams: 5656, 6565, 5656, 6565, 5656
        [1, 2, 3, 4, 5, 6, 7, 8],
        [3, 3, END, 3, 3, 3, 3, 3],  # ends
        [END, 3, 3, 3, 3, 3, 3, 3],
        [2, 2, 2, 2, 2, 2, 2, END],
    ])  # fmt: skip
    losses = torch.arange(40).reshape(5, 8).double()
    found = {name: values.tolist() for name, values in measures(written, losses, {END}).items()}
    assert found == {
        "loss": [3.5, 11.5, 17.0, 24.0, 35.5],
        "distinct-1": [2 / 8, 1, 2 / 3, 1, 2 / 8],
        "distinct-2": [2 / 7, 1, 1, 1, 2 / 7],
        "distinct-3": [2 / 6, 1, 1, 1, 2 / 6],
        "repeated 4-grams": [3 / 5, 0, 0, 0, 1 - 2 / 5],
        "length": [8, 8, 3, 1, 8],
    }
    endless = measures(written, losses, {None})  # type: ignore[arg-type]
    assert endless["length"].tolist() == [8] * 5


def test_comparisons_are_paired():
    generator = np.random.default_rng(0)
    ours = torch.from_numpy(generator.normal(3, 1, 24))
    theirs = ours - 0.1 + 0.01 * torch.from_numpy(generator.normal(0, 1, 24))
    apart = (ours - theirs).numpy()
    half = 2.0687 * apart.std(ddof=1) / math.sqrt(24)  # Student's t of 23 degrees of freedom
    difference, ratio = compare("distinct-1", ours, theirs), compare("loss", ours, theirs)
    assert difference[:3] == pytest.approx((apart.mean(), apart.mean() - half, apart.mean() + half), rel=1e-3)
    assert ratio[:3] == pytest.approx(tuple(math.exp(each) for each in difference[:3]), rel=1e-3)
    assert compare("loss", ours).value == pytest.approx(math.exp(float(ours.mean())))
    assert compare("length", ours).value == pytest.approx(float(ours.mean()))
    assert ratio.n == difference.n == 24


def test_prompts_are_the_beginnings_of_windows(small_model):
    texts = [make_windows(small_model("llama"), running_text(50, seed), size=12) for seed in (1, 2)]
    prompts = beginnings(texts, 5)
    assert [len(text) for text in texts] == [5, 5]  # the last of two tokens, which is not read
    windows = [text.tokens[start : start + 5] for text in texts for start in (0, 12, 24, 36)]
    assert np.array_equal(prompts.numpy(), np.stack(windows))
    assert beginnings(texts, 32).shape[1] == 6
