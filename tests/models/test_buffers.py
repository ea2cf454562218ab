"""Buffers that no checkpoint holds, and settings of bridges, are named where they were changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_sentences

import matlens
from matlens import InputError
from matlens.models.changes import changes_of
from matlens.models.identity import ModelIdentity, Provenance

BUFFERS = {
    "llama": "model.rotary_emb.inv_freq",
    "gptj": "transformer.h.1.attn.embed_positions",
    "gemma3": "model.embed_tokens.embed_scale",
    "bert": "bert.embeddings.position_ids",
}


def buffer_of(model: Any, name: str) -> torch.Tensor:
    there = dict(model.original_model.named_buffers())
    (found,) = (values for path, values in there.items() if path.replace("_original_component.", "") == name)
    return found


def changed(model: Any, name: str) -> None:
    values = buffer_of(model, name)
    values.copy_(values * 1.01 if values.is_floating_point() else values.flip(-1))


@pytest.mark.parametrize("kind", BUFFERS)
def test_other_numbers_in_a_buffer_are_another_model(kind: str, model_folder: Callable[[str], Path]) -> None:
    model = matlens.load(str(model_folder(kind)), device="cpu")
    examples = matlens.make_examples(model, make_sentences()).head(4)
    plain = matlens.collect(model, examples, ["h.3"], progress=False)
    changed(model, BUFFERS[kind])
    names = changes_of(model)
    assert any(f"other numbers in the buffer {BUFFERS[kind]} " in name for name in names)
    other = matlens.collect(model, examples, ["h.3"], progress=False)
    assert not torch.equal(torch.as_tensor(plain["h.3"]), torch.as_tensor(other["h.3"]))
    with pytest.raises(InputError, match="other numbers in the buffer"):
        plain.provenance.check_same(other.provenance, ours="the vectors")
    assert changes_of(copy.deepcopy(model)) == names
    changed(model, BUFFERS[kind])
    assert changes_of(model) != names  # another change has another name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", BUFFERS)
def test_another_precision_is_no_change(
    kind: str, dtype: torch.dtype, model_folder: Callable[[str], Path]
) -> None:
    model = matlens.load(str(model_folder(kind)), device="cpu")
    model.original_model.to(dtype)
    state = torch.random.get_rng_state()
    assert changes_of(model) == ()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_settings_that_a_bridge_reads_are_its_own(model_folder: Callable[[str], Path]) -> None:
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    before = ModelIdentity.from_model(model)
    model.cfg.n_heads = 2
    assert changes_of(model) == ("the setting n_heads=2 of the bridge, which was 4",)
    assert changes_of(copy.deepcopy(model)) == changes_of(model)
    with pytest.raises(InputError, match="n_heads=2"):
        Provenance(before).check_same(ModelIdentity.from_model(model), ours="the maps")
    model.cfg.n_heads = 4
    assert changes_of(model) == ()
