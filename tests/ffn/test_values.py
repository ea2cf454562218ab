"""Value vectors are the plain model's own weights, by name and layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    ARCHITECTURES,
    D_MODEL,
    LAYERS,
    N_LAYERS,
    SITE_MODULES,
    WIRINGS,
    assert_near,
    load_plain,
    save_model,
)
from plain_values import D_MLP, plain_matrix, plain_unembedding, plain_values

import matlens
from matlens import InputError
from matlens.ffn.projection import Projection
from matlens.ffn.values import ValueVector, ValueVectors

# Names


@pytest.mark.parametrize(("text", "value"), [
    ("L0D0", ValueVector(0, 0)), ("L12D3071", ValueVector(12, 3071)), ("l3d5", ValueVector(3, 5)),
    ("L-1D-2", ValueVector(-1, -2)),
    ((4, 7), ValueVector(4, 7)), ([4, 7], ValueVector(4, 7)), (ValueVector(1, 2), ValueVector(1, 2)),
])  # fmt: skip
def test_names_are_read_and_written(text: Any, value: ValueVector) -> None:
    assert ValueVector.parse(text) == value
    assert ValueVector.parse(str(value)) == value


@pytest.mark.parametrize(
    "text", ["", "L3", "D3", "3D4", "L3D", "L3.D4", "L3D4 ", "L1D2D3", (1,), (1, 2, 3), (1.0, 2), 7, None]
)
def test_what_is_no_name_says_what_is(text: Any) -> None:
    with pytest.raises(InputError, match=r"^text must be|is not a value vector"):
        ValueVector.parse(text)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ranges_are_those_of_the_model(name: str, small_model: Callable[[str], Any]) -> None:
    values = ValueVectors(small_model(name))
    assert (values.n_layers, values.d_mlp, values.d_model) == (N_LAYERS, D_MLP[name], D_MODEL)
    assert len(values) == N_LAYERS * D_MLP[name]
    assert str(values.resolve("L-1D-1")) == f"L{N_LAYERS - 1}D{D_MLP[name] - 1}"
    assert [str(values.at(row)) for row in (0, D_MLP[name], len(values) - 1)] == [
        "L0D0", "L1D0", f"L{N_LAYERS - 1}D{D_MLP[name] - 1}",
    ]  # fmt: skip
    for wrong, message in [
        (f"L{N_LAYERS}D0", f"Layer {N_LAYERS} is out of range: .* in the layers 0 to {N_LAYERS - 1}"),
        (f"L-{N_LAYERS + 1}D0", f"Layer -{N_LAYERS + 1} is .* in the layers 0 to {N_LAYERS - 1}"),
        (f"L0D{D_MLP[name]}", f"of L0D{D_MLP[name]} is out of range: .* vectors 0 to {D_MLP[name] - 1}"),
    ]:
        with pytest.raises(InputError, match=message):
            values.resolve(wrong)
    for one in ("L0D4", values.at(4)):
        with pytest.raises(InputError, match="must be a list"):
            values.vectors(one)


# Weights


@pytest.mark.parametrize("name", WIRINGS)
def test_vectors_are_the_rows_of_the_plain_output_matrix(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    values, plain = ValueVectors(small_model(name)), plain_model(name)
    for layer in range(N_LAYERS):
        assert torch.equal(values.matrix(layer), plain_matrix(name, plain, layer))
        assert_near(values.layer(layer), plain_values(name, plain, layer), 1e-6)
        assert_near(values.norms(layer), plain_values(name, plain, layer).norm(dim=1), 1e-6)
        module = plain.get_submodule(LAYERS[name][0])[layer].get_submodule(SITE_MODULES[name]["ffn_post"][0])
        expected = torch.zeros(D_MODEL) if module.bias is None else module.bias.detach()
        assert torch.equal(values.bias(layer), expected)
        assert bool(expected.any()) == (name not in ("llama", "gemma2", "gemma3", "granite", "olmo2"))
    chosen = values.vectors(["L2D5", (0, 3), "L-1D-1"])
    rows = [plain_values(name, plain, layer)[index] for layer, index in ((2, 5), (0, 3), (-1, -1))]
    assert_near(chosen, torch.stack(rows), 1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_square_output_matrices_are_not_turned_round(name: str, tmp_path: Path) -> None:
    """Where d_mlp is d_model, only what the layer does tells rows from columns."""
    torch.manual_seed(0)
    folder = save_model(name, tmp_path)
    plain = load_plain(name, folder)
    config = plain.config
    setattr(config, "n_inner" if name == "gpt2" else "intermediate_size", D_MODEL)
    plain = type(plain)(config)
    plain.save_pretrained(folder)
    values = ValueVectors(matlens.load(str(folder), device="cpu"))
    assert values.d_mlp == values.d_model == D_MODEL
    assert torch.equal(values.layer(1), plain_values(name, plain, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_half_precision_is_read_in_float32(
    name: str, dtype: torch.dtype, model_folder: Callable[[str], Path]
) -> None:
    model = matlens.load(str(model_folder(name)), device="cpu", dtype=dtype)
    plain = load_plain(name, model_folder(name), dtype=dtype)
    values, read = ValueVectors(model), Projection.from_model(model)
    assert torch.equal(values.layer(1), plain_values(name, plain, 1).float())
    expected = plain_values(name, plain, 1).float() @ plain_unembedding(plain).float().T
    assert read.scores(values.layer(1)).dtype == values.norms(1).dtype == torch.float32
    assert_near(read.scores(values.layer(1)), expected, 1e-6)
    assert Projection.after_norm(model).scores(values.layer(1)).dtype == torch.float32
    assert {parameter.dtype for parameter in model.original_model.parameters()} == {dtype}


def test_blocks_whose_wiring_is_not_known_are_refused(small_model: Callable[[str], Any]) -> None:
    with pytest.raises(InputError, match=r"no value vectors that are known \(its blocks are stream-only\)"):
        ValueVectors(small_model("bloom"))


def test_weights_that_the_layer_does_not_use_as_they_are_are_refused(
    model_folder: Callable[[str], Path],
) -> None:
    """As packed weights and adapters do, the layer adds what its weight does not say."""
    model = matlens.load(str(model_folder("llama")), device="cpu")
    layer = model.blocks[1].mlp.out.original_component
    usual = layer.forward
    layer.forward = lambda x: usual(x) * 1.01
    with pytest.raises(InputError, match=r"not a plain matrix of 48 x 32.*without quantisation or adapters"):
        ValueVectors(model)


@pytest.mark.parametrize(
    ("name", "edited"),
    [
        ("gpt2", "mlp.out"),
        ("gemma3", "mlp.out"),
        ("gemma3", "ln2_post"),
        ("olmo2", "ln2_post"),
        ("olmoe", "mlp"),
    ],
)
def test_edited_weights_are_noticed(name: str, edited: str, model_folder: Callable[[str], Path]) -> None:
    """Also those of a norm after the FFN, which the value vectors pass through."""
    model = matlens.load(str(model_folder(name)), device="cpu")
    values = ValueVectors(model)
    weight = next(model.blocks[1].get_submodule(edited).parameters())
    weight.data.view(-1)[0] += 0.5
    for read in (
        values.layer,
        values.bias,
        lambda layer: values.vectors([values.at(0), values.vector(layer, 0)]),
    ):
        with pytest.raises(InputError, match="have changed since the object of value vectors was made"):
            read(1)
    assert values.layer(0).shape == (values.d_mlp, D_MODEL)


def test_models_that_cannot_be_read_are_refused(model_folder: Callable[[str], Path]) -> None:
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    del model._modules["ln_final"]
    with pytest.raises(InputError, match="has no final norm"):
        Projection.after_norm(model)
    del model._modules["unembed"]
    for read in (Projection.from_model, Projection.after_norm):
        with pytest.raises(InputError, match=r"has no unembedding.*ForCausalLM or \.\.\.ForMaskedLM"):
            read(model)
    folded = matlens.load(str(model_folder("gpt2")), device="cpu")
    folded.enable_compatibility_mode(disable_warnings=True)
    for read in (ValueVectors, Projection.from_model):
        with pytest.raises(InputError, match="compatibility mode"):
            read(folded)


def test_layers_may_be_numpy_integers(small_model: Callable[[str], Any]) -> None:
    values = ValueVectors(small_model("llama"))
    for layer in np.arange(-N_LAYERS, N_LAYERS):
        assert torch.equal(values.random(layer, 3), values.random(int(layer), 3))
        assert torch.equal(values.layer(layer), values.layer(int(layer)))


def test_random_vectors_look_like_the_layer_and_are_the_seeds_own(small_model: Callable[[str], Any]) -> None:
    values = ValueVectors(small_model("gpt2"))
    drawn, real = values.random(1, 50_000, seed=4), values.layer(1)
    deviation = real.std(0)
    assert ((drawn.mean(0) - real.mean(0)).abs() / deviation).max() < 0.03
    assert ((drawn.std(0) - deviation).abs() / deviation).max() < 0.03
    assert torch.equal(drawn, values.random(-2, 50_000, seed=4))
    assert torch.equal(drawn[:3], values.random(1, 50_000, seed=4)[:3])
    for other in (values.random(1, 5, seed=5), values.random(0, 5, seed=4)):
        assert not torch.allclose(drawn[:5], other)
