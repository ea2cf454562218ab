"""Skipped blocks are not computed, and no pass begins or ends among them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from conftest import N_LAYERS, assert_near
from handpatched import jump_part
from patched_models import SENTENCES, linear, patched, replacement, vectors

import matlens
from matlens import InputError


@pytest.mark.parametrize("name", ["gptj", "bert"])
def test_skipped_blocks_are_not_computed(name, small_model):
    """For every choice of blocks: they run once, and no module of the others does."""
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


@pytest.mark.parametrize("name", ["gpt2", "neox"])
def test_a_pass_starts_and_stops_where_there_are_vectors(name, small_model):
    """At the ends of a jump as if nothing were replaced, and nowhere between."""
    model, replaced = small_model(name), linear(jump_part(0, 2))
    tokens = torch.tensor([[7, 3, 41, 12]])
    with torch.inference_mode():
        h0, h2 = model(tokens, stop_at_layer=0), model(tokens, stop_at_layer=2)
        from_two = model(replaced(h0), start_at_layer=2)
        with patched(model, [replaced]):
            assert torch.equal(model(tokens, stop_at_layer=0), h0)
            assert_near(model(tokens, stop_at_layer=2), replaced(h0))
            assert_near(model(h0, start_at_layer=0), from_two)
            for given, asked in ((tokens, {"stop_at_layer": 1}), (h0, {"start_at_layer": 1})):
                with pytest.raises(InputError, match="cannot start or stop at layer 1: the jump"):
                    model(given, **asked)
        assert torch.equal(model(tokens, stop_at_layer=2), h2)


def test_blocks_whose_output_no_hook_sees_are_refused(model_folder, monkeypatch):
    """Those of OpenAI's first GPT as a bridge runs them: they return lists."""
    monkeypatch.setattr("matlens.models.families.gpt1._BLOCKS", "no module")
    model = matlens.load(str(model_folder("gpt1")), device="cpu")
    with pytest.raises(InputError, match=r"hook blocks.[01].hook_out does not fire"):
        patched(model, [linear(jump_part(0, 1))]).__enter__()
    with pytest.raises(InputError, match=r"h\.1, h\.2, h\.3 cannot be collected from OpenAIGPT.* not fire"):
        matlens.collect(model, matlens.make_token_examples(model, [[3, 4, 5]]), progress=False)
    with pytest.raises(InputError, match=r"last block of OpenAIGPT.* hook blocks\.2\.hook_out does not fire"):
        matlens.Readout(model)
