"""Batches hold every sentence once within the budget; what is cut, and what is not the same, of examples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import examples_of

from matlens import InputError
from matlens.data.examples import Examples


@settings(derandomize=True)
@given(data=st.data(), lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_cut_sentences_end_with_their_drawn_token(data, lengths):
    drawn = np.array([data.draw(st.integers(0, length - 1)) for length in lengths])
    examples = replace(examples_of(lengths), positions=drawn, provenance={"seed": 4})
    cut = examples.up_to_positions()
    whole = np.split(examples.tokens, examples.offsets[1:-1])
    expected = [tokens[: position + 1].tolist() for tokens, position in zip(whole, drawn, strict=True)]
    assert [tokens.tolist() for tokens in np.split(cut.tokens, cut.offsets[1:-1])] == expected
    assert cut.offsets.tolist() == [0, *np.cumsum([len(tokens) for tokens in expected])]
    assert cut.positions.tolist() == drawn.tolist()
    assert cut.provenance == {"seed": 4}


def test_fingerprint_changes_with_any_token_boundary_or_position():
    base = Examples(np.arange(10), np.array([0, 4, 10]), np.array([1, 2]))
    changed = [{"tokens": np.arange(10) + (np.arange(10) == 9)}, {"offsets": np.array([0, 5, 10])}]
    changed += [{"positions": np.array(positions)} for positions in ([1, 3], [2, 1])]
    assert len({base.fingerprint, *(replace(base, **change).fingerprint for change in changed)}) == 5
    assert replace(base, provenance={"corpus": "another"}).fingerprint == base.fingerprint


@pytest.mark.refused
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": np.array([0, 3, 2, 6])}, "offsets must"),
        ({"positions": np.array([0, 3])}, "positions of sentence 1 must be between 0 and 2, got 3"),
        ({"positions": np.array([-1, 0])}, "positions of sentence 0 .* got -1"),
        ({"positions": np.array([0])}, "sentences must"),
        ({"sentences": np.array([1, 0])}, "sentences must"),
        ({"sentences": np.array([0, 2])}, "sentences must"),
    ],
    ids=str,
)
def test_arrays_that_do_not_belong_together_are_refused(change, message):
    arrays = {"tokens": np.arange(6), "offsets": np.array([0, 3, 6]), "positions": np.array([0, 1])}
    Examples(**arrays)
    with pytest.raises(InputError, match=message):
        Examples(**arrays | change)


def test_selected_sentences_have_their_sources_images_and_targets():
    examples = Examples(
        np.arange(6), np.array([0, 1, 3, 6]), np.array([0, 0, 1, 2]), {"seed": 4}, np.array([0, 1, 1, 2]),
        np.arange(5), np.array([0, 2, 3, 5]), np.arange(3.0)[:, None], np.arange(4) + 50,
    )  # fmt: skip
    some = examples.select(np.array([0, 2]), part="1/2")
    expected = {
        "tokens": [0, 3, 4, 5], "offsets": [0, 1, 4], "positions": [0, 2], "sentences": [0, 1],
        "source_tokens": [0, 1, 3, 4], "source_offsets": [0, 2, 4], "images": [[0], [2]], "targets": [50, 53],
    }  # fmt: skip
    assert {name: values.tolist() for name, values in some.arrays.items()} == expected
    assert some.provenance == {"seed": 4, "part": "1/2"}
    assert examples.head(2).tokens.tolist() == [0, 1, 2]


# Batches


@settings(derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    budget=st.integers(1, 200),
)
def test_batches_hold_every_sentence_once_within_the_budget(lengths, budget):
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
