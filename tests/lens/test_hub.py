"""Lenses go to the hub and come back the same at their commit, with a card about them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import D_MODEL
from hub_stand_in import TOKEN, Hub
from injections import INJECTIONS
from small_lenses import linear, make_lens, numbers
from transformer_lens.tools.analysis import JacobianLens

from matlens import InputError, Lens
from matlens.io.tables import COLUMNS
from matlens.lens.hub import LensEntry, bare, folder_of, lens_card, quality_of, repository_card
from matlens.lens.maps import LensMaps
from matlens.models.identity import ModelIdentity, Provenance

Models = Callable[[str], Any]
PLACE = "someone/lenses"


def fitted(model: Any, *, method: str = "mat", seed: int = 0) -> Lens:
    """A lens as if it had been fitted on a corpus."""
    data = {"corpus": "some words", "n": 7, "seed": 3}
    provenance = Provenance(ModelIdentity.from_model(model), data, positions="all")
    provenance = provenance.with_details(method=method, n_fitted=1234)
    return Lens({1: linear(1, numbers(D_MODEL, D_MODEL, seed=seed))}, method, provenance)


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
        assert torch.equal(back.matrix(1), lens.matrix(1))
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
    with pytest.raises(InputError, match="does not hold the tensor"):
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
    assert torch.equal(lens.matrix(1), given.jacobians[0])
    assert lens.provenance.details["hub"]["commit"] == commit
    with pytest.raises(InputError, match="Give the model"):
        Lens.from_pretrained("neuronpedia/jacobian-lens", path, endpoint=hub.address)


def test_a_folder_is_named_by_model_method_and_corpus(small_model: Models) -> None:
    lens = fitted(small_model("llama"), method="normed+affine without sinks")
    assert folder_of(lens).split("/")[1:] == ["normed-affine-without-sinks", "some-words"]
    assert folder_of(lens).count("/") == 2
    assert ".." not in folder_of(lens)


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
    quality = table(("id", 1, "r2", None, 0.5, ""))
    with pytest.raises(InputError, match="no number of 'mat'"):
        fitted(small_model("llama")).push_to_hub(PLACE, quality=quality, endpoint=hub.address)
    assert hub.asked == []


# Cards


def table(*rows: tuple[str, int | None, str, int | None, float, str]) -> pd.DataFrame:
    """A table of results: method, layer, metric, k, value and against."""
    lines = [
        ("lens_report", "m", "c", method, layer, 30, metric, k, value, None, None, 9, against)
        for method, layer, metric, k, value, against in rows
    ]
    return pd.DataFrame(lines, columns=[*COLUMNS, "against"])


RESULTS = table(
    ("mat", 4, "r2", None, 0.5, ""), ("mat", 4, "precision", 1, 0.25, ""),
    ("mat", 5, "precision", 1, 0.35, ""), ("mat", 4, "precision", 1, 0.1, "id"),
    ("id", 4, "precision", 1, 0.01, ""), ("mat", None, "seconds", None, 3.0, ""),
    ("mat", 5, "r2", None, float("nan"), ""),
)  # fmt: skip


@pytest.fixture
def lens(small_model: Callable[[str], Any]) -> LensMaps:
    identity = replace(
        ModelIdentity.from_model(small_model("llama")), name="maker/model-135m", revision="abc", n_layers=30
    )
    data = {"corpus": "wikipedia-sample", "n": 4000, "seed": 7}
    provenance = Provenance(identity, data, positions="all").with_details(n_fitted=112_344, n_sinks=4_001)
    maps = {layer: linear(layer, torch.eye(D_MODEL)) for layer in (3, 4, 5, 9)}
    return LensMaps(maps, "mat without sinks", provenance)


def test_measures_are_those_of_the_method_and_no_differences() -> None:
    assert quality_of("mat", RESULTS) == {4: {"r2": 0.5, "Precision@1": 0.25}, 5: {"Precision@1": 0.35}}


def test_a_card_says_what_the_lens_was_fitted_on_and_how_well_it_reads(lens: LensMaps) -> None:
    card = lens_card(lens, quality_of("mat", RESULTS))
    for part in (
        "# mat without sinks of maker/model-135m", "| corpus | wikipedia-sample, 4,000 sentences |",
        "| fitted on | 112,344 tokens |", "| attention sinks | out (4,001) |", "| positions | all |",
        "| layers | 3-5, 9 of 30, each onto the last |", "revision abc", "| seed | 7 |",
        "| layer | r2 | Precision@1 |", "| 4 | 0.500 | 0.250 |", "| 5 | – | 0.350 |",
        lens.provenance.identity.fingerprint,
    ):  # fmt: skip
        assert part in card, part
    assert "has not been measured" in lens_card(lens, None)


def test_the_repository_lists_its_lenses_with_their_means(lens: LensMaps) -> None:
    entry = LensEntry.from_lens("model-135m/mat/words", lens, quality_of("mat", RESULTS))
    assert entry.mean == {"r2": 0.5, "Precision@1": pytest.approx(0.3)}
    bare_entry = LensEntry.from_lens("a/b", replace(lens, method="mat"), None)
    card = repository_card("someone/lenses", [entry, bare_entry])
    assert "base_model:\n- maker/model-135m\n---" in card
    row = "| wikipedia-sample | 112,344 | out (4,001) | 3-5, 9 | 0.500 | 0.300 |"
    assert row in card
    assert "| 112,344 | in | 3-5, 9 | – | – |" in card
    assert 'Lens.from_pretrained("someone/lenses", "model-135m/mat/words", model, revision="...")' in card


@pytest.mark.parametrize(
    ("name", "expected"),
    [("maker/model", "maker/model"), ("/home/somebody/model", "model"), ("./data/x.txt", "x.txt"),
     ("C:\\work\\x", "x"), ("~/x/", "x"), ("wikipedia-sample", "wikipedia-sample")],
)  # fmt: skip
def test_folders_of_the_machine_are_not_told(name: str, expected: str) -> None:
    assert bare(name) == expected


def test_texts_of_others_add_no_line_and_no_markup(lens: LensMaps) -> None:
    harmless = lens_card(lens, None)
    for text in INJECTIONS:
        provenance = replace(lens.provenance, data={"corpus": text, "n": 1})
        card = lens_card(replace(lens, provenance=provenance, method=text), None)
        assert card.count("\n") == harmless.count("\n"), ascii(text)
        assert not re.search(r"(?<!\\)<", card), ascii(text)
        entry = LensEntry.from_lens("a/b", replace(lens, provenance=provenance, method=text), None)
        listed = repository_card("a/b", [entry])
        assert listed.count("\n") == repository_card("a/b", [LensEntry.from_lens("a/b", lens, None)]).count(
            "\n"
        )
        assert not [line for line in listed.splitlines()[10:] if line == "---"]
