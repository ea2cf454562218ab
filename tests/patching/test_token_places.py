"""Tokens are counted from each sentence's own first, whatever the padding, and padding is none."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_near
from handpatched import hand_vectors, submodule_part
from patched_models import SENTENCES, Models, linear, patched, replacement, vectors

from matlens import InputError


@pytest.mark.parametrize("side", ["right", "left"])
def test_first_tokens_are_each_sentences_own_whatever_the_padding(side: str, small_model: Models) -> None:
    """The sentence of one token is left as it is; the others are changed after their first."""
    model, replaced = small_model("llama"), submodule_part("ffn", 1, where="not-first")
    unpatched = vectors(model, side=side)
    with patched(model, [replacement(replaced)]):
        ours = vectors(model, side=side)
    for sentence, before, after in zip(SENTENCES, unpatched, ours, strict=True):
        moved = (after["ffn_out.1"] != before["ffn_out.1"]).any(-1)
        assert moved.tolist() == [False] + [True] * (len(sentence) - 1)


def test_without_a_mask_every_row_is_a_whole_sentence(small_model: Models, plain_model: Models) -> None:
    model, tokens = small_model("gpt2"), torch.tensor(SENTENCES[0]).reshape(2, 5)
    for where in ("not-first", (3, 0)):
        replaced = submodule_part("attn", 0, where=where)
        expected = hand_vectors("gpt2", plain_model("gpt2"), [replaced], tokens.tolist())
        with patched(model, [replacement(replaced)]), torch.inference_mode():
            for row, logits in enumerate(model(tokens)):
                assert_near(logits, expected[row]["logits"])


def test_a_stand_in_refuses_a_mask_that_tells_no_padding(small_model: Models) -> None:
    model, mask = small_model("llama"), torch.zeros(1, 1, 4, 4)
    with (
        patched(model, [linear(submodule_part("ffn", 1))]),
        pytest.raises(InputError, match="got one of 4 dimensions"),
    ):
        model.original_model(input_ids=torch.tensor([[7, 3, 41, 12]]), attention_mask=mask)
