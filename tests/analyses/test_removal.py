"""Sub-updates are left out at one position, and the model is as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near
from paper_b_removal import remove_sub_updates

from matlens import collect, make_examples
from matlens.data.corpus import Corpus
from matlens.models import changes_of


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2"])
def test_the_first_row_is_the_model_itself_and_it_is_left_as_it_was(
    name: str, small_model: Callable[[str], Any], sentences: Corpus
) -> None:
    model = small_model(name)
    examples = make_examples(model, sentences).head(4)
    index = {1: torch.tensor([[3, 5], [0, 1], [2, 3], [7, 9]]), 0: torch.tensor([[4], [4], [2], [2]])}
    there = collect(model, examples, ["h.1", "h.2", f"h.{N_LAYERS}"], progress=False)
    removed = list(remove_sub_updates(model, examples, index))
    assert len(removed) == 4
    for row, by_layer in enumerate(removed):
        assert {layer: len(vectors.after) for layer, vectors in by_layer.items()} == {1: 3, 0: 2}
        for layer, vectors in by_layer.items():
            assert_near(vectors.after[0], there[f"h.{layer + 1}"][row])
            assert_near(vectors.final[0], there[f"h.{N_LAYERS}"][row])
            assert vectors.after.shape[1] == D_MODEL
            # Each is left out of a run of its own, and what comes later has seen it.
            assert (vectors.after[1:] != vectors.after[0]).any(1).all()
            assert (vectors.final[1:] != vectors.final[0]).any(1).all()
        one, other = by_layer[1].after[1:]
        assert not torch.equal(one, other)
    assert changes_of(model) == ()
