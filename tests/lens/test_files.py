"""Lenses go to TransformerLens and tuned-lens and back, and nothing in their files is run."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near
from small_lenses import linear, numbers
from transformer_lens.tools.analysis import JacobianLens

import matlens
from matlens import InputError, Lens
from matlens.lens.maps import Standardisation
from matlens.models.identity import ModelIdentity, Provenance

Models = Callable[[str], Any]
PROMPT = "w3 w14 w15 w9 w26"


@pytest.fixture
def lens(small_model):
    """A lens without biases: dense at layers 0 and 1, of rank 4 at 2."""
    model = small_model("llama")
    maps = {
        0: linear(0, numbers(D_MODEL, D_MODEL)),
        1: linear(1, numbers(D_MODEL, D_MODEL, seed=1)),
        2: linear(2, numbers(D_MODEL, 4, seed=2), right=numbers(4, D_MODEL, seed=3)),
    }
    provenance = Provenance(ModelIdentity.from_model(model), {"corpus": "words", "n": 7})
    return Lens(maps, "mat", provenance).on(model)


def test_transformerlens_reads_and_steers_with_ours_as_we_do(lens, tmp_path):
    model = lens.model
    lens.to_jacobian_lens(tmp_path / "lens.pt")
    theirs = JacobianLens.from_pretrained(str(tmp_path / "lens.pt"), model=model)
    assert theirs.source_layers == [0, 1]
    assert theirs.n_prompts == 7
    readout = theirs.readout(model, PROMPT, top_k=4, return_full_logits=True)
    assert readout.lens_logits is not None
    assert_near(lens.logits(lens.trajectory(PROMPT)._vectors[1], 1), readout.lens_logits[0])
    ids = torch.tensor([[5, 6, 7, 8]])
    direction = model.W_U.T[11].detach() @ lens.matrix(1)
    unit = direction / direction.norm()

    def steer(h: torch.Tensor, hook: Any) -> torch.Tensor:
        return h + 3 * h.norm(dim=-1).median() * unit

    with torch.no_grad():
        plain = model(ids, return_type="logits")
        hooks = [("blocks.0.hook_out", steer)]
        expected = model.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks)
        hooks = theirs.steering_hooks(model, 11, [0], alpha=3.0)
        assert_near(model.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks), expected)
    assert float((expected - plain).abs().max()) > 1e-3 * float(plain.abs().max())


def test_theirs_is_read_as_it_is(small_model, tmp_path):
    model = small_model("llama")
    given = JacobianLens({layer: numbers(D_MODEL, D_MODEL, seed=layer) for layer in (0, 1)}, n_prompts=3,
                         d_model=D_MODEL, metadata={"corpus": "pile"})  # fmt: skip
    given.save(str(tmp_path / "theirs.pt"), dtype=torch.float16)
    lens = Lens.from_jacobian_lens(tmp_path / "theirs.pt", model)
    assert (lens.layers, lens.method, lens.provenance.corpus) == ((1, 2), "jacobian", "pile")
    for layer, matrix in given.jacobians.items():
        assert torch.equal(lens.matrix(layer + 1), matrix.half().float())


def test_ours_comes_back_with_where_it_is_from(lens, tmp_path):
    lens.to_jacobian_lens(tmp_path / "lens.pt")
    back = Lens.from_jacobian_lens(tmp_path / "lens.pt", lens.model)
    assert (back.method, back.provenance.corpus, back.layers) == ("mat", "words", (1, 2))
    h = numbers(3, D_MODEL)
    assert_near(back(h, 2), lens(h, 2))
    content = torch.load(tmp_path / "lens.pt", weights_only=True)
    content["J"][0][3, 4] += 1
    torch.save(content, tmp_path / "changed.pt")
    with pytest.raises(InputError, match=r"changed\.pt holds other matrices"):
        Lens.from_jacobian_lens(tmp_path / "changed.pt", lens.model)


@pytest.mark.refused
def test_what_a_jacobian_lens_cannot_hold_is_refused(lens, small_model, tmp_path):
    provenance = lens.provenance
    kinds = {
        "a bias": Lens({1: linear(1, torch.eye(D_MODEL), torch.ones(D_MODEL))}, "affine", provenance),
        "a norm": Lens({1: None}, "standardise", provenance, Standardisation("rms", 0.0)),
        "a scale": Lens({1: None}, "polished", provenance, scales={1: 2.0}),
        "layer 0 only": Lens({0: None}, "mat", provenance),
    }
    for words, refused in kinds.items():
        with pytest.raises(InputError, match=words):
            refused.to_jacobian_lens(tmp_path / "lens.pt")
    assert not (tmp_path / "lens.pt").exists()
    lens.to_jacobian_lens(tmp_path / "lens.pt")
    for name, words in (("gpt2", "fitted for model"), ("bert", "causal")):
        with pytest.raises(InputError, match=words):
            Lens.from_jacobian_lens(tmp_path / "lens.pt", small_model(name))


class Bomb:
    """An object whose unpickling would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.refused
def test_code_and_damage_in_a_file_are_refused_and_not_run(small_model, tmp_path):
    model, bomb = small_model("llama"), Bomb(tmp_path / "ran")
    tuned = tuned_folder(model, tmp_path / "tuned")
    torch.save({"0.weight": bomb}, tuned / "params.pt")
    with pytest.raises(InputError, match="code is not executed"):
        Lens.from_tuned_lens(tuned, model)
    inf = torch.full((D_MODEL, D_MODEL), float("inf"))
    files = {
        "a.pt": ({"J": {0: torch.eye(D_MODEL)}, "d_model": D_MODEL, "x": bomb}, "is not executed"),
        "b.pt": (pickle.dumps(bomb), "is not executed"), "c.pt": ([1, 2], "c.pt"),
        "d.pt": (b"no file of torch", "d.pt"), "absent.pt": (None, "absent.pt"),
        "e.pt": ({"J": {0: inf}, "n_prompts": 1, "d_model": D_MODEL}, "must be finite"),
    }  # fmt: skip
    for name, (content, words) in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        elif content is not None:
            torch.save(content, tmp_path / name)
        with pytest.raises(InputError, match=words):
            Lens.from_jacobian_lens(tmp_path / name, model)
    assert not (tmp_path / "ran").exists()


def tuned_folder(model: Any, folder: Path, *, bias: bool = True) -> Path:
    """A folder as the package tuned-lens writes it."""
    folder.mkdir()
    weight = model.unembed.original_component.weight.detach().float().numpy()
    config = {
        "base_model_name_or_path": "w", "d_model": D_MODEL, "num_hidden_layers": N_LAYERS, "bias": bias,
        "base_model_revision": None, "lens_type": "linear_tuned_lens",
        "unembed_hash": hashlib.sha256(np.array_str(weight, precision=1).encode()).hexdigest(),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    state = {f"{layer}.weight": numbers(D_MODEL, D_MODEL, seed=layer) for layer in range(N_LAYERS)}
    state |= {f"{layer}.bias": numbers(D_MODEL, seed=9 + layer) for layer in range(N_LAYERS) if bias}
    torch.save(state, folder / "params.pt")
    return folder


@pytest.mark.parametrize("bias", [True, False])
def test_a_tuned_lens_adds_to_what_it_translates(bias, small_model, tmp_path):
    model = small_model("llama")
    folder = tuned_folder(model, tmp_path / "tuned", bias=bias)
    with np.printoptions(suppress=True, linewidth=40, edgeitems=1, sign="+"):  # whatever NumPy is told
        lens = Lens.from_tuned_lens(folder, model)
    h = numbers(4, D_MODEL, seed=5)
    state = torch.load(folder / "params.pt", weights_only=True)
    assert_near(lens(h, 1), h + h @ state["1.weight"].T + state.get("1.bias", torch.zeros(D_MODEL)))
    assert (lens.method, lens.layers) == ("tuned", (0, 1, 2))


@pytest.mark.refused
def test_a_tuned_lens_of_another_model_is_refused(small_model, model_folder, tmp_path):
    """In half precision it is known by the name of its model, as the hash is of printed digits."""
    model, half = small_model("llama"), matlens.load(str(model_folder("llama")), dtype=torch.bfloat16)
    folder = tuned_folder(model, tmp_path / "tuned")
    config = json.loads((folder / "config.json").read_text())

    def refused(changes: dict[str, Any], words: str, loaded: Any = model) -> None:
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(InputError, match=words):
            Lens.from_tuned_lens(folder, loaded)

    refused({}, "another unembedding", small_model("gpt2"))
    refused({"num_hidden_layers": 4}, "4 layers of 32 dimensions")
    refused({"unembed_hash": "0" * 64}, "another unembedding", half)
    refused({"unembed_hash": "0" * 64, "base_model_name_or_path": "someone/llama"}, "another unembedding")
    assert Lens.from_tuned_lens(folder, half).method == "tuned"
    torch.save({"0.weight": torch.eye(D_MODEL)}, folder / "params.pt")
    refused({}, r"params\.pt holds")
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json"):
        Lens.from_tuned_lens(folder, model)
