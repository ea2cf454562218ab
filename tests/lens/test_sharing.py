"""Lenses go to a stand-in of the hub and come back the same, at the commit that is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import D_MODEL
from hub_stand_in import TOKEN, Hub
from small_lenses import make_lens, numbers
from transformer_lens.tools.analysis import JacobianLens

from matlens import InputError, Lens
from matlens.lens.maps import LayerMap
from matlens.lens.sharing import folder_of
from matlens.models.identity import ModelIdentity, Provenance

Models = Callable[[str], Any]
PLACE = "someone/lenses"


def fitted(model: Any, *, method: str = "mat", seed: int = 0) -> Lens:
    """A lens as if it had been fitted on a corpus."""
    data = {"corpus": "some words", "n": 7, "seed": 3}
    provenance = Provenance(ModelIdentity.from_model(model), data, positions="all")
    provenance = provenance.with_details(method=method, n_fitted=1234)
    return Lens({1: LayerMap(numbers(D_MODEL, D_MODEL, seed=seed))}, method, provenance)


def files(hub: Hub) -> dict[str, bytes]:
    return hub.repositories[PLACE][-1][1]


def test_a_lens_comes_back_the_same_at_every_commit(hub: Hub, small_model: Models) -> None:
    options: dict[str, Any] = {"endpoint": hub.address, "token": TOKEN}
    model = small_model("llama")
    first = fitted(model).push_to_hub(PLACE, name="words/mat", **options)
    again = fitted(model, seed=1)
    second = again.push_to_hub(PLACE, name="words/mat", **options)
    assert len(first) == 40 != second
    for revision, lens in ((first, fitted(model)), (second, again), (None, again)):
        back = Lens.from_pretrained(PLACE, "words/mat", model, revision=revision, **options)
        assert torch.equal(back.maps[1].matrix(D_MODEL), lens.maps[1].matrix(D_MODEL))
        assert (back.method, back.layers, back.n_samples) == ("mat", (1,), 1234)
        assert back.provenance.details["hub"] == {
            "repository": PLACE, "commit": revision or second, "name": "words/mat"
        }  # fmt: skip
        assert back.logits(numbers(2, D_MODEL), 1).shape == (2, model.cfg.d_vocab)
    alone = Lens.from_pretrained(PLACE, **options)  # there is one, so it needs no name
    assert alone.readout is None
    assert alone.digest == again.digest


def test_one_repository_has_lenses_of_many_models(hub: Hub, small_model: Models) -> None:
    options: dict[str, Any] = {"endpoint": hub.address, "token": TOKEN}
    lenses = {"llama": make_lens(small_model("llama")), "gpt2": fitted(small_model("gpt2"), method="affine")}
    for name, lens in lenses.items():
        lens.push_to_hub(PLACE, name=f"{name}/lens", **options)
    for name, lens in lenses.items():
        back = Lens.from_pretrained(PLACE, f"{name}/lens", small_model(name), **options)
        assert back.digest == lens.digest
    listed = json.loads(files(hub)["lenses.json"])
    assert [entry["folder"] for entry in listed] == ["gpt2/lens", "llama/lens"]
    assert [entry["method"] for entry in listed] == ["affine", "by hand"]
    card = files(hub)["README.md"].decode()
    assert card.startswith("---\nlibrary_name: matlens\n")
    assert "[gpt2/lens](gpt2/lens)" in card
    with pytest.raises(InputError, match="weights or precision differ"):
        Lens.from_pretrained(PLACE, "gpt2/lens", small_model("llama"), **options)
    with pytest.raises(InputError, match=r"no lens None\. Expected one of \['gpt2/lens', 'llama/lens'\]"):
        Lens.from_pretrained(PLACE, **options)


def test_who_comes_too_late_reads_again_and_leaves_nothing_out(hub: Hub, small_model: Models) -> None:
    options: dict[str, Any] = {"endpoint": hub.address, "token": TOKEN}
    fitted(small_model("llama")).push_to_hub(PLACE, name="a/first", **options)

    def meanwhile() -> None:
        hub.before_commit = None
        fitted(small_model("gpt2")).push_to_hub(PLACE, name="b/second", **options)

    hub.before_commit = meanwhile
    fitted(small_model("llama"), seed=2).push_to_hub(PLACE, name="c/third", **options)
    listed = [entry["folder"] for entry in json.loads(files(hub)["lenses.json"])]
    assert listed == ["a/first", "b/second", "c/third"]


def test_a_damaged_file_is_refused(hub: Hub, small_model: Models) -> None:
    options: dict[str, Any] = {"endpoint": hub.address, "token": TOKEN}
    fitted(small_model("llama")).push_to_hub(PLACE, name="a/b", **options)
    content = bytearray(files(hub)["a/b/h.1.safetensors"])
    content[-1] ^= 1
    commit = hub.add(PLACE, {"a/b/h.1.safetensors": bytes(content)})
    with pytest.raises(InputError, match="does not hold what was written"):
        Lens.from_pretrained(PLACE, "a/b", revision=commit, **options)


def test_files_of_jacobian_lenses_are_read_from_their_repositories(
    hub: Hub, small_model: Models, tmp_path: Any
) -> None:
    model = small_model("llama")
    given = JacobianLens({0: numbers(D_MODEL, D_MODEL)}, n_prompts=3, d_model=D_MODEL)
    given.save(str(tmp_path / "lens.pt"), dtype=torch.float32)
    path = "llama/jlens/Salesforce-wikitext/llama_jacobian_lens.pt"
    commit = hub.add("neuronpedia/jacobian-lens", {path: (tmp_path / "lens.pt").read_bytes()})
    lens = Lens.from_pretrained(
        "neuronpedia/jacobian-lens", path, model, revision=commit, endpoint=hub.address
    )
    assert torch.equal(lens.maps[1].matrix(D_MODEL), given.jacobians[0])
    assert lens.provenance.details["hub"]["commit"] == commit
    with pytest.raises(InputError, match="Give the model"):
        Lens.from_pretrained("neuronpedia/jacobian-lens", path, endpoint=hub.address)


def test_a_folder_is_named_by_model_method_and_corpus(small_model: Models) -> None:
    lens = fitted(small_model("llama"), method="normed+affine without sinks")
    assert folder_of(lens.parts).split("/")[1:] == ["normed-affine-without-sinks", "some-words"]
    assert folder_of(lens.parts).count("/") == 2
    assert ".." not in folder_of(lens.parts)


@pytest.mark.parametrize("name", ["", "../x", "a//b", "/a", "a/.hidden", "a b", "a/b/c/d/e/f", "x" * 99])
def test_names_that_lead_elsewhere_are_refused(name: str, hub: Hub, small_model: Models) -> None:
    with pytest.raises(InputError, match="cannot name a folder"):
        fitted(small_model("llama")).push_to_hub(PLACE, name=name, endpoint=hub.address)
    assert hub.asked == []


@pytest.mark.parametrize("listed", [b"{}", b"[1]", b"no json", b'[{"folder": 3}]', b"\xff"])
def test_a_list_that_is_none_is_refused_and_stays(listed: bytes, hub: Hub, small_model: Models) -> None:
    hub.add(PLACE, {"lenses.json": listed})
    with pytest.raises(InputError, match=r"lenses\.json"):
        fitted(small_model("llama")).push_to_hub(PLACE, endpoint=hub.address, token=TOKEN)
    assert files(hub) == {"lenses.json": listed}


def test_a_table_without_the_lens_is_refused_before_anything_is_asked(hub: Hub, small_model: Models) -> None:
    table = pd.DataFrame(
        [("lens_report", "m", "c", "id", 1, 3, "r2", None, 0.5, None, None, 9)],
        columns=["experiment", "model", "corpus", "method", "layer", "target", "metric", "k", "value", "low",
                 "high", "n"],
    )  # fmt: skip
    with pytest.raises(InputError, match="no number of 'mat'"):
        fitted(small_model("llama")).push_to_hub(PLACE, quality=table, endpoint=hub.address)
    assert hub.asked == []
