"""The cache gives what the model gives, bit by bit; changed files, other models and damage are noticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import D_MODEL, load_plain
from safetensors.torch import load_file, save_file

import matlens
from matlens.errors import InputError
from matlens.ffn import catalogue as module
from matlens.ffn.catalogue import Catalogue, Reading
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors
from matlens.io.cache import default_cache
from matlens.models.identity import ModelIdentity

MADE: dict[Reading, Callable[[Any], Projection]] = {
    "plain": Projection.from_model, "head": Projection.through_head
}  # fmt: skip


@pytest.fixture
def folder(request, model_folder, tmp_path, monkeypatch):
    """A folder of a model, and a cache, of this test alone."""
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(model_folder(getattr(request, "param", "llama")), tmp_path / "model"))


def entries() -> list[Any]:
    cache = default_cache()
    assert cache is not None
    return cache.entries()


@pytest.mark.parametrize("folder", ["gpt2", "bert", "granite", "olmo2"], indirect=True)
def test_the_cache_gives_what_the_model_gives(folder, monkeypatch):
    _ = Catalogue(folder, device="cpu").values
    model = matlens.load(folder, device="cpu")
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("the model is loaded"))
    ours, values = Catalogue(folder, device="cpu"), ValueVectors(model)
    assert (len(ours.values), ours.values.d_mlp) == (len(values), values.d_mlp)
    assert ours.values.identity == ModelIdentity.from_model(model).of_weights
    assert ours.values.output_kind == values.output_kind
    for layer in range(values.n_layers):
        assert torch.equal(ours.values.layer(layer), values.layer(layer))
        assert torch.equal(ours.values.bias(layer), values.bias(layer))
    with pytest.raises(InputError, match=r"from the cache, without norms. Use ValueVectors\(model\)"):
        ours.values.matrix(0)
    for reading, make in MADE.items():
        projection, expected = ours.projection(reading), make(model)
        assert projection.identity == expected.identity
        table = projection.table(ours.values, ["L1D7", "L-1D0"], k=4)
        assert table.equals(expected.table(values, ["L1D7", "L-1D0"], k=4))
        top = expected.top_of_all(values, 5, progress=False)
        for attempt in range(2):
            with monkeypatch.context() as patch:
                if attempt:
                    patch.setattr(Projection, "top_of_all", lambda *_, **__: pytest.fail("computed again"))
                cached = Catalogue(folder, device="cpu").top_tokens(reading, k=5, progress=False)
            assert torch.equal(cached.ids, top.ids)
            assert torch.equal(cached.scores, top.scores)


def test_a_model_in_memory_is_read_itself(folder):
    Catalogue(folder, device="cpu").projection()
    model = matlens.load(folder, device="cpu")
    with torch.no_grad():
        model.blocks[1].mlp.out.original_component.weight.add_(1)
        model.unembed.original_component.weight.mul_(2)
    ours = Catalogue(model)
    assert torch.equal(ours.values.layer(1), ValueVectors(model).layer(1))
    top = ours.top_tokens(k=3, progress=False)
    expected = Projection.from_model(model).top_of_all(ValueVectors(model), 3, progress=False)
    assert torch.equal(top.scores, expected.scores)
    assert not any(entry.kind == "tops" for entry in entries())


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_precisions_and_stacks_have_entries_of_their_own(folder):
    kinds = (("encoder", torch.float32), ("decoder", torch.float32), ("decoder", torch.bfloat16))
    options: list[dict[str, Any]] = [
        {"device": "cpu", "dtype": dtype, "stack": stack} for stack, dtype in kinds
    ]
    models = [matlens.load(folder, **of_kind) for of_kind in options]
    for model, of_kind in 2 * list(zip(models, options, strict=True)):
        ours = Catalogue(folder, **of_kind).values
        assert ours.identity == ModelIdentity.from_model(model).of_weights
        assert torch.equal(ours.layer(0), ValueVectors(model).layer(0))


def test_a_changed_file_is_another_model(folder):
    before = Catalogue(folder, device="cpu").values
    path, weight = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(path)
    tensors[weight] = tensors[weight] + 1
    path.unlink()  # models that are loaded still read the old file
    save_file(tensors, path, metadata={"format": "pt"})
    after = Catalogue(folder, device="cpu").values
    assert before.identity.fingerprint != after.identity.fingerprint
    assert torch.equal(after.layer(1), before.layer(1) + 1)


@pytest.mark.parametrize("folder", ["opt-narrow"], indirect=True)
def test_an_unembedding_of_two_matrices_is_their_product(folder):
    plain = load_plain("opt-narrow", folder)
    expected = plain.lm_head.weight.detach() @ plain.model.decoder.project_out.weight.detach()
    assert expected.shape == (60, D_MODEL)
    for _ in range(2):
        catalogue = Catalogue(folder, device="cpu")
        torch.testing.assert_close(catalogue.projection("plain").unembedding, expected)
        table = catalogue.projection("plain").table(catalogue.values, ["L1D3"], k=2)
        value = plain.model.decoder.layers[1].fc2.weight.detach()[:, 3]
        assert table["token_id"][0] == int((expected @ value).argmax())
    for reading in ("norm", "head"):
        with pytest.raises(InputError, match="has no final norm"):
            catalogue.projection(reading)
