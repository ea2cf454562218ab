"""Blocks left out and maps folded in: what is built equals what patched passes and folds by hand give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from calibration_texts import WRITERS, logits_without
from conftest import LAYERS, N_LAYERS, assert_near, plain_vectors

import matlens
from matlens import InputError, ffn, pruning
from matlens.pruning.layouts import full_windows

Models = Callable[[str], Any]
FAMILIES = ("gpt2", "llama", "neox", "falcon-alibi")
TOKENS = torch.tensor([[7, 3, 41, 12, 12, 59, 30, 22, 8, 17]])


def logits(model: Any) -> torch.Tensor:
    return logits_without(model, [], TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fold_is_least_squares_by_hand_and_the_rest_is_as_it_was(name, small_model, plain_model, windows):
    pruned = pruning.prune(
        small_model(name), windows(name), [1], method="refit", penalty=0.0, progress=False
    ).model
    plain, tokens, reads, writes = plain_model(name), full_windows(windows(name)), [], []
    writer = plain.get_submodule(LAYERS[name][0])[0].get_submodule(WRITERS[name])
    hook = writer.register_forward_hook(
        lambda _, args, out: (reads.append(args[0]), writes.append(out.clone()), None)[2]
    )
    seen = plain_vectors(name, plain, tokens)
    hook.remove()
    a, m, before, after = (x.flatten(0, -2).double() for x in (*reads, *writes, seen["h.1"], seen["h.2"]))
    read = a if writer.bias is None else torch.cat([a, torch.ones(len(a), 1)], 1)
    written = read @ torch.linalg.lstsq(read, after - (before - m), driver="gelsd").solution
    whole = pruning.plain_copy(small_model(name))
    blocks, left = (model.get_submodule(LAYERS[name][0]) for model in (whole, pruned))
    folded = left[0].get_submodule(WRITERS[name])
    with torch.no_grad():
        assert_near(folded(a.float()), written.float(), 1e-4)
    blocks[0].get_submodule(WRITERS[name]).load_state_dict(folded.state_dict())
    assert len(left) == N_LAYERS - 1 == pruned.config.num_hidden_layers
    assert_near(logits(pruned), logits_without(whole, [blocks[1]], TOKENS), 1e-5)
    assert float((logits(pruned) - logits(plain)).abs().max()) > 1e-3


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("neox", torch.float16)])
def test_half_precision_is_folded_and_stays(name, dtype, model_folder, small_model, windows, tmp_path):
    """As in float32 but for rounding, in memory as in the folder; what cannot be folded is seen as ever."""
    half = matlens.load(str(model_folder(name)), dtype=dtype, device="cpu")
    pruned = pruning.prune(half, windows(name), [1], progress=False)
    assert {weight.dtype for weight in pruned.model.parameters()} == {dtype}
    full = pruning.prune(small_model(name), windows(name), [1], progress=False)
    assert_near(logits(pruned.model).float(), logits(full.model), 0.02)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        pruning.save_pruned(pruned, tmp_path / "model"), dtype="auto"
    ).eval()
    assert torch.equal(logits(loaded), logits(pruned.model))
    buffers = dict(loaded.named_buffers())
    assert {key: buffer.dtype for key, buffer in pruned.model.named_buffers()} == {
        key: buffer.dtype for key, buffer in buffers.items()
    }
    for key, buffer in pruned.model.named_buffers():
        assert torch.equal(buffer, buffers[key]), key


@pytest.mark.parametrize("name", ["gpt1", "olmoe"])
def test_blocks_are_left_out_where_nothing_can_be_folded(name, small_model, windows, model_folder, tmp_path):
    """GPT-1 has norms after the FFN, OLMoE experts; `out` folds nothing."""
    for other, prune in (
        ("gemma2", pruning.prune), ("granite", pruning.prune), ("neox", pruning.prune_attention)
    ):  # fmt: skip
        with pytest.raises(InputError, match="model must"):
            prune(small_model(other), windows(other), [1], progress=False)
    with pytest.raises(InputError, match=r"model must|Use method='out'"):
        pruning.prune(small_model(name), windows(name), [1], progress=False)
    pruned = pruning.prune(small_model(name), windows(name), 1, method="out", progress=False)
    by_hand = transformers.AutoModelForCausalLM.from_pretrained(model_folder(name)).eval()
    (gone,) = pruned.blocks
    del by_hand.get_submodule(LAYERS[name][0])[gone]
    assert_near(logits(pruned.model), logits(by_hand), 1e-6)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        pruning.save_pruned(pruned, tmp_path / "model")
    )
    assert_near(logits(loaded.eval()), logits(pruned.model), 1e-6)


def test_a_model_that_is_changed_is_refused(small_model, windows):
    model = small_model("llama")
    with (
        ffn.controlled(model, ["L1D3"], 2.0),
        pytest.raises(InputError, match="outside the context"),
    ):
        pruning.prune(model, windows("llama"), [1], progress=False)
