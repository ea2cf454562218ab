"""Skipped blocks are not computed, and no pass begins or ends among them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import D_MODEL, N_LAYERS, assert_near, make_tokenizer
from handpatched import jump_part
from patched_models import SENTENCES, Models, linear, patched, replacement, vectors

import matlens
from matlens import InputError


@pytest.mark.parametrize("name", ["gpt2", "gptj", "bert", "gemma3"])
def test_skipped_blocks_are_not_computed(name: str, small_model: Models) -> None:
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
def test_a_pass_starts_and_stops_where_there_are_vectors(name: str, small_model: Models) -> None:
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


OTHER_BLOCKS = {
    "each returns 3 values": transformers.RwkvConfig(
        vocab_size=60, hidden_size=D_MODEL, num_hidden_layers=2, attention_hidden_size=D_MODEL
    ),
    "not what T5's do": transformers.LongT5Config(
        vocab_size=60, d_model=D_MODEL, d_kv=8, d_ff=48, num_heads=4, num_layers=2, local_radius=4,
        decoder_start_token_id=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", OTHER_BLOCKS)
def test_blocks_with_other_outputs_are_refused(reason: str, tmp_path: Path) -> None:
    config = OTHER_BLOCKS[reason]
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    auto: Any = transformers.AutoModelForSeq2SeqLM if encoder_decoder else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = matlens.load(str(tmp_path), stack="encoder" if encoder_decoder else None, device="cpu")
    with pytest.raises(InputError, match=reason):
        patched(model, [linear(jump_part(0, 1))]).__enter__()


def test_blocks_whose_output_no_hook_sees_are_refused(
    model_folder: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of OpenAI's first GPT as a bridge runs them: they return lists."""
    monkeypatch.setattr("matlens.models.families.gpt1._BLOCKS", "no module")
    model = matlens.load(str(model_folder("gpt1")), device="cpu")
    with pytest.raises(InputError, match=r"hook blocks.[01].hook_out does not fire"):
        patched(model, [linear(jump_part(0, 1))]).__enter__()
    with pytest.raises(InputError, match=r"h\.1, h\.2, h\.3 cannot be collected from OpenAIGPT.* not fire"):
        matlens.collect(model, matlens.make_token_examples(model, [[3, 4, 5]]), progress=False)
    with pytest.raises(InputError, match=r"last block of OpenAIGPT.* hook blocks\.2\.hook_out does not fire"):
        matlens.Readout(model)
