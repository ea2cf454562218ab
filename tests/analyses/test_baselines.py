"""Self-Debiasing is its formula, computed token by token, and WordFilter leaves no banned word."""

from __future__ import annotations

import math
from typing import Any

import torch
from conftest import make_tokenizer
from control.baselines import SelfDebiasing, prefixed_tokens, word_filter
from control.graders import ATTRIBUTES
from hypothesis import given, settings
from hypothesis import strategies as st
from self_debiasing import debiased_probabilities
from torch import Tensor

NAMES = st.lists(st.sampled_from(list(ATTRIBUTES)), min_size=1, max_size=6, unique=True)


@settings(derandomize=True, max_examples=60)
@given(
    names=NAMES, n=st.integers(1, 3), seed=st.integers(0, 10**6),
    decay=st.sampled_from([0.0, 10.0, 50.0, 100.0]), floor=st.sampled_from([0.01, 0.2, 1.0]),
)  # fmt: skip
def test_every_row_has_the_probabilities_of_the_formula(names, n, seed, decay, floor):
    """Prompts first, then all of them after each announcement in turn; rows of one prompt go on alike."""
    one = SelfDebiasing(names, decay=decay, floor=floor)
    scores = 3 * torch.randn((1 + len(names)) * n, 7, generator=torch.Generator().manual_seed(seed))
    probabilities = one(torch.zeros(len(scores), 1, dtype=torch.long), scores).softmax(-1)
    for row in range(n):
        announced = [scores[row + n * (1 + i)].tolist() for i in range(len(names))]
        expected = torch.tensor(debiased_probabilities(scores[row].tolist(), announced, decay, floor))
        for variant in range(1 + len(names)):
            torch.testing.assert_close(probabilities[row + n * variant], expected, rtol=1e-4, atol=1e-6)


def test_an_announcement_stands_before_the_text_and_after_what_begins_every_text():
    tokenizer = make_tokenizer()
    w3, w4, w9 = tokenizer.convert_tokens_to_ids(["w3", "w4", "w9"])
    assert prefixed_tokens(tokenizer, "w3 w4:\n", [w9]) == [w3, tokenizer.unk_token_id, w9]
    tokenizer.bos_token = "[PAD]"
    assert prefixed_tokens(tokenizer, "w3 w4", [1, w9]) == [1, w3, w4, w9]
    assert prefixed_tokens(tokenizer, "w3 w4", [w9, 1]) == [w3, w4, w9, 1]


# WordFilter


def last_banned(processor: Any, before: list[int], n_vocab: int) -> list[int]:
    """Tokens that cannot follow."""
    scores: Tensor = processor(torch.tensor([before]), torch.zeros(1, n_vocab))
    return (scores[0] == -math.inf).nonzero()[:, 0].tolist()


def test_single_tokens_cannot_follow_and_phrases_cannot_be_completed():
    tokenizer = make_tokenizer()
    w1, w2, w3, w4 = tokenizer.convert_tokens_to_ids(["w1", "w2", "w3", "w4"])
    processor = word_filter(tokenizer, ["w1", " w2 w3 "])
    assert last_banned(processor, [w4, w4], 60) == [w1]
    assert last_banned(processor, [w4, w2], 60) == sorted([w1, w3])


class Spelled:
    """A tokenizer that has a token for each of a few texts and knows no others."""

    unk_token_id = 0
    known = ("damn", " damn", "Damn", " Damn", "DAMN", " oaf")

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [self.known.index(text) + 1 if text in self.known else 0]}


def test_forms_with_a_space_and_capitals_are_banned_where_the_vocabulary_has_them():
    assert last_banned(word_filter(Spelled(), ["damn"]), [9], 10) == [1, 2, 3, 4, 5]
    assert last_banned(word_filter(Spelled(), ["Damn"]), [9], 10) == [1, 2, 3, 4, 5]
    assert last_banned(word_filter(Spelled(), ["oaf"]), [9], 10) == [6]
