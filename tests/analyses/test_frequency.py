"""Common tokens are those that make half of a text, and lists of tokens are of the kind that most are."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sub_updates.extremes import FREQUENCY_KINDS, TokenFrequency, frequency_kinds


def test_common_are_the_fewest_tokens_that_make_half_of_the_text():
    """Written out: 4 + 3 of 12 are half, 4 are not."""
    text = np.array([2, 2, 2, 2, 5, 5, 5, 0, 0, 3, 3, 7])
    frequency = TokenFrequency(text, 9)
    assert frequency.counts.tolist() == [2, 0, 4, 2, 0, 3, 0, 1, 0]
    assert np.flatnonzero(frequency.common).tolist() == [2, 5]
    common, unseen = frequency.shares(np.array([[2, 5, 0, 3], [2, 1, 4, 6], [8, 8, 8, 8]]))
    assert common.tolist() == [0.5, 0.25, 0]
    assert unseen.tolist() == [0, 0.75, 1]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_half_of_the_text_is_common_and_no_token_too_many(text):
    common = set(np.flatnonzero(TokenFrequency(np.array(text), 9).common).tolist())
    times = Counter(text)
    made = sum(times[token] for token in common)
    assert 2 * made >= len(text)
    assert all(2 * (made - times[token]) < len(text) for token in common)
    assert min(times[token] for token in common) >= max(
        (times[token] for token in times if token not in common), default=0
    )


def test_the_text_is_all_sentences_of_the_corpus(sentences, small_model):
    tokenizer = small_model("bert").tokenizer  # which would add [CLS] and [SEP]
    words = Counter(word for sentence in sentences.sentences for word in sentence.split())
    frequency = TokenFrequency.from_corpus(sentences, tokenizer, 60)
    assert {word: int(frequency.counts[tokenizer.convert_tokens_to_ids(word)]) for word in words} == words
    assert frequency.counts.sum() == sum(words.values())


def test_kinds_by_what_most_tokens_are():
    common, unseen = np.array([0.5, 0.49, 0, 0, 1]), np.array([0.5, 0, 0.9, 0.89, 0])
    assert frequency_kinds(common, unseen) == ["common", "other", "unlikely", "other", "common"]
    assert set(FREQUENCY_KINDS) == {"common", "other", "unlikely"}
