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

PROMPT = "w3 w14 w15 w9 w26"


@pytest.fixture
def lens(small_model: Callable[[str], Any]) -> Lens:
    """A lens without biases: whole at layers 0 and 1, narrow at 2."""
    model = small_model("llama")
    maps = {
        0: linear(0, numbers(D_MODEL, D_MODEL)),
        1: linear(1, numbers(D_MODEL, D_MODEL, seed=1)),
        2: linear(2, numbers(D_MODEL, 4, seed=2), right=numbers(4, D_MODEL, seed=3)),
    }
    return Lens(maps, "mat", Provenance(ModelIdentity.from_model(model), {"corpus": "words", "n": 7})).on(
        model
    )


def test_transformerlens_reads_ours_as_we_do(lens: Lens, tmp_path: Path) -> None:
    lens.to_jacobian_lens(tmp_path / "lens.pt")
    theirs = JacobianLens.from_pretrained(str(tmp_path / "lens.pt"), model=lens.model)
    assert theirs.source_layers == [0, 1]
    assert theirs.n_prompts == 7
    for layer in (1, 2):
        assert torch.equal(theirs.jacobians[layer - 1], lens.matrix(layer))
    readout = theirs.readout(lens.model, PROMPT, top_k=4, return_full_logits=True)
    ours = lens.top_tokens(PROMPT, 4)
    read = readout.top_tokens(lens.model.tokenizer, k=4)
    assert {layer + 1: tokens for layer, tokens in read.items()} == {
        layer: tokens for layer, tokens in ours.items() if layer > 0
    }
    activations = lens.trajectory(PROMPT)._vectors
    assert readout.lens_logits is not None
    assert_near(lens.logits(activations[1], 1), readout.lens_logits[0])


def test_interventions_with_our_maps_are_hooks_written_by_hand(lens: Lens, tmp_path: Path) -> None:
    model = lens.model
    lens.to_jacobian_lens(tmp_path / "lens.pt")
    theirs = JacobianLens.load(str(tmp_path / "lens.pt"))
    ids = torch.tensor([[5, 6, 7, 8]])
    pair = model.W_U.T[[11, 12]].detach() @ lens.matrix(1)  # [2, d]
    unit = pair[0] / pair[0].norm()

    def steer(h: torch.Tensor, hook: Any) -> torch.Tensor:
        return h + 3 * h.norm(dim=-1).median() * unit

    def ablate(h: torch.Tensor, hook: Any) -> torch.Tensor:
        return h - (h @ unit)[..., None] * unit

    def swap(h: torch.Tensor, hook: Any) -> torch.Tensor:
        coordinates = h @ torch.linalg.pinv(pair)
        return h + (coordinates.flip(-1) - coordinates) @ pair

    pairs = {
        steer: theirs.steering_hooks(model, 11, [0], alpha=3.0),
        ablate: theirs.ablation_hooks(model, 11, [0]),
        swap: theirs.swap_hooks(model, 11, 12, [0]),
    }
    with torch.no_grad():
        plain = model(ids, return_type="logits")
        for by_hand, hooks in pairs.items():
            expected = model.run_with_hooks(
                ids, return_type="logits", fwd_hooks=[("blocks.0.hook_out", by_hand)]
            )
            changed = model.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks)
            assert_near(changed, expected)
            assert float((changed - plain).abs().max()) > 1e-3 * float(plain.abs().max()), by_hand.__name__


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_theirs_comes_back_bit_for_bit(
    dtype: torch.dtype, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    model = small_model("llama")
    jacobians = {layer: numbers(D_MODEL, D_MODEL, seed=layer) for layer in (0, 1)}
    metadata = {"model_name": model.cfg.model_name, "corpus": "pile", "hooks": [1, {"a": None}]}
    given = JacobianLens(jacobians, n_prompts=3, d_model=D_MODEL, metadata=metadata)
    given.save(str(tmp_path / "theirs.pt"), dtype=dtype)
    lens = Lens.from_jacobian_lens(tmp_path / "theirs.pt", model)
    assert lens.layers == (1, 2)
    assert lens.method == "jacobian"
    assert lens.provenance.corpus == "pile"
    lens.save(tmp_path / "folder")
    Lens.load(tmp_path / "folder").to_jacobian_lens(tmp_path / "back.pt")
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("theirs.pt", "back.pt"))
    assert first.keys() == second.keys()
    assert first["J"].keys() == second["J"].keys()
    assert all(torch.equal(first["J"][layer], second["J"][layer]) for layer in first["J"])
    assert {matrix.dtype for matrix in second["J"].values()} == {dtype}
    assert [first[key] for key in ("n_prompts", "source_layers", "d_model", "metadata")] == [
        second[key] for key in ("n_prompts", "source_layers", "d_model", "metadata")
    ]


def test_ours_comes_back_with_where_it_is_from(lens: Lens, tmp_path: Path) -> None:
    lens.to_jacobian_lens(tmp_path / "lens.pt")
    back = Lens.from_jacobian_lens(tmp_path / "lens.pt", lens.model)
    assert (back.method, back.provenance.corpus) == ("mat", "words")
    assert back.layers == (1, 2)
    h = numbers(3, D_MODEL)
    assert_near(back(h, 2), lens(h, 2))
    content = torch.load(tmp_path / "lens.pt", weights_only=True)
    content["J"][0][3, 4] += 1
    torch.save(content, tmp_path / "changed.pt")
    with pytest.raises(
        InputError, match=r"changed\.pt holds other matrices than Lens.to_jacobian_lens wrote"
    ):
        Lens.from_jacobian_lens(tmp_path / "changed.pt", lens.model)


@pytest.mark.refused
def test_what_a_jacobian_lens_cannot_hold_is_refused(
    lens: Lens, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    provenance = lens.provenance
    kinds = {
        "a bias": Lens({1: linear(1, torch.eye(D_MODEL), torch.ones(D_MODEL))}, "affine", provenance),
        "a norm": Lens({1: None}, "normed", provenance, Standardisation("rms")),
        "a scale": Lens({1: None}, "polished", provenance, scales={1: 2.0}),
        "layer 0 alone": Lens({0: None}, "mat", provenance),
    }
    for words, refused in kinds.items():
        with pytest.raises(InputError, match=words):
            refused.to_jacobian_lens(tmp_path / "lens.pt")
    assert not (tmp_path / "lens.pt").exists()
    lens.to_jacobian_lens(tmp_path / "lens.pt")
    with pytest.raises(InputError, match="fitted for model"):
        Lens.from_jacobian_lens(tmp_path / "lens.pt", small_model("gpt2"))
    with pytest.raises(InputError, match="causal"):
        Lens.from_jacobian_lens(tmp_path / "lens.pt", small_model("bert"))


class Bomb:
    """An object whose unpickling would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.refused
def test_code_in_a_file_is_refused_and_not_run(small_model: Callable[[str], Any], tmp_path: Path) -> None:
    model = small_model("llama")
    torch.save(
        {"J": {0: torch.eye(D_MODEL)}, "d_model": D_MODEL, "x": Bomb(tmp_path / "ran")}, tmp_path / "a.pt"
    )
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(InputError, match="what it asks for is not run"):
            Lens.from_jacobian_lens(tmp_path / name, model)
    tuned = tuned_folder(model, tmp_path / "tuned")
    torch.save({"0.weight": Bomb(tmp_path / "ran")}, tuned / "params.pt")
    with pytest.raises(InputError, match="what it asks for is not run"):
        Lens.from_tuned_lens(tuned, model)
    assert not (tmp_path / "ran").exists()
    torch.save([1, 2], tmp_path / "c.pt")
    (tmp_path / "d.pt").write_bytes(b"no file of torch")
    for name in ("c.pt", "d.pt", "absent.pt"):
        with pytest.raises(InputError, match=name):
            Lens.from_jacobian_lens(tmp_path / name, model)
    torch.save(
        {"J": {0: torch.full((D_MODEL, D_MODEL), float("inf"))}, "n_prompts": 1, "d_model": D_MODEL},
        tmp_path / "e.pt",
    )
    with pytest.raises(InputError, match="not finite"):
        Lens.from_jacobian_lens(tmp_path / "e.pt", model)


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
def test_a_tuned_lens_adds_to_what_it_translates(
    bias: bool, small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    model = small_model("llama")
    lens = Lens.from_tuned_lens(tuned_folder(model, tmp_path / "tuned", bias=bias), model)
    h = numbers(4, D_MODEL, seed=5)
    state = torch.load(tmp_path / "tuned" / "params.pt", weights_only=True)
    expected = h + h @ state["1.weight"].T + state.get("1.bias", torch.zeros(D_MODEL))
    assert_near(lens(h, 1), expected)
    assert lens.method == "tuned"
    assert lens.layers == (0, 1, 2)


def test_a_tuned_lens_is_known_whatever_numpy_is_told_to_print(
    small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    folder = tuned_folder(small_model("llama"), tmp_path / "tuned")
    with np.printoptions(suppress=True, linewidth=40, edgeitems=1, sign="+"):
        assert Lens.from_tuned_lens(folder, small_model("llama")).method == "tuned"


def test_in_half_precision_a_tuned_lens_is_known_by_the_name_of_its_model(
    small_model: Callable[[str], Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The hash is of printed digits, and rounding changes some."""
    half = matlens.load(str(model_folder("llama")), dtype=torch.bfloat16, device="cpu")
    folder = tuned_folder(half, tmp_path / "tuned")
    config = json.loads((folder / "config.json").read_text()) | {"unembed_hash": "0" * 64}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="another unembedding"):
        Lens.from_tuned_lens(folder, half)
    (folder / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "someone/llama"}))
    assert Lens.from_tuned_lens(folder, half).method == "tuned"
    with pytest.raises(InputError, match="another unembedding"):
        Lens.from_tuned_lens(folder, small_model("llama"))


@pytest.mark.refused
def test_a_tuned_lens_of_another_model_is_refused(small_model: Callable[[str], Any], tmp_path: Path) -> None:
    model = small_model("llama")
    folder = tuned_folder(model, tmp_path / "tuned")
    with pytest.raises(InputError, match="another unembedding"):
        Lens.from_tuned_lens(folder, small_model("gpt2"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(InputError, match="4 layers of 32 dimensions"):
        Lens.from_tuned_lens(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"0.weight": torch.eye(D_MODEL)}, folder / "params.pt")
    with pytest.raises(InputError, match=r"params\.pt holds"):
        Lens.from_tuned_lens(folder, model)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json"):
        Lens.from_tuned_lens(folder, model)
