"""Blocks left out and maps folded in: what is built equals what patched passes and folds by hand give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibration_texts import WRITERS
from conftest import LAYERS, N_LAYERS, assert_near, plain_vectors

import matlens
from matlens import InputError, ffn, pruning

Models = Callable[[str], Any]
FAMILIES = ("gpt2", "llama", "neox", "falcon-alibi")
TOKENS = torch.tensor([[7, 3, 41, 12, 12, 59, 30, 22, 8, 17]])


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fold_is_what_least_squares_by_hand_gives(name, small_model, plain_model, windows):
    """The block before the span keeps all but its output matrix, which is solved for here by numpy alone."""
    pruned = pruning.prune(small_model(name), windows(name), [1], penalty=0.0, progress=False)
    plain = plain_model(name)
    blocks = plain.get_submodule(LAYERS[name][0])
    writer = blocks[0].get_submodule(WRITERS[name])
    reads, writes, streams = [], [], []
    examples = windows(name)

    def listen(_: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        reads.append(args[0])
        writes.append(output.clone())

    hook = writer.register_forward_hook(listen)
    for start in examples.offsets[:-1]:
        tokens = torch.from_numpy(examples.tokens[start : start + 24]).long()
        if len(tokens) == 24:
            seen = plain_vectors(name, plain, tokens)
            streams.append((seen["h.1"], seen["h.2"]))
    hook.remove()
    a = torch.cat([x.reshape(-1, x.shape[-1]) for x in reads]).double().detach().numpy()
    m = torch.cat([x.reshape(-1, x.shape[-1]) for x in writes]).double().detach().numpy()
    before, after = (torch.cat([pair[i][0] for pair in streams]).double().numpy() for i in (0, 1))
    right = after - (before - m)
    read = a if writer.bias is None else np.hstack([a, np.ones((len(a), 1))])
    written = read @ np.linalg.lstsq(read, right, rcond=None)[0]
    ours = pruned.model.get_submodule(LAYERS[name][0])[0].get_submodule(WRITERS[name])
    with torch.no_grad():
        assert_near(ours(torch.from_numpy(a).float()), torch.from_numpy(written).float(), 1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_what_a_patched_pass_is(name, small_model, plain_model, windows):
    """The folded matrix put into the whole model, whose block after it gives what it is given."""
    pruned = pruning.prune(small_model(name), windows(name), [1], method="replaceme", progress=False)
    whole = pruning.plain_copy(small_model(name))
    blocks = whole.get_submodule(LAYERS[name][0])
    folded = pruned.model.get_submodule(LAYERS[name][0])
    blocks[0].load_state_dict(folded[0].state_dict())

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        h = args[0] if args else kwargs["hidden_states"]
        return (h, *output[1:]) if isinstance(output, tuple) else h

    jump = blocks[1].register_forward_hook(keep, with_kwargs=True)
    expected = logits(whole)
    jump.remove()
    assert len(folded) == N_LAYERS - 1 == pruned.model.config.num_hidden_layers
    assert_near(logits(pruned.model), expected, 1e-5)
    assert float((logits(pruned.model) - logits(plain_model(name))).abs().max()) > 1e-3


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


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_what_stands_between_the_matrix_and_the_stream_is_named(name, small_model, model_folder, windows):
    """Also in half precision."""
    half = matlens.load(str(model_folder(name)), dtype=torch.bfloat16, device="cpu")
    for model in (small_model(name), half):
        with pytest.raises(InputError, match="model must"):
            pruning.prune(model, windows(name), [1], progress=False)


@pytest.mark.parametrize("name", ["gpt1", "olmoe"])
def test_blocks_are_left_out_where_nothing_can_be_folded(name, small_model, windows, model_folder, tmp_path):
    """GPT-1 has norms after the FFN, OLMoE experts; `out` folds nothing."""
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
