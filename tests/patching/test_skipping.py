"""Of blocks that a jump passes over nothing is computed, and no pass begins or ends among them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from conftest import ARCHITECTURES, N_LAYERS, assert_near
from handpatched import jump_part
from patched_models import SENTENCES, Models, linear, replacement, vectors

from matlens import InputError
from matlens.patching.contexts import patched


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_skipped_blocks_are_not_computed(name: str, small_model: Models) -> None:
    """For every choice of kept blocks: they run once, and no module of the others does."""
    model = small_model(name)
    vectors(model)
    for kept in itertools.product([False, True], repeat=N_LAYERS):
        jumps = [jump_part(layer, layer + 1, layer) for layer in range(N_LAYERS) if not kept[layer]]
        whole: Counter[int] = Counter()
        inside: Counter[int] = Counter()
        with ExitStack() as stack:
            for layer, block in enumerate(model.blocks):
                component = block.original_component
                for module in component.modules():
                    count = _count(whole if module is component else inside, layer)
                    stack.callback(module.register_forward_pre_hook(count).remove)
            with patched(model, [replacement(replaced) for replaced in jumps]), torch.inference_mode():
                model(torch.tensor(SENTENCES[:1]))
        assert [whole[layer] for layer in range(N_LAYERS)] == [int(run) for run in kept]
        assert [inside[layer] > 0 for layer in range(N_LAYERS)] == list(kept)


def _count(counter: Counter[int], layer: int) -> Callable[..., None]:
    return lambda *_: counter.update([layer])


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_a_pass_starts_and_stops_where_there_are_vectors(name: str, small_model: Models) -> None:
    """At the ends of a jump as if nothing were replaced, and nowhere on its way."""
    model, replaced = small_model(name), linear(jump_part(0, 2))
    tokens = torch.tensor([[7, 3, 41, 12]])
    with torch.inference_mode():
        h0, h2 = model(tokens, stop_at_layer=0), model(tokens, stop_at_layer=2)
        from_two = model(replaced(h0), start_at_layer=2)
        with patched(model, [replaced]):
            assert torch.equal(model(tokens, stop_at_layer=0), h0)
            assert_near(model(tokens, stop_at_layer=2), replaced(h0))
            assert_near(model(h0, start_at_layer=0), from_two)
            for asked in ({"stop_at_layer": 1}, {"start_at_layer": 1}):
                given = tokens if "stop_at_layer" in asked else h0
                with pytest.raises(InputError, match="cannot start or stop at layer 1: the jump"):
                    model(given, **asked)
        assert torch.equal(model(tokens, stop_at_layer=2), h2)
