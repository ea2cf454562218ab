"""Falcon's newer blocks are computed as transformers computes them, and refused where a bridge does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bridged import TOKENS, boot, logits
from conftest import assert_near, make_tokenizer
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformers import FalconConfig, FalconForCausalLM

import matlens
from matlens import InputError
from matlens.models.layout import ModelLayout

Models = Callable[[str], Any]

NEWER = {
    "groups with biases": {"num_kv_heads": 2, "bias": True, "multi_query": False},
    "a key for each query": {"num_kv_heads": 4, "multi_query": False},
    "one norm": {"num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "distances": {"num_kv_heads": 2, "alibi": True, "bias": True},
}


def save_newer(folder: Path, settings: dict[str, Any]) -> Any:
    """A Falcon with newer blocks, of which no weight is 0 or 1, and what transformers reads of it."""
    sizes = {"vocab_size": 67, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    plain = FalconForCausalLM(FalconConfig(**sizes, **ids, new_decoder_architecture=True, **settings))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    plain.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return FalconForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("settings", NEWER.values(), ids=NEWER)
def test_newer_falcons_are_the_model_that_transformers_loads(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Queries, keys and values by groups; and what a model writes with a cache of them."""
    plain = save_newer(tmp_path, settings)
    model = matlens.load(str(tmp_path), device="cpu")
    assert_near(logits(model), logits(plain))
    layout = ModelLayout.from_model(model)
    assert layout.wiring.name == "parallel"
    assert ("ln2_out" in layout.kinds) == (settings.get("num_ln_in_parallel_attn") != 1)
    _, seen = model.run_with_cache(TOKENS[:1])
    attention, given = plain.transformer.h[1].self_attention, seen["blocks.1.attn.hook_in"]
    # As transformers' `_split_heads`.
    heads = settings["num_kv_heads"], 4 // settings["num_kv_heads"] + 2, 10
    by_hand = attention.query_key_value(given).detach().unflatten(-1, heads)
    assert_near(seen["blocks.1.attn.q.hook_out"].flatten(2), by_hand[..., :-2, :].flatten(2))
    assert_near(seen["blocks.1.attn.k.hook_out"].flatten(2), by_hand[..., -2, :].flatten(2))
    assert_near(seen["blocks.1.attn.v.hook_out"].flatten(2), by_hand[..., -1, :].flatten(2))
    made = model.generate(
        TOKENS[:1], 5, stop_at_eos=False, do_sample=False, verbose=False, return_type="tokens"
    )
    expected = TOKENS[:1]
    for _ in range(5):
        expected = torch.cat([expected, plain(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, expected)


def test_a_newer_falcon_that_a_bridge_takes_for_another_model_is_refused(tmp_path: Path) -> None:
    """Where each query has a key, the rows can be taken in the wrong order without an error."""
    plain = save_newer(tmp_path, NEWER["a key for each query"])
    bridge = boot(tmp_path)
    apart = float((logits(bridge) - logits(plain)).abs().max())
    assert apart > 0.1 * float(logits(plain).abs().max())
    with pytest.raises(InputError, match=r"queries, keys and values from other rows.*matlens\.load"):
        matlens.wrap(bridge)


def test_the_adapter_of_others_is_as_it_was(model_folder: Models) -> None:
    before = ArchitectureAdapterFactory._adapters["FalconForCausalLM"]
    matlens.load(str(model_folder("falcon-new")), device="cpu")
    assert ArchitectureAdapterFactory._adapters["FalconForCausalLM"] is before
    with pytest.raises(RuntimeError, match="split_sizes"):  # else there is nothing left to put right
        boot(model_folder("falcon-new"))
