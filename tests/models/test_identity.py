"""A model is known by its weights, and what belongs to another model is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import (
    ARCHITECTURES,
)
from identities import make_identity

import matlens
from matlens import InputError
from matlens.models.identity import ModelIdentity, Provenance, fingerprint
from matlens.storage.folders import software_versions


def _changed(model: Any, name: str) -> str:
    parameter = dict(model.original_model.named_parameters())[name]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(1.001).add_(1e-4)
        found = fingerprint(model)
        parameter.copy_(kept)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fingerprint_changes_with_every_parameter(name: str, small_model: Callable[[str], Any]) -> None:
    model = small_model(name)
    names = [name for name, _ in model.original_model.named_parameters()]
    found = [fingerprint(model)] + [_changed(model, name) for name in names]
    assert len(set(found)) == 1 + len(names)
    assert fingerprint(model) == found[0]
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in found)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_fingerprint_is_the_same_for_every_load_and_use(
    name: str, model_folder: Callable[[str], Path], small_model: Callable[[str], Any], tmp_path: Path
) -> None:
    first = fingerprint(small_model(name))
    shutil.copytree(model_folder(name), tmp_path / "elsewhere")
    again = matlens.load(str(tmp_path / "elsewhere"), device="cpu")
    again(torch.arange(5, 15)[None], return_type=None)
    matlens.Readout(again)
    assert fingerprint(again) == first


def test_fingerprint_changes_with_dtype(model_folder: Callable[[str], Path]) -> None:
    folder = str(model_folder("gpt2"))
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    found = [fingerprint(matlens.load(folder, device="cpu", dtype=dtype)) for dtype in kinds]
    assert len(set(found)) == 3


def test_fingerprint_changes_with_dtype_alone(small_model: Callable[[str], Any]) -> None:
    """Values that both precisions hold exactly are not enough to be the same model."""

    class Bridge:
        def __init__(self, dtype: torch.dtype) -> None:
            self.original_model = torch.nn.Linear(3, 2, bias=False, dtype=dtype)
            torch.nn.init.ones_(self.original_model.weight)
            self.original_model.config = transformers.PretrainedConfig()

    wide, narrow = Bridge(torch.float32), Bridge(torch.float16)
    assert fingerprint(wide) != fingerprint(narrow)  # type: ignore[arg-type]


def test_fingerprint_changes_with_names_and_shapes() -> None:
    """The same numbers in other places are another model."""

    class Bridge:
        def __init__(self, **shapes: tuple[int, int]) -> None:
            self.original_model = torch.nn.ParameterDict(
                {name: torch.ones(shape) for name, shape in shapes.items()}
            )
            self.original_model.config = transformers.PretrainedConfig()

    kinds = (Bridge(a=(2, 6)), Bridge(b=(2, 6)), Bridge(a=(6, 2)))
    assert len({fingerprint(kind) for kind in kinds}) == 3  # type: ignore[arg-type]


def test_fingerprint_sees_both_ends_of_a_large_parameter() -> None:
    class Bridge:
        original_model = torch.nn.Linear(3000, 700, bias=False)
        original_model.config = transformers.PretrainedConfig()

    weight = Bridge.original_model.weight
    first = fingerprint(Bridge())  # type: ignore[arg-type]
    for row, column in [(0, 0), (699, 2999)]:
        with torch.no_grad():
            weight[row, column] += 1
        second = fingerprint(Bridge())  # type: ignore[arg-type]
        assert second != first
        first = second


def test_fingerprint_changes_with_the_configuration(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The same weights compute something else with another epsilon."""
    shutil.copytree(model_folder("llama"), tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    folders = (model_folder("llama"), tmp_path / "other")
    first, second = (fingerprint(matlens.load(str(folder), device="cpu")) for folder in folders)
    assert first != second


def test_provenance_names_the_model_that_was_run(small_model: Callable[[str], Any]) -> None:

    model = small_model("gemma2")
    found = ModelIdentity.from_model(model).to_json()
    assert found["fingerprint"] == fingerprint(model)
    assert (found["dtype"], found["n_layers"], found["d_model"]) == ("float32", 3, 32)
    assert found["architecture"] == "Gemma2ForCausalLM"
    versions = software_versions()
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions["transformers"] == transformers.__version__
    assert versions["matlens"] == matlens.__version__


# What belongs to one model


def test_an_identity_is_read_back_from_its_json(small_model: Callable[[str], Any]) -> None:
    known = ModelIdentity.from_model(small_model("gpt2"))
    written = json.loads(json.dumps(known.to_json()))
    assert list(written)[:2] == ["base_model_name_or_path", "base_model_revision"]
    assert ModelIdentity.from_json(written) == known
    quick = ModelIdentity.from_model(small_model("gpt2"), hash_unembedding=False)
    assert quick == replace(known, unembed_hash=None)
    for damaged in ({}, {**written, "colour": "red"}):
        with pytest.raises(InputError, match="The record of a model is damaged"):
            ModelIdentity.from_json(damaged)


WHOLE = Provenance(make_identity(), {"corpus": "words", "n": 3}, "f1", "drawn", {"k": 4, "seed": 2})


@pytest.mark.parametrize("provenance", [WHOLE, WHOLE.samples, Provenance(), Provenance(details={"k": 1})])
def test_a_provenance_is_read_back_from_its_json(provenance: Provenance) -> None:
    assert Provenance.from_json(json.loads(json.dumps(provenance.to_json()))) == provenance


def test_a_provenance_tells_its_parts() -> None:
    assert WHOLE.to_json("data", "k") == {"data": {"corpus": "words", "n": 3}, "k": 4}
    assert (WHOLE.corpus, Provenance().corpus) == ("words", "unnamed")
    assert WHOLE.samples.to_json() == WHOLE.to_json("model", "data", "examples", "positions")
    assert WHOLE.with_details(k=5).details == {"k": 5, "seed": 2}
    assert WHOLE.details["k"] == 4
    with pytest.raises(InputError, match="its provenance names none"):
        _ = Provenance().identity


def test_a_provenance_is_read_from_a_config() -> None:
    request = {"provenance": WHOLE.to_json(), "batch_tokens": 9}
    config = {"holds": "things", "request": request, "software": {"matlens": "1"}, "command": "matlens run"}
    expected = WHOLE.with_details(batch_tokens=9, software={"matlens": "1"}, command="matlens run")
    assert Provenance.from_config(config) == expected
    for missing in ("provenance", "software"):
        damaged = {key: value for key, value in config.items() if key != missing}
        damaged["request"] = {key: value for key, value in request.items() if key != missing}
        with pytest.raises(InputError, match=rf"The config\.json of things is damaged: it lacks '{missing}'"):
            Provenance.from_config(damaged)


def test_one_guard_refuses_what_belongs_to_another_model() -> None:
    other = make_identity("renamed", "f00d")
    WHOLE.require_same(other, ours="the maps")
    WHOLE.require_same(Provenance(other), ours="the maps", theirs="the trace")
    models = r"'some/model' with the fingerprint f00d, and 'b' with the fingerprint beef"
    told = rf"The maps and the trace do not belong together\. .*{models}: weights .*Make the maps anew"
    with pytest.raises(InputError, match=told):
        WHOLE.require_same(Provenance(make_identity("b", "beef")), ours="the maps", theirs="the trace")
    for ours, theirs in ((WHOLE, Provenance()), (Provenance(), WHOLE), (Provenance(), Provenance())):
        with pytest.raises(InputError, match=r"not known.*: both must be known"):
            ours.require_same(theirs, ours="the clusters")


def test_one_guard_refuses_what_was_made_of_other_tokens() -> None:
    """The same weights read other tokens: what was made of these does not go together."""
    other = make_identity(tokens="0001", token_policy="'<s>' in front")
    told = (
        r"The maps and this model do not belong together\. .*the weights are the same, but the same text "
        r"becomes other tokens: nothing added in the first, "
        r"'<s>' in front in the second\. .*matlens\.wrap\(\)"
    )
    with pytest.raises(InputError, match=told):
        WHOLE.require_same(other, ours="the maps")
    with pytest.raises(InputError, match="their vocabularies or special tokens differ"):
        WHOLE.require_same(make_identity(tokens="0001"), ours="the maps")
    with pytest.raises(InputError, match="no tokenizer in the second"):
        WHOLE.require_same(make_identity(tokens=None, token_policy="no tokenizer"), ours="the maps")
