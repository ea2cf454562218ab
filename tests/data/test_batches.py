"""Batches hold every sentence once, padded on the right and within the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import examples_of

from matlens import make_examples
from matlens.data.corpus import Corpus


@settings(derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    budget=st.integers(1, 200),
)
def test_batches_hold_every_sentence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    examples = examples_of(lengths)
    seen: list[int] = []
    widths: list[int] = []
    for batch in examples.batches(budget):
        n, width = batch.tokens.shape
        assert n == len(batch.index) >= 1
        assert batch.mask.shape == (n, width)
        assert n * width <= budget or n == 1
        for row, s in enumerate(batch.index):
            length = lengths[s]
            tokens = list(range(examples.offsets[s] + 1, examples.offsets[s + 1] + 1))
            # Right padding: the sentence first, then nothing of another.
            assert batch.tokens[row].tolist() == tokens + [0] * (width - length)
            assert batch.mask[row].tolist() == [1] * length + [0] * (width - length)
        assert max(lengths[s] for s in batch.index) == width  # no column of padding alone
        seen += batch.index.tolist()
        widths.append(width)
    assert sorted(seen) == list(range(len(lengths)))
    assert [lengths[s] for s in seen] == sorted(lengths, reverse=True)
    assert widths == sorted(widths, reverse=True)


def test_batches_are_as_large_as_the_budget_allows() -> None:
    sizes = [len(batch.index) for batch in examples_of([10] * 7).batches(35)]
    assert sizes == [3, 3, 1]
    assert [len(batch.index) for batch in examples_of([10] * 7).batches(70)] == [7]


def test_a_smaller_budget_changes_no_position(small_model: Callable[[str], Any], sentences: Corpus) -> None:
    examples = make_examples(small_model("gpt2"), sentences)
    kept = examples.positions.copy()
    for budget in (1, 50, 10**6):
        list(examples.batches(budget))
    assert np.array_equal(examples.positions, kept)
