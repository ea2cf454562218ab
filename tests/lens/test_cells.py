"""Cells of a page hold what a trajectory says, whatever is read at once, and refuse what is none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_near
from small_lenses import make_lens

from matlens import InputError
from matlens.lens.cells import read_cells, texts_of, tokens_of_interest

PROMPT = "w3 w14 w15 w9 w26"


def test_cells_are_those_of_a_trajectory(
    small_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("llama")
    lens = make_lens(model).on(model)
    trajectory = lens.trajectory(PROMPT, k=4)
    followed = torch.tensor([7, 30])
    for held in (2**24, 100):  # all tokens at once, and one at a time
        monkeypatch.setattr("matlens.lens.cells._SCORES", held)
        cells = read_cells(lens.logits, list(trajectory._vectors), trajectory.layers, followed=followed, k=4)
        assert torch.equal(torch.from_numpy(cells.ids), trajectory.top_ids)
        for ours, theirs in (
            (cells.log_probs, trajectory.probabilities.log()),
            (cells.entropy, trajectory.entropy), (cells.kl, trajectory.kl),
            (cells.followed_log_probs[..., 1], trajectory.probability(30).log()),
        ):  # fmt: skip
            assert_near(torch.from_numpy(ours), theirs, 1e-4)
        final = trajectory.rank(trajectory.top_ids[-1, :, 0])
        assert torch.equal(torch.from_numpy(cells.rank), final)
        assert torch.equal(torch.from_numpy(cells.followed_ranks[..., 0]), trajectory.rank(7))


@pytest.mark.refused
def test_cells_that_cannot_be_read_are_refused(small_model: Callable[[str], Any]) -> None:
    model = small_model("llama")
    lens = make_lens(model).on(model)
    h, nothing = torch.randn(2, 32), torch.empty(0, dtype=torch.long)
    with pytest.raises(InputError, match="1 layers for 2"):
        read_cells(lens.logits, [h], [0, 3], followed=nothing)
    with pytest.raises(InputError, match="0 to 59"):
        read_cells(lens.logits, [h], [3], followed=torch.tensor([60]))
    with pytest.raises(InputError, match=r"^k must be"):
        read_cells(lens.logits, [h], [3], followed=nothing, k=61)
    assert read_cells(lens.logits, [h], [3], followed=nothing, k=60).followed_ranks.shape == (1, 2, 0)


def test_what_is_predicted_is_of_more_interest_than_what_is_there(small_model: Callable[[str], Any]) -> None:
    final = torch.tensor([[5, 6], [7, 8], [9, 10]])
    assert tokens_of_interest(final, torch.tensor([1, 2, 3]), 1) == [7, 5, 7, 8, 9, 1, 2, 3]
    tokenizer = small_model("llama").tokenizer
    assert texts_of(tokenizer, [final[:1].numpy(), final[0].numpy()]) == {5: "w3", 6: "w4"}
