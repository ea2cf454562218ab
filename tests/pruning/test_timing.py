"""What a token costs, by turns; and models that cannot be timed are refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from matlens import InputError, pruning
from matlens.pruning import evaluation, time_in_turns

Models = Callable[[str], Any]


def test_a_cache_holds_what_its_blocks_write(pruned_llama, small_model):
    table = pruning.compare_costs(small_model("llama"), pruned_llama, rounds=1)
    values = {(row.method, row.metric): row.value for row in table.itertuples()}
    assert values["original", "cache"] == 3 * 2 * 2 * 8 * 4  # blocks, keys and values, heads, width, bytes
    assert values["pruned", "cache"] == 2 * 2 * 2 * 8 * 4
    weights = sum(weight.numel() for weight in pruned_llama.model.parameters()) * 4
    assert values["original", "weights"] > values["pruned", "weights"] == weights
    ratio = values["pruned", "seconds"] / values["original", "seconds"]
    assert values["pruned", "seconds ratio"] == pytest.approx(ratio)
    assert set(table["corpus"]) == {""}
    with pytest.raises(InputError, match="pruned model"):
        pruning.compare_costs(small_model("gpt2"), pruned_llama)


def test_models_take_turns_and_medians_count(plain_model, monkeypatch):
    models = [plain_model("gpt2"), plain_model("llama")]
    seconds = iter([3.0, 1.0, 50.0, 10.0, 4.0, 2.0])  # the second round is slow
    turns = []

    def written(model: Any, prompt: torch.Tensor, n_tokens: int) -> tuple[float, int]:
        turns.append(model)
        assert prompt.tolist() == [[3, 4, 5, 6, 7, 8, 9, 10]]
        return n_tokens * next(seconds), 0

    monkeypatch.setattr(evaluation, "_written", written)
    first, second = time_in_turns(models, rounds=3)
    assert turns == models * 3
    assert (first.rounds, second.rounds) == ([3, 50, 4], [1, 10, 2])
    estimates = second.estimates(first)
    assert (estimates["seconds"].value, estimates["seconds"].n) == (2, 3)
    assert estimates["seconds ratio"].value == pytest.approx(1 / 3)  # of 1/3, 1/5 and 2/4
    assert "seconds ratio" not in first.estimates()
