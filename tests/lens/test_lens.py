"""A lens maps as its formulas say, goes with its own model alone, and comes back from the disk as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near
from small_lenses import linear, make_lens, numbers

import matlens
from matlens import InputError, Lens
from matlens.lens.maps import Standardisation

Models = Callable[[str], Any]


def test_vectors_are_mapped_as_the_formulas_say_and_read_out_by_the_model(small_model):
    model = small_model("llama")
    lens = make_lens(model, norm=Standardisation("rms", 0.1)).on(model)
    h = numbers(5, 2, D_MODEL, seed=9)
    z = h / (h.square().mean(-1, keepdim=True) + 0.1).sqrt()
    weight, bias = numbers(D_MODEL, D_MODEL), numbers(D_MODEL, seed=1)
    assert_near(lens(h, 0), z @ weight.T + bias)
    assert_near(lens(h, "h.1"), z @ (numbers(D_MODEL, 3, seed=2) @ numbers(3, D_MODEL, seed=3)).T)
    torch.testing.assert_close(lens(h, 2), z)
    torch.testing.assert_close(lens(h, -1), h, rtol=0, atol=0)
    assert lens.layers == (0, 1, 2)
    digest, weights = lens.digest, lens.maps[0].weight  # type: ignore[union-attr]
    weights[17, 16] += 1e-3
    assert lens.digest != digest
    weights[17, 16] -= 1e-3
    assert lens.n_parameters == D_MODEL * D_MODEL + D_MODEL + 6 * D_MODEL + 1
    readout = matlens.Readout(model)
    torch.testing.assert_close(lens.logits(h, 0), readout.logits(lens(h, 0)))
    torch.testing.assert_close(lens.logits(h, 2), readout.logits(z) * 0.5)
    torch.testing.assert_close(lens.logits(h, N_LAYERS), readout.logits(h))


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "layer"), ("llama", "rms"), ("gemma2", "rms")])
def test_the_standardisation_is_that_of_the_final_norm(name, kind, small_model):
    model = small_model(name)
    norm, h = Standardisation.from_model(model), numbers(7, D_MODEL)
    module = model.ln_final.original_component
    with torch.no_grad():
        bias = module(torch.zeros(1, D_MODEL))
        gain = ((module(h) - bias) / norm(h)).median(0).values
        assert_near(norm(h) * gain + bias, module(h))
    assert norm.kind == kind


def test_scores_can_be_differentiated_and_the_weights_stay_as_they_are(small_model):
    model = small_model("gemma2")
    lens, h = make_lens(model).on(model), numbers(1, D_MODEL).requires_grad_()
    lens.logits(h, 0, gradients=True)[0, 7].backward()
    assert h.grad is not None
    step = torch.zeros(1, D_MODEL)
    step[0, 3] = 1e-2
    with torch.no_grad():
        up, down = (lens.logits(h + sign * step, 0)[0, 7] for sign in (1, -1))
    assert float(h.grad[0, 3]) == pytest.approx(float(up - down) / 2e-2, rel=1e-2, abs=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not lens.logits(h, 0).requires_grad


def test_a_lens_comes_back_from_its_folder(small_model, tmp_path):
    model = small_model("llama")
    lens = make_lens(model, norm=Standardisation("rms", 0.25))
    lens.save(tmp_path / "lens")
    lens.save(tmp_path / "lens")  # the same again is no other job
    back = Lens.load(tmp_path / "lens", model)
    assert (back.method, back.norm, back.digest) == (lens.method, lens.norm, lens.digest)
    assert back.provenance.model == lens.provenance.model
    assert back.scales == lens.scales
    for layer in (0, 1):
        ours, theirs = back.maps[layer], lens.maps[layer]
        assert ours is not None
        assert theirs is not None
        assert (ours.source, ours.target) == (theirs.source, theirs.target)
        for name, part in theirs.parts.items():
            assert torch.equal(ours.parts[name], part)
    assert back.maps[2] is None
    lens.matrix(0)[0, 0] = float("nan")
    with pytest.raises(InputError, match="must be finite, got NaN or infinity at layer 0"):
        lens.save(tmp_path / "other")
    weight = numbers(D_MODEL, D_MODEL)
    shared = Lens({layer: linear(layer, weight) for layer in (0, 1)}, "shared_map", lens.provenance)
    shared.save(tmp_path / "shared")
    assert len(list((tmp_path / "shared").glob("*.safetensors"))) == 1
    assert Lens.load(tmp_path / "shared").n_parameters == shared.n_parameters == D_MODEL**2


@pytest.mark.refused
def test_a_lens_goes_with_its_own_model_alone(small_model, model_folder, tmp_path):
    lens = make_lens(small_model("llama"))
    with pytest.raises(InputError, match="weights or precision differ"):
        lens.on(small_model("gpt2"))
    half = matlens.load(str(model_folder("llama")), device="cpu", dtype=torch.bfloat16)
    with pytest.raises(InputError, match="same_precision=False"):
        lens.on(half)
    assert lens.on(half, same_precision=False).readout is not None
    with pytest.raises(InputError, match="has no model"):
        lens.logits(numbers(1, D_MODEL), 0)
    folder = tmp_path / "swapped"  # the same weights, but two words of the tokenizer swapped
    shutil.copytree(model_folder("llama"), folder)
    read = json.loads((folder / "tokenizer.json").read_text())
    words = read["model"]["vocab"]
    words["w1"], words["w2"] = words["w2"], words["w1"]
    (folder / "tokenizer.json").write_text(json.dumps(read))
    other = matlens.load(str(folder), device="cpu")
    lens.save(tmp_path / "lens")
    for same_precision in (True, False):
        with pytest.raises(InputError, match="becomes other tokens"):
            Lens.load(tmp_path / "lens", other, same_precision=same_precision)
