"""Healing trains the folded matrices alone, towards what the whole model says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calibration_texts import WRITERS
from conftest import LAYERS, assert_near

import matlens
from matlens import InputError, pruning
from matlens.pruning import folding
from matlens.pruning.layouts import Layout, Streams, full_windows

Models = Callable[[str], Any]


def divergence(whole: Any, pruned: Any, tokens: torch.Tensor) -> torch.Tensor:
    truth, given = (model(tokens).logits.log_softmax(-1) for model in (whole, pruned))
    return torch.nn.functional.kl_div(given, truth, log_target=True, reduction="none").sum(-1).mean()


def test_steps_grow_for_a_tenth_of_the_updates_and_then_fall(small_model, plain_model, windows, monkeypatch):
    folded = pruning.prune(
        small_model("gpt2"), windows("gpt2"), [2], method="replaceme", progress=False
    ).model
    tokens = full_windows(windows("gpt2"))
    streams = Streams(Layout.from_model(small_model("gpt2")), tokens, progress=False)
    by_hand, whole, losses = copy.deepcopy(folded), plain_model("gpt2"), list[float]()
    weight = by_hand.get_parameter("transformer.h.1.mlp.c_proj.weight")
    bias = by_hand.get_parameter("transformer.h.1.mlp.c_proj.bias")
    optimizer = torch.optim.Adam([weight, bias])
    texts = folding._order(len(tokens), 30 * (size := 1024 // 24), 2).split(size)
    for step, rate in enumerate([1 / 3, 2 / 3, 1, *[1] * 27]):
        optimizer.param_groups[0]["lr"] = 1e-3 * rate * (30 - step) / 30
        optimizer.zero_grad()
        loss = divergence(whole, by_hand, tokens[texts[step]])
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    monkeypatch.setattr(folding, "RATE", 1e-3)
    healed = folding.heal(streams, folded, [2], "replaceme", 24 * 30 * size, seed=2, progress=False)
    assert healed.divergence == pytest.approx(sum(losses[-3:]) / 3, rel=1e-3)
    expected = by_hand.state_dict()
    for name, tensor in folded.state_dict().items():
        if name.startswith("transformer.h.1.mlp.c_proj"):
            assert_near(tensor, expected[name], 1e-3)
        else:
            assert torch.equal(tensor, expected[name]), name
    assert all(weight.grad is None and weight.requires_grad for weight in folded.parameters())


@pytest.mark.parametrize(("method", "places"), [("refit", (0, 2)), ("chain", (0, 1, 2, 3))])
def test_of_several_spans_the_changed_matrices_alone_are_healed(method, places, small_model, windows):
    """Where blocks before a changed one are gone, it has another number in the pruned model."""
    asked = small_model("llama-deep"), windows("llama-deep"), [1, 4]
    before, after = (pruning.prune(*asked, method=method, heal=n, progress=False).model for n in (0, 60))
    state = before.state_dict()
    changed = {key for key, value in after.state_dict().items() if not torch.equal(value, state[key])}
    assert changed == {f"model.layers.{place}.mlp.down_proj.weight" for place in places}


def test_what_cannot_be_healed_is_refused(small_model, windows):
    asked = small_model("llama"), windows("llama")
    with pytest.raises(InputError, match="heal needs blocks"):
        pruning.prune(*asked, [1], method="out", heal=10, progress=False)
    with pytest.raises(InputError, match="heal needs blocks"):
        pruning.prune(*asked, 0, heal=10, progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_healed_in_small_steps(dtype, model_folder, windows, monkeypatch):
    """Steps far below what bfloat16 can tell add up, and squares below the least of float16 do no harm."""
    half = matlens.load(str(model_folder("llama")), dtype=dtype, device="cpu")
    streams = Streams(Layout.from_model(half), full_windows(windows("llama")), progress=False)
    folded = pruning.prune(half, windows("llama"), [2], method="replaceme", progress=False).model
    writer = folded.get_submodule(f"{LAYERS['llama'][0]}.1.{WRITERS['llama']}")
    before = writer.weight.clone()
    monkeypatch.setattr(folding, "RATE", 1e-5)
    folding.heal(streams, folded, [2], "replaceme", 60 * 1024, progress=False)
    assert writer.weight.dtype == dtype
    assert bool(writer.weight.isfinite().all())
    assert float((writer.weight != before).float().mean()) > 0.5
