"""A lens on a tuned model: its rows are those of vectors and logits of the two models, pair by pair."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from analysing import run, sizes
from lens_transfer import NAME

import matlens

MODEL, LAYER = "llama", 1


class StandIn:
    """``peft.LoraModel`` with whole matrices in place of low-rank ones; nothing is to be merged."""

    def __init__(self, model: Any, config: Any, name: str) -> None:
        self.model = model
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(path.split(".")[-2] in config.target_modules)

    def merge_and_unload(self) -> Any:
        return self.model


@pytest.fixture(scope="module")
def out(corpora, model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("transfer")
    options = ["--corpus", corpora / "words.txt", *sizes(), "--steps", 20, "--layer", LAYER, "--out", out]
    with pytest.MonkeyPatch.context() as patch:
        peft: Any = types.ModuleType("peft")
        peft.LoraModel, peft.LoraConfig = StandIn, types.SimpleNamespace
        patch.setitem(sys.modules, "peft", peft)
        with pytest.warns(matlens.InputWarning, match="although they differ"):
            run(NAME, "--model", model_folder(MODEL), *options)
    return out


@pytest.fixture(scope="module")
def tuned(out):
    (folder,) = out.glob("studies/*/lens_transfer/tuned")
    return matlens.load(folder)
