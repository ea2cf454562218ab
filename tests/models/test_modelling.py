"""The model against a forward pass written with torch alone: padding, the cache, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import assert_near
from fairseq_by_hand import run, save, settings, weights
from transformers import AutoModelForCausalLM

from matlens.models.families.wikilm.checkpoint import read_wikilm
from matlens.models.families.wikilm.modelling import WikiLMForCausalLM
from matlens.models.registry import families

SENTENCES = [[2, 5, 40, 17, 55, 6, 31], [2, 13, 14], [2, 30, 29, 8, 9]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> WikiLMForCausalLM:
    return read_wikilm(save(tmp_path_factory.mktemp("wikilm")))[0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side_moves_nothing(model: WikiLMForCausalLM, side: str) -> None:
    length = max(map(len, SENTENCES))
    tokens, mask = torch.ones(3, length, dtype=torch.int64), torch.zeros(3, length, dtype=torch.int64)
    spans = [slice(0, len(s)) if side == "right" else slice(length - len(s), length) for s in SENTENCES]
    for row, (span, sentence) in enumerate(zip(spans, SENTENCES, strict=True)):
        tokens[row, span], mask[row, span] = torch.tensor(sentence), 1
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits
    for row, (span, sentence) in enumerate(zip(spans, SENTENCES, strict=True)):
        expected = run(settings(), weights(settings()), sentence)["logits"]
        torch.testing.assert_close(logits[row, span], expected, atol=1e-5, rtol=0)


def test_a_cache_changes_nothing(model: WikiLMForCausalLM) -> None:
    tokens = torch.tensor(SENTENCES[:1])
    with torch.no_grad():
        whole, begun = model(tokens).logits, model(tokens[:, :4], use_cache=True)
        rest = model(tokens[:, 4:], past_key_values=begun.past_key_values).logits
        last = model(tokens, logits_to_keep=2).logits
    torch.testing.assert_close(torch.cat([begun.logits, rest], 1), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(last, whole[:, -2:])


def test_generation_takes_the_likeliest_word_each_time(model: WikiLMForCausalLM) -> None:
    tokens = [2, 5]
    for _ in range(4):
        tokens.append(int(run(settings(), weights(settings()), tokens)["logits"][-1].argmax()))
    made = model.generate(
        torch.tensor([[1, 2, 5]]), attention_mask=torch.tensor([[0, 1, 1]]), max_new_tokens=4,
        min_new_tokens=4, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert made[0, 1:].tolist() == tokens


def test_transformers_writes_and_reads_it(model: WikiLMForCausalLM, tmp_path: Path) -> None:
    families()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor(SENTENCES[:1])
    assert type(again) is WikiLMForCausalLM
    assert again.lm_head.words[0] is again.embed_tokens.words[0]
    kept = dict(model.named_parameters())
    assert all(torch.equal(kept.pop(name), value) for name, value in again.named_parameters())
    assert not kept
    with torch.no_grad():  # where numbers lie in memory has a say in how they are added up
        assert_near(again(tokens).logits, model(tokens).logits, 1e-6)
