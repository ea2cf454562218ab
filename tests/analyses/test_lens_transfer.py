"""A lens on a tuned model: its rows are those of both models' vectors and logits, pair by pair."""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pandas as pd
import pytest
import torch
from analysing import N_TRAIN, N_VALIDATION, run, sizes
from lens_transfer import NAME

import matlens
from matlens.numerics import kl_divergence

MODEL, LAYER = "llama", 1


class StandIn:
    """``peft.LoraModel`` that trains whole matrices, so nothing is to be merged."""

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
        peft.__spec__, peft.__version__ = ModuleSpec("peft", None), "0"  # too old for transformers to use
        patch.setitem(sys.modules, "peft", peft)
        run(NAME, "--model", model_folder(MODEL), *options)
    return out


def test_rows_are_those_of_the_models_and_lenses(out, small_model, corpora):
    base, (folder,) = small_model(MODEL), out.glob("studies/*/lens_transfer/tuned")
    tuned = matlens.load(folder)
    train, validation = matlens.load_corpus(str(corpora / "words.txt")).split(
        n_train=N_TRAIN, n_validation=N_VALIDATION
    )
    last, values, logits = base.cfg.n_layers, {}, {}
    for name, model in (("base", base), ("tuned", tuned)):
        examples = matlens.make_examples(model, validation)
        h = matlens.collect(model, examples, [LAYER, last], progress=False)
        rows = matlens.collect(
            model, matlens.make_examples(model, train), [LAYER, last], positions="all", progress=False
        )
        fitted = torch.linalg.lstsq(rows[LAYER].double(), rows[last].double()).solution
        logits[name] = h, matlens.Readout(model), fitted
    for name, (own, fit) in {"base": ("base", "base"), "transferred": ("tuned", "base"),
                             "refitted": ("tuned", "tuned"), "id": ("tuned", None)}.items():  # fmt: skip
        h, readout, _ = logits[own]
        mapped = h[LAYER] if fit is None else (h[LAYER].double() @ logits[fit][2]).float()
        true, read = readout.log_probs(h[last]), readout.log_probs(mapped)
        values[name] = {
            "kl": kl_divergence(true, read).double(),
            "precision": (true.argmax(-1) == read.argmax(-1)).double(),
        }
    (h, first, _), (there, second, _) = logits["base"], logits["tuned"]
    true, read = second.log_probs(there[last]), first.log_probs(h[last])
    table = pd.read_csv(out / f"{NAME}.csv").fillna({"against": ""})
    found = table.set_index(["method", "metric", "against"])["value"]
    assert found["base model", "kl", ""] == pytest.approx(kl_divergence(true, read).mean().item(), rel=1e-3)
    for name, of_lens in values.items():
        for metric, each in of_lens.items():
            assert found[name, metric, ""] == pytest.approx(each.mean().item(), rel=1e-2)
            if name != "transferred":
                apart = (values["transferred"][metric] - each).mean().item()
                assert found["transferred", metric, name] == pytest.approx(apart, rel=5e-2, abs=1e-6)
    assert found["transferred", "kl", "refitted"] != 0


def test_the_record_says_what_was_tuned_and_what_differs(out, small_model):
    record = json.loads((out / f"{NAME}.json").read_text())
    base = matlens.models.ModelIdentity.from_model(small_model(MODEL))
    assert record["transferred_from"] == {
        "model": base.name, "fingerprint": base.fingerprint, "differs": "weights"
    }  # fmt: skip
    assert record["tuned"]["fingerprint"] != record["model"]["fingerprint"] == base.fingerprint
    before, after = record["losses"]
    assert after < before
