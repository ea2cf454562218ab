"""`mat_attn` for single vectors is a pass patched at all tokens, of which no other block runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near
from handpatched import hand_vectors, submodule_part
from paper_a.attention import attend_nowhere
from patched_models import SENTENCES, linear, owned

from matlens import MapSet

Models = Callable[[str], Any]


@pytest.mark.parametrize("name", ["gpt2", "gptj", "bert", "gemma2"])
def test_attending_nowhere_is_a_pass_patched_at_all_tokens(
    name: str, small_model: Models, plain_model: Models
) -> None:
    model, plain = small_model(name), plain_model(name)
    parts = [submodule_part("attn", layer, seed=layer, bias=layer != 1) for layer in range(N_LAYERS)]
    maps = MapSet(owned(linear(part), model) for part in parts)
    clean = hand_vectors(name, plain, [], SENTENCES[:1])[0]
    for first, last in ((0, 1), (0, 3), (1, 3), (2, 3), (2, 2)):
        expected = hand_vectors(name, plain, parts[first:last], SENTENCES[:1])[0][f"h.{last}"]
        ours = attend_nowhere(model, maps, clean[f"h.{first}"].float(), first, last)
        assert ours.dtype == torch.float32
        assert_near(ours, expected)
    counts: list[int] = []
    handle = model.blocks[0].original_component.register_forward_pre_hook(lambda *_: counts.append(1))
    attend_nowhere(model, maps, torch.zeros(2, D_MODEL), 1, 2)
    handle.remove()
    assert not counts
