"""Value vectors are the plain model's own weights, by name and layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import D_MODEL, LAYERS, N_LAYERS, SITE_MODULES, WIRINGS, assert_near, load_plain, save_model
from plain_values import D_MLP, plain_matrix, plain_unembedding, plain_values

import matlens
from matlens import InputError
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVectors

Models = Callable[[str], Any]
Folders = Callable[[str], Path]


@pytest.mark.parametrize("name", WIRINGS)
def test_vectors_are_the_rows_of_the_plain_output_matrix(name, small_model, plain_model):
    values, plain = ValueVectors(small_model(name)), plain_model(name)
    assert (values.n_layers, values.d_mlp, values.d_model) == (N_LAYERS, D_MLP[name], D_MODEL)
    for layer in range(N_LAYERS):
        assert torch.equal(values.matrix(layer), plain_matrix(name, plain, layer))
        assert_near(values.layer(layer), plain_values(name, plain, layer), 1e-6)
        assert_near(values.norms(layer), plain_values(name, plain, layer).norm(dim=1), 1e-6)
        module = plain.get_submodule(LAYERS[name][0])[layer].get_submodule(SITE_MODULES[name]["ffn_post"][0])
        expected = torch.zeros(D_MODEL) if module.bias is None else module.bias.detach()
        assert torch.equal(values.bias(layer), expected)
    chosen = values.vectors(["L2D5", (0, 3), "L-1D-1"])
    rows = [plain_values(name, plain, layer)[index] for layer, index in ((2, 5), (0, 3), (-1, -1))]
    assert_near(chosen, torch.stack(rows), 1e-6)
    last = f"L{N_LAYERS - 1}D{D_MLP[name] - 1}"
    assert str(values.resolve("L-1D-1")) == str(values.at(len(values) - 1)) == last
    assert str(values.at(D_MLP[name])) == "L1D0"


@pytest.mark.parametrize("wrong", ["L3D0", "L-4D0", "L0D48", "L0D-49", "L0E0D1"])
def test_names_outside_the_model_are_refused(wrong, small_model):
    with pytest.raises(InputError, match=r"^(layer|index) must be between|There is no value vector"):
        ValueVectors(small_model("llama")).resolve(wrong)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_half_precision_is_read_in_float32(name, model_folder):
    model = matlens.load(str(model_folder(name)), device="cpu", dtype=torch.bfloat16)
    plain = load_plain(name, model_folder(name), dtype=torch.bfloat16)
    values, read = ValueVectors(model), Projection.from_model(model)
    assert torch.equal(values.layer(1), plain_values(name, plain, 1).float())
    expected = plain_values(name, plain, 1).float() @ plain_unembedding(plain).float().T
    assert_near(read.scores(values.layer(1)), expected, 1e-6)
    assert Projection.after_norm(model).scores(values.layer(1)).dtype == torch.float32
    assert {parameter.dtype for parameter in model.original_model.parameters()} == {torch.bfloat16}


def test_weights_that_the_layer_does_not_use_as_they_are_are_refused(model_folder):
    """As with packed weights and adapters, the layer computes more than its weight says."""
    model = matlens.load(str(model_folder("llama")), device="cpu")
    layer = model.blocks[1].mlp.out.original_component
    usual = layer.forward
    layer.forward = lambda x: usual(x) * 1.01
    with pytest.raises(InputError, match=r"not a plain matrix of 48 x 32.*without quantization or adapters"):
        ValueVectors(model)


@pytest.mark.parametrize(
    ("name", "edited"), [("gpt2", "mlp.out"), ("gemma3", "ln2_post"), ("olmo2", "ln2_post"), ("olmoe", "mlp")]
)
def test_edited_weights_are_noticed(name, edited, model_folder):
    """Also those of a norm after the FFN, which the value vectors pass through."""
    model = matlens.load(str(model_folder(name)), device="cpu")
    values = ValueVectors(model)
    next(model.blocks[1].get_submodule(edited).parameters()).data.view(-1)[0] += 0.5
    for read in (
        values.layer,
        values.bias,
        lambda layer: values.vectors([values.at(0), values.vector(layer, 0)]),
    ):
        with pytest.raises(InputError, match="have changed since the object of value vectors was made"):
            read(1)
    assert values.layer(0).shape == (values.d_mlp, D_MODEL)


def test_models_that_cannot_be_read_are_refused(small_model, model_folder):
    with pytest.raises(InputError, match=r"no known value vectors \(its blocks are stream-only\)"):
        ValueVectors(small_model("bloom"))
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    del model._modules["ln_final"]
    with pytest.raises(InputError, match="has no final norm"):
        Projection.after_norm(model)
    del model._modules["unembed"]
    with pytest.raises(InputError, match=r"has no unembedding.*ForCausalLM or \.\.\.ForMaskedLM"):
        Projection.from_model(model)
    folded = matlens.load(str(model_folder("gpt2")), device="cpu")
    folded.enable_compatibility_mode(disable_warnings=True)
    for read in (ValueVectors, Projection.from_model):
        with pytest.raises(InputError, match="compatibility mode"):
            read(folded)


def test_random_vectors_have_the_layers_moments_and_depend_on_the_seed_alone(small_model):
    values = ValueVectors(small_model("gpt2"))
    sampled, real = values.random(1, 50_000, seed=4), values.layer(1)
    deviation = real.std(0)
    assert ((sampled.mean(0) - real.mean(0)).abs() / deviation).max() < 0.03
    assert ((sampled.std(0) - deviation).abs() / deviation).max() < 0.03
    assert torch.equal(sampled[:3], values.random(-2, 50_000, seed=4)[:3])
    for other in (values.random(1, 5, seed=5), values.random(0, 5, seed=4)):
        assert not torch.allclose(sampled[:5], other)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_square_output_matrices_are_not_transposed(name, tmp_path):
    """Where d_mlp is d_model, only what the layer computes tells rows from columns."""
    torch.manual_seed(0)
    folder = save_model(name, tmp_path)
    plain = load_plain(name, folder)
    setattr(plain.config, "n_inner" if name == "gpt2" else "intermediate_size", D_MODEL)
    plain = type(plain)(plain.config)
    plain.save_pretrained(folder)
    values = ValueVectors(matlens.load(str(folder), device="cpu"))
    assert values.d_mlp == values.d_model == D_MODEL
    assert torch.equal(values.layer(1), plain_values(name, plain, 1))
