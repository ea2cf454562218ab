"""A model is known by its weights, and what belongs to another model is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from identities import make_identity

from matlens import InputError
from matlens.models.identity import ModelIdentity, Provenance

# What belongs to one model


def test_an_identity_is_read_back_from_its_json(small_model):
    known = ModelIdentity.from_model(small_model("gpt2"))
    written = json.loads(json.dumps(known.to_json()))
    assert list(written)[:2] == ["base_model_name_or_path", "base_model_revision"]
    assert ModelIdentity.from_json(written) == known
    for damaged in ({}, {**written, "color": "red"}, {**written, "rounded": "b1"}):
        with pytest.raises(InputError, match="The record of a model is damaged"):
            ModelIdentity.from_json(damaged)


WHOLE = Provenance(make_identity(), {"corpus": "words", "n": 3}, "f1", "sampled", {"k": 4, "seed": 2})


@pytest.mark.parametrize("provenance", [WHOLE, WHOLE.samples, Provenance(), Provenance(details={"k": 1})])
def test_a_provenance_is_read_back_from_its_json(provenance):
    assert Provenance.from_json(json.loads(json.dumps(provenance.to_json()))) == provenance


def test_one_guard_refuses_what_belongs_to_another_model_or_other_tokens():
    other = make_identity("renamed", "f00d")
    WHOLE.check_same(other, ours="the maps")
    WHOLE.check_same(Provenance(other), ours="the maps", theirs="the trace")
    refused = {
        make_identity("b", "beef"): "weights or precision differ",
        make_identity(tokens="0001", token_policy="'<s>' in front"): "in the first, '<s>' in front",
        make_identity(tokens="0001"): "their vocabularies or special tokens differ",
        make_identity(tokens=None, token_policy="no tokenizer"): "no tokenizer in the second",
    }
    for identity, reason in refused.items():
        with pytest.raises(InputError, match=f"The maps and this model do not belong together.*{reason}"):
            WHOLE.check_same(identity, ours="the maps")
    for ours, theirs in ((WHOLE, Provenance()), (Provenance(), WHOLE), (Provenance(), Provenance())):
        with pytest.raises(InputError, match=r"not known.*: both must be known"):
            ours.check_same(theirs, ours="the clusters")


def test_one_guard_takes_another_precision_only_where_it_is_told_so():
    wide = make_identity(fingerprint="aa", rounded={"bfloat16": "b1", "float16": "h1"})
    narrow = make_identity(fingerprint="bb", rounded={"bfloat16": "b1"}, dtype="bfloat16")
    other = make_identity(fingerprint="cc", rounded={"bfloat16": "b2"}, dtype="bfloat16")
    strict, lenient = Provenance(wide), Provenance(wide, same_precision=False)
    with pytest.raises(
        InputError, match=r"same but for their precision, float32 .*bfloat16 .*same_precision"
    ):
        strict.check_same(narrow, ours="the maps")
    lenient.check_same(narrow, ours="the maps")
    Provenance(narrow).check_same(lenient, ours="the activations")
    assert lenient == strict
    assert "same_precision" not in lenient.to_json()
    with pytest.raises(InputError, match="weights or precision differ"):
        lenient.check_same(other, ours="the maps")
    with pytest.raises(InputError, match="becomes other tokens"):
        lenient.check_same(replace(narrow, tokens="0001", token_policy="'<s>' in front"), ours="the maps")
