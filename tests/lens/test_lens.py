"""Lenses map as their formulas say, and come back the same from folders, files and the hub."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near
from hub_stand_in import TOKEN, Hub
from injections import INJECTIONS
from small_lenses import linear, make_lens, numbers
from torch import Tensor
from torch.testing import assert_close
from transformer_lens.tools.analysis import JacobianLens

import matlens
from matlens import InputError, InputWarning, Lens, LinearMap, collect, make_examples
from matlens.lens.config import LensConfig, parse_methods
from matlens.lens.hub import folder_of, lens_card, repository_card
from matlens.lens.maps import Standardisation
from matlens.models.identity import ModelIdentity, Provenance


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


def test_a_lens_goes_with_another_model_only_with_strict_false(small_model, model_folder, tmp_path):
    lens = make_lens(small_model("llama"))
    with pytest.raises(InputError):
        lens.on(small_model("gpt2"))
    half = matlens.load(str(model_folder("llama")), device="cpu", dtype=torch.bfloat16)
    with pytest.raises(InputError):
        lens.logits(numbers(1, D_MODEL), 0)
    folder = tmp_path / "swapped"  # the same weights, but two words of the tokenizer swapped
    shutil.copytree(model_folder("llama"), folder)
    read = json.loads((folder / "tokenizer.json").read_text())
    words = read["model"]["vocab"]
    words["w1"], words["w2"] = words["w2"], words["w1"]
    (folder / "tokenizer.json").write_text(json.dumps(read))
    lens.save(tmp_path / "lens")
    for other in (half, matlens.load(str(folder), device="cpu")):
        with pytest.raises(InputError):
            Lens.load(tmp_path / "lens", other)
        with pytest.warns(InputWarning) as warned:
            moved = Lens.load(tmp_path / "lens", other, strict=False)
        assert len(warned) == 1
        assert (
            moved.provenance.details["transferred_from"]["fingerprint"]
            == lens.provenance.identity.fingerprint
        )
        read_there = moved.trajectory("w1 w2 w3")  # without another warning or error
        vectors = matlens.collect(
            other, matlens.make_prompts(other, ["w1 w2 w3"]), [1], positions="all", progress=False
        )[1]
        expected = matlens.Readout(other).log_probs(lens(vectors, 1)).exp().topk(5).values
        assert_close(read_there.probabilities[1], expected)


def changed(model: Any) -> dict[str, Any]:
    def added(value: Tensor, hook: Any) -> Tensor:
        return value + torch.linspace(-1, 1, D_MODEL)

    return {
        "hooks": model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", added)]),
        "patched": matlens.patched(model, [replaced(model, "ffn_in.1", "ffn_out.1")]),
        "controlled": matlens.controlled(model, ["L1D3"], 5.0),
    }


def replaced(model: Any, source: str, target: str) -> LinearMap:
    provenance = Provenance(ModelIdentity.from_model(model))
    return LinearMap(numbers(D_MODEL, D_MODEL), None, source, target, provenance)


@pytest.mark.parametrize("change", ["hooks", "patched", "controlled"])
def test_a_lens_reads_a_changed_model(change, model_folder):
    """Against the streams and logits that hooks of the test see."""
    model = matlens.load(str(model_folder("llama")), device="cpu")
    lens = make_lens(model).on(model)
    plain = lens.trajectory("w1 w2 w3")
    seen: dict[int, Tensor] = {}
    with changed(model)[change]:
        read = lens.trajectory("w1 w2 w3")
        again = lens.on(model).trajectory("w1 w2 w3")
        hooks = [
            (f"blocks.{i}.hook_resid_post", lambda value, hook, i=i: seen.update({i + 1: value[0]}))
            for i in range(N_LAYERS)
        ]
        with model.hooks(fwd_hooks=hooks):
            logits = model(read.ids[None], return_type="logits")[0]
    assert_close(read.probabilities, again.probabilities)
    assert_close(read.probabilities[-1], logits.softmax(-1).topk(5).values)
    for row, layer in enumerate(read.layers[:-1]):
        if layer:
            expected = lens.logits(seen[layer], layer).softmax(-1).topk(5).values
            assert_close(read.probabilities[row], expected)
    assert not torch.allclose(read.probabilities[-1], plain.probabilities[-1])


def test_a_trajectory_under_a_jump_reads_the_layers_that_run(model_folder):
    model = matlens.load(str(model_folder("llama")), device="cpu")
    lens = Lens.identity(model)
    with matlens.patched(model, [replaced(model, "h.0", "h.2")]):
        read = lens.trajectory("w1 w2 w3")
        logits = model(read.ids[None], return_type="logits")[0]
        with pytest.raises(InputError):
            lens.trajectory("w1 w2 w3", layers=[1])
    assert 1 not in read.layers
    assert {0, 2, N_LAYERS} <= {*read.layers}
    assert_close(read.probabilities[-1], logits.softmax(-1).topk(5).values)


def test_a_name_tells_the_options():
    everything = LensConfig(standardise=True, intercept=True, rank=64, sinks="exclude")
    names = {
        "mat": LensConfig(), "affine": LensConfig(intercept=True), "ridge=loo": LensConfig(ridge="loo"),
        "standardise+intercept+rank=64+sinks=exclude": everything,
        "weighted+ridge=0.01+shared_map": LensConfig(ridge=0.01, weighted=True, shared_map=True),
        "intercept+sinks=exclude": LensConfig(intercept=True, sinks="exclude"),
    }  # fmt: skip
    assert {config.name: config for config in names.values()} == names
    contradictions: list[dict[str, Any]] = [
        {"toward": "identity"}, {"toward": "identity", "ridge": 1.0, "rank": 3},
        {"weighted": True, "standardise": True},
    ]  # fmt: skip
    for options in contradictions:
        with pytest.raises(InputError, match=r"requires a ridge|rank=None|not be combined"):
            LensConfig(**options)
    parsed = parse_methods(["tuned", everything, "mat"])
    assert parsed == {"tuned": None, everything.name: everything, "mat": LensConfig()}
    assert list(parsed) == ["tuned", everything.name, "mat"]


def test_another_package_adds_a_method(tmp_path, monkeypatch, small_model, sentences):
    """A package with an entry point is found once it is installed, here as a folder on the path."""
    (tmp_path / "means_to_last.py").write_text(
        "import torch\n"
        "from matlens import LinearMap\n"
        "def fit(model, vectors, *, layers, seed, progress):\n"
        "    last = f'h.{model.cfg.n_layers}'\n"
        "    shift = {n: (vectors[last] - vectors[n]).mean(0) + seed for n in layers}\n"
        "    one = torch.eye(model.cfg.d_model)\n"
        "    return {n: LinearMap(one, b, f'h.{n}', last) for n, b in shift.items()}\n"
    )
    installed = tmp_path / "means_to_last-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: means-to-last\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[matlens.lens_methods]\nmeans = means_to_last:fit\n")
    model, examples = small_model("llama"), make_examples(small_model("llama"), sentences)
    with pytest.raises(InputError, match="method must be one of"):
        Lens.fit(model, examples, method="means")
    monkeypatch.syspath_prepend(str(tmp_path))
    lenses = Lens.fit(model, examples, method=["mat", "means"], layers=[1], seed=2, progress=False)
    vectors = collect(model, examples, [1, 3], positions="all", progress=False)
    h = torch.zeros(1, D_MODEL)
    torch.testing.assert_close(lenses["means"](h, 1)[0], (vectors[3] - vectors[1]).mean(0) + 2)
    assert lenses["means"].method == "means"
    assert lenses["means"].n_samples == vectors.n_rows
    assert lenses["means"].logits(h, 1).shape == (1, model.cfg.d_vocab)
    lenses["means"].save(tmp_path / "lens")
    assert Lens.load(tmp_path / "lens", model).digest == lenses["means"].digest


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


def test_transformerlens_reads_ours_as_we_do(lens, tmp_path):
    model = lens.model
    lens.to_jacobian_lens(tmp_path / "lens.pt")
    theirs = JacobianLens.from_pretrained(str(tmp_path / "lens.pt"), model=model)
    assert theirs.source_layers == [0, 1]
    assert theirs.n_prompts == 7
    readout = theirs.readout(model, PROMPT, top_k=4, return_full_logits=True)
    assert readout.lens_logits is not None
    assert_near(lens.logits(lens.trajectory(PROMPT)._vectors[1], 1), readout.lens_logits[0])


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


PLACE = "someone/lenses"


def fitted(model: Any, *, seed: int = 0) -> Lens:
    """A lens as if it had been fitted on a corpus."""
    data = {"corpus": "wikipedia-sample", "n": 4000, "seed": 7}
    identity = replace(ModelIdentity.from_model(model), revision="abc")
    provenance = Provenance(identity, data, positions="all").with_details(n_fitted=112_344, n_sinks=4_001)
    weight = numbers(D_MODEL, D_MODEL, seed=seed)
    return Lens({layer: linear(layer, weight) for layer in (1, 2)}, "rank=4+sinks=exclude", provenance)


def files(hub: Hub) -> dict[str, bytes]:
    return hub.repositories[PLACE][-1][1]


def test_lenses_of_many_models_come_back_the_same_at_every_commit(hub, small_model):
    options: dict[str, Any] = {"token": TOKEN}
    model = small_model("llama")
    first = fitted(model).push_to_hub(PLACE, name="llama/words", **options)
    assert Lens.from_pretrained(PLACE, **options).readout is None  # there is one, so it needs no name
    second = fitted(model, seed=1).push_to_hub(PLACE, name="llama/words", **options)
    assert len(first) == 40 != second
    for revision, seed in ((first, 0), (second, 1), (None, 1)):
        back = Lens.from_pretrained(PLACE, "llama/words", model, revision=revision, **options)
        assert back.digest == fitted(model, seed=seed).digest
        assert (back.method, back.layers, back.n_samples) == ("rank=4+sinks=exclude", (1, 2), 112_344)
        assert back.provenance.details["hub"] == {
            "repository": PLACE, "commit": revision or second, "name": "llama/words"
        }  # fmt: skip
        assert back.logits(numbers(2, D_MODEL), 1).shape == (2, model.cfg.d_vocab)
    other = make_lens(small_model("gpt2"))
    other.push_to_hub(PLACE, name="gpt2/lens", **options)
    assert Lens.from_pretrained(PLACE, "gpt2/lens", small_model("gpt2"), **options).digest == other.digest
    card = files(hub)["README.md"].decode()
    assert card.startswith("---\nlibrary_name: matlens\n")
    assert "- [gpt2/lens](gpt2/lens)\n- [llama/words](llama/words)\n" in card
    assert f'Lens.from_pretrained("{PLACE}", "gpt2/lens", model' in card
    with pytest.raises(InputError, match=r"gpt2.*llama"):
        Lens.from_pretrained(PLACE, "gpt2/lens", model, **options)
    with pytest.raises(InputError, match=r"no lens None\. Expected one of \['gpt2/lens', 'llama/words'\]"):
        Lens.from_pretrained(PLACE, **options)
    content = bytearray(files(hub)["llama/words/h.1.safetensors"])
    content[-1] ^= 1
    commit = hub.add(PLACE, {"llama/words/h.1.safetensors": bytes(content)})
    with pytest.raises(InputError, match="does not hold the tensor"):
        Lens.from_pretrained(PLACE, "llama/words", revision=commit, **options)


def test_of_two_pushes_at_the_same_time_one_is_refused(hub, small_model):
    options: dict[str, Any] = {"token": TOKEN}
    hub.add(PLACE, {"a/first/config.json": b"{}", "a) [x](y/config.json": b"{}"})

    def meanwhile() -> None:
        hub.before_commit = None
        fitted(small_model("gpt2")).push_to_hub(PLACE, name="b/second", **options)

    hub.before_commit = meanwhile
    with pytest.raises(InputError, match="commit"):
        fitted(small_model("llama")).push_to_hub(PLACE, name="c/third", **options)
    fitted(small_model("llama")).push_to_hub(PLACE, name="c/third", **options)
    card = files(hub)["README.md"].decode()
    assert [line for line in card.splitlines() if line.startswith("- [")] == [
        f"- [{name}]({name})" for name in ("a/first", "b/second", "c/third")
    ]


@pytest.mark.parametrize("name", ["", "../x", "a//b", "/a", "a/.hidden", "a b", "a/b/c/d/e/f", "x" * 99])
def test_names_that_lead_elsewhere_are_refused(name, hub, small_model):
    lens = fitted(small_model("llama"))
    with pytest.raises(InputError, match="name must be a folder"):
        lens.push_to_hub(PLACE, name=name)
    assert hub.asked == []
    assert folder_of(lens).split("/")[1:] == ["rank-4-sinks-exclude", "wikipedia-sample"]
    assert ".." not in folder_of(lens)


# Cards


def test_texts_of_others_add_no_line_and_no_markup(small_model):
    lens = fitted(small_model("llama"))
    harmless = lens_card(lens, None)
    for text in INJECTIONS:
        provenance = replace(lens.provenance, data={"corpus": text, "n": 1})
        card = lens_card(replace(lens, provenance=provenance, method=text), None)
        assert card.count("\n") == harmless.count("\n"), ascii(text)
        assert not re.search(r"(?<!\\)<", card), ascii(text)
    assert repository_card("a/b", ["x/y"]).count("\n") == repository_card("a/b", ["z"]).count("\n")


def test_files_of_jacobian_lenses_are_read_from_their_repositories(hub, small_model, tmp_path):
    model = small_model("llama")
    given = JacobianLens({0: numbers(D_MODEL, D_MODEL)}, n_prompts=3, d_model=D_MODEL)
    given.save(str(tmp_path / "lens.pt"), dtype=torch.float32)
    path, place = "llama/jlens/Salesforce-wikitext/llama_jacobian_lens.pt", "neuronpedia/jacobian-lens"
    commit = hub.add(place, {path: (tmp_path / "lens.pt").read_bytes()})
    lens = Lens.from_pretrained(place, path, model, revision=commit)
    assert torch.equal(lens.matrix(1), given.jacobians[0])
    assert lens.provenance.details["hub"]["commit"] == commit
    with pytest.raises(InputError, match="model must be given"):
        Lens.from_pretrained(place, path)
