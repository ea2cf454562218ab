"""A name is a folder, a file, a wheel or a place on the hub, which is asked once; what is none is refused."""

from __future__ import annotations

import shutil
import time

import huggingface_hub.constants
import pytest
import torch
from conftest import assert_near

import matlens
from matlens import InputError
from matlens.models.places import locate


def test_an_unknown_hub_name_without_network_is_refused_after_one_question(
    no_network, empty_cache, monkeypatch
):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(InputError, match=r"hub cannot be reached.*Expected a hub name"):
        matlens.load("someone/no-such-model")
    assert len(no_network) <= 2
    assert sum(slept) < 5


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "~no-such-user/m", "a/b/c", "/not/there"])
def test_what_is_no_name_is_refused(name, no_network):
    with pytest.raises(InputError, match=r"^name must be|no model"):
        locate(name, None)
    assert no_network == []


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(("offline", "revision"), [(True, None), (False, COMMIT)])
def test_a_cached_hub_model_is_loaded_without_network(
    revision, offline, model_folder, plain_model, no_network, empty_cache, monkeypatch
):
    repository = empty_cache / "models--someone--small"
    shutil.copytree(model_folder("gpt2"), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    model = matlens.load("someone/small", device="cpu", revision=revision)
    assert len(no_network) <= (0 if offline else 2)
    assert (model.cfg.model_name, model.matlens_revision) == ("someone/small", COMMIT)
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert_near(model(tokens, return_type="logits"), plain_model("gpt2")(tokens).logits)
