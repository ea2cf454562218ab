"""Attention left out, with a map in its place in the FFN before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from calibration_texts import WRITERS, logits_without
from conftest import LAYERS, assert_near
from torch.nn.functional import cross_entropy

from matlens import pruning
from matlens.pruning.choosing import choose_attention
from matlens.pruning.layouts import Layout, Streams, full_windows

Models = Callable[[str], Any]
# What of a block is turned to nothing; that of BLOOM adds the stream itself.
ATTENTION = {"gpt2": "attn", "llama": "self_attn", "bloom": "self_attention.dense"}
OUTPUTS = {"gpt2": "attn.c_proj", "llama": "self_attn.o_proj", "bloom": "self_attention.dense"}


@pytest.mark.parametrize("name", ATTENTION)
def test_a_fold_is_what_least_squares_by_hand_gives(name, small_model, plain_model, windows):
    """Block 1 loses its attention: what the FFN before it writes is to be that and attention's sum."""
    pruned = pruning.prune_attention(small_model(name), windows(name), [1], penalty=0.0, progress=False)
    plain, tokens = plain_model(name), full_windows(windows(name))
    layers = plain.get_submodule(LAYERS[name][0])
    writer, output = layers[0].get_submodule(WRITERS[name]), layers[1].get_submodule(OUTPUTS[name])
    reads, writes, added = [], [], []
    hooks = [
        writer.register_forward_hook(
            lambda _, args, out: (reads.append(args[0].detach()), writes.append(out.detach()), None)[2]
        ),
        output.register_forward_hook(lambda _, __, out: added.append(out.detach())),
    ]
    with torch.no_grad():
        plain(tokens)
    for hook in hooks:
        hook.remove()
    a, m, more = (torch.cat(x).flatten(0, -2).double().numpy() for x in (reads, writes, added))
    a = a if writer.bias is None else np.hstack([a, np.ones((len(a), 1))])
    expected = a @ np.linalg.lstsq(a, m + more, rcond=None)[0]
    ours = pruned.model.get_submodule(LAYERS[name][0])[0].get_submodule(WRITERS[name])
    read = torch.cat(reads).flatten(0, -2)
    with torch.no_grad():
        assert_near(ours(read), torch.from_numpy(expected).float(), 1e-4)
    assert pruned.attention == (1,)
    assert not pruned.blocks


@pytest.mark.parametrize("name", ATTENTION)
def test_the_model_is_what_a_patched_pass_is(name, small_model, windows):
    """The folded matrices put into the whole model, whose attention is turned to nothing by hooks."""
    pruned = pruning.prune_attention(
        small_model(name), windows(name), [1, 2], method="replaceme", progress=False
    )
    tokens = full_windows(windows(name))[:4]
    whole = pruning.plain_copy(small_model(name))
    layers, folded = (model.get_submodule(LAYERS[name][0]) for model in (whole, pruned.model))
    for block in (0, 1):
        writer = layers[block].get_submodule(WRITERS[name])
        writer.load_state_dict(folded[block].get_submodule(WRITERS[name]).state_dict())
    attention = [layers[block].get_submodule(ATTENTION[name]) for block in (1, 2)]
    expected = logits_without(whole, attention, tokens, nothing=True)
    with torch.no_grad():
        assert_near(pruned.model(tokens).logits, expected, 1e-5)
    assert float((expected - logits_without(whole, [], tokens)).abs().max()) > 1e-3


def test_the_attention_with_the_least_loss_is_chosen(small_model, plain_model, windows):
    plain, tokens = plain_model("llama"), full_windows(windows("llama"))
    streams = Streams(Layout.from_model(small_model("llama")), tokens, progress=False)
    losses = {}
    for i in (1, 2):
        logits = logits_without(plain, [plain.model.layers[i].self_attn], tokens, nothing=True)
        losses[i] = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert choose_attention(streams, 1, progress=False) == (min(losses, key=losses.__getitem__),)
    assert choose_attention(streams, 2, progress=False) == (1, 2), "every block after the first"
