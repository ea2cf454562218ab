"""Sub-updates are left out at one position, and the model is as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near
from sub_updates.removal import remove_sub_updates

from matlens import InputError, collect, make_examples
from matlens.data import make_token_examples
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
    removed = list(remove_sub_updates(model, examples, index, progress=False))
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


def test_what_cannot_be_removed_is_refused(small_model: Callable[[str], Any], sentences: Corpus) -> None:
    model = small_model("llama")
    examples = make_examples(model, sentences).head(2)
    for wrong, message in [
        (torch.tensor([[0], [-1]]), r"^index\[1\] must have indices from 0"),
        (torch.tensor([[0]]), r"for each of the 2 examples"),
    ]:
        with pytest.raises(InputError, match=message):
            next(remove_sub_updates(model, examples, {1: wrong}, progress=False))
    with pytest.raises(InputError, match="out of range"):
        next(remove_sub_updates(model, examples, {3: torch.tensor([[0], [0]])}, progress=False))
    several = make_token_examples(model, [[3, 4, 5]], positions=[[0, 1]])
    with pytest.raises(InputError, match="a position in each sentence, got 2 in 1"):
        next(remove_sub_updates(model, several, {1: torch.tensor([[0]])}, progress=False))
