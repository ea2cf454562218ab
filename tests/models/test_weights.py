"""A model's fingerprint changes with every number of its weights, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformer_lens.model_bridge.sources import build_bridge_from_module

import matlens
from matlens.errors import InputError
from matlens.models import weights
from matlens.models.identity import ModelIdentity
from matlens.models.weights import fingerprint, rounded_fingerprints


class TransformerBridge(torch.nn.Module):
    """What a fingerprint is taken of: a module with a configuration."""

    def __init__(self, module: torch.nn.Module, **config: Any) -> None:
        super().__init__()
        self.original_model: Any = module
        self.original_model.config = transformers.PretrainedConfig(**config)


def _changed(model: Any, name: str) -> str:
    parameter = dict(model.original_model.named_parameters())[name]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(1.001).add_(1e-4)
        found = fingerprint(model)
        parameter.copy_(kept)
    return found


def test_fingerprint_changes_with_every_parameter(small_model):
    model = small_model("gpt2")
    names = [name for name, _ in model.original_model.named_parameters()]
    found = [fingerprint(model)] + [_changed(model, name) for name in names]
    assert len(set(found)) == 1 + len(names)
    assert fingerprint(model) == found[0]
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in found)


def _edited(weight: torch.Tensor, dtype: torch.dtype, edit: Callable[[torch.Tensor], Any]) -> tuple[str, str]:
    layer = torch.nn.Linear(3000, 700, bias=False)
    layer.weight.data = weight.to(dtype, copy=True)
    first = fingerprint(TransformerBridge(layer))  # type: ignore[arg-type]
    edit(layer.weight.data)
    return first, fingerprint(TransformerBridge(layer))  # type: ignore[arg-type]


def _swap(w: torch.Tensor, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    kept = w[a].clone()
    w[a] = w[b]
    w[b] = kept


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one number": lambda w: w[311, 1234].add_(0.25),
    "the end of a run": lambda w: w.view(-1)[2**20 - 1].add_(0.25),
    "the last number": lambda w: w[699, 2999].add_(0.25),
    "the last bit": lambda w: w.view(torch.int16)[311, 1235].bitwise_xor_(1),
    "two signs far apart": lambda w: (w[5, 101].neg_(), w[699, 2999].neg_()),
    "two numbers swapped": lambda w: _swap(w, (3, 7), (3, 9)),
    "rows turned around": lambda w: w.copy_(w.flip(0)),
    "up here and down there": lambda w: (w[3, 4].add_(0.5), w[3, 6].sub_(0.5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fingerprint_sees_any_edit(dtype):
    """Edits that keep sums, sets of values or sampled places as they were, through ``.data`` too."""
    weight = torch.randn(700, 3000, generator=torch.Generator().manual_seed(0))
    found = {_edited(weight, dtype, lambda w: None)} | {
        _edited(weight, dtype, edit) for edit in EDITS.values()
    }
    (before,) = {before for before, _ in found}
    assert len({after for _, after in found}) == 1 + len(EDITS)
    assert (before, before) in found


def test_fingerprint_sees_buffers_that_a_checkpoint_holds():
    module = torch.nn.Linear(3, 2)
    module.register_buffer("kept", torch.ones(4))
    module.register_buffer("made", torch.ones(4), persistent=False)
    first = fingerprint(TransformerBridge(module))  # type: ignore[arg-type]
    module.made[1] = 2
    assert fingerprint(TransformerBridge(module)) == first  # type: ignore[arg-type]
    module.kept[1] = 2
    assert fingerprint(TransformerBridge(module)) != first  # type: ignore[arg-type]


def test_half_precisions_are_known_to_be_of_the_same_weights(model_folder, tmp_path):
    folder = model_folder("gpt2")
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    wide, brain, half = (
        ModelIdentity.from_model(matlens.load(str(folder), device="cpu", dtype=kind)) for kind in kinds
    )
    assert [model.dtype for model in (wide, brain, half)] == ["float32", "bfloat16", "float16"]
    assert wide.same_but_rounded(brain)
    assert half.same_but_rounded(wide)
    assert not brain.same_but_rounded(half)
    assert not wide.same_but_rounded(wide)

    other = matlens.load(str(folder), device="cpu", dtype=torch.bfloat16)
    weight = next(other.original_model.parameters())
    weight.data.view(torch.int16)[-1, -1] ^= 1
    assert not wide.same_but_rounded(ModelIdentity.from_model(other))
    # What rounding takes away is not seen in the rounded weights, and seen in those themselves.
    fine = matlens.load(str(folder), device="cpu")
    before = fingerprint(fine), rounded_fingerprints(fine)
    next(fine.original_model.parameters()).data.view(torch.int32)[-1, -1] ^= 1
    assert (fingerprint(fine) != before[0], rounded_fingerprints(fine)) == (True, before[1])


def test_offloaded_weights_are_refused():
    """As accelerate leaves them between two passes: on no device."""
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    whole = matlens.wrap(build_bridge_from_module(plain, "LlamaForCausalLM", hf_config=config))
    assert len(fingerprint(whole)) == 16
    layer = whole.original_model.model.layers[1].mlp
    layer.to("meta")
    for read in (fingerprint, ModelIdentity.from_model, weights.check_finite_weights, matlens.wrap):
        with pytest.raises(
            InputError, match=r"not in memory, including model\.layers\.1\.mlp.* offloaded to the disk"
        ):
            read(whole)
