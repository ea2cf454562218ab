"""Lenses go to the hub and come back the same at their commit, with a card about them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conftest import D_MODEL
from hub_stand_in import TOKEN, Hub
from injections import INJECTIONS
from small_lenses import linear, make_lens, numbers

from matlens import InputError, Lens
from matlens.lens.hub import folder_of, lens_card, repository_card
from matlens.models.identity import ModelIdentity, Provenance

Models = Callable[[str], Any]
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
    with pytest.raises(InputError, match="weights or precision differ"):
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
