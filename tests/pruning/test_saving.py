"""A pruned model on disk: whole, plain, and loaded by transformers alone."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from calibration_texts import running_text

import matlens
from matlens import InputError, pruning
from matlens.data import make_windows
from matlens.io.verification import verify

TOKENS = torch.tensor([[7, 3, 41, 12, 12, 59, 30, 22, 8, 17]])
BARE = """
import json, sys
sys.modules["matlens"] = sys.modules["transformer_lens"] = None
import torch, transformers
given = json.loads(sys.stdin.read())
made = {}
for name, folder in given["folders"].items():
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        logits = model(torch.tensor(given["tokens"])).logits
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    made[name] = {"dtype": str(logits.dtype), "tied": tied, "logits": logits.float().tolist()}
try:
    import matlens
except ImportError:
    print(json.dumps(made))
"""


def test_a_folder_loads_to_the_same_logits(pruned_llama, small_model, windows, tmp_path):
    table = pruning.compare_pruned(small_model("llama"), pruned_llama, windows("llama", 600), progress=False)
    costs = pruning.compare_costs(small_model("llama"), pruned_llama, rounds=1)
    folder = pruning.save_pruned(pruned_llama, tmp_path / "model", pd.concat([table, costs]))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, pruned_llama.model(TOKENS).logits)
    assert loaded.config.num_hidden_layers == 2 == len(loaded.model.layers)
    assert transformers.AutoTokenizer.from_pretrained(folder)("w1 w2").input_ids == [
        small_model("llama").tokenizer.convert_tokens_to_ids(word) for word in ("w1", "w2")
    ]
    card = (folder / "README.md").read_text()
    value = table.query("method == 'pruned' and metric == 'perplexity'")["value"].item()
    assert "Removed blocks: 1. The FFN output matrix" in card
    assert f"{value:.4g}" in card
    of_models = {(row.method, row.metric): row.value for row in costs.itertuples()}
    for method, model in (("original", "original model"), ("pruned", "this model")):
        milliseconds, mb, kb = (
            of_models[method, metric] / unit
            for metric, unit in (("seconds", 1e-3), ("weights", 1e6), ("cache", 1e3))
        )
        assert f"| {model} | {milliseconds:.4g} | {mb:.4g} | {kb:.4g} |" in card
    assert json.loads((folder / "matlens.json").read_text())["request"]["removed_blocks"] == [1]
    with pytest.raises(InputError, match="new or empty"):
        pruning.save_pruned(pruned_llama, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folders_load_in_a_process_without_matlens(small_model, model_folder, tmp_path):
    """One process for all families: the same logits, and weights that are one stay one."""
    text = running_text(600)
    models = {name: small_model(name) for name in ("gpt2", "llama", "neox")}
    models["bf16"] = matlens.load(str(model_folder("llama-tied")), dtype=torch.bfloat16, device="cpu")
    expected, folders = {}, {}
    for name, model in models.items():
        made = pruning.prune(model, make_windows(model, text, size=24), [1], progress=False).model
        assert made.config.num_hidden_layers == 2
        folders[name] = str(tmp_path / name)
        made.save_pretrained(folders[name])
        with torch.no_grad():
            logits = made(TOKENS).logits
        tied = made.get_input_embeddings().weight is made.get_output_embeddings().weight
        expected[name] = {"dtype": str(logits.dtype), "tied": tied, "logits": logits.float().tolist()}
    bare = subprocess.run(
        [sys.executable, "-c", BARE], input=json.dumps({"folders": folders, "tokens": TOKENS.tolist()}),
        capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert bare.returncode == 0, bare.stderr[-2000:]
    assert json.loads(bare.stdout) == expected
    assert {name for name, of_model in expected.items() if of_model["tied"]} == {"gpt2", "bf16"}
    assert expected["bf16"]["dtype"] == "torch.bfloat16"


@pytest.mark.parametrize("room", [20_000, 800])
def test_a_full_disk_is_told_and_nothing_is_left(room, pruned_llama, tmp_path, monkeypatch):
    """The library of the weights and that of the tokenizer have errors of their own for it."""
    if room == 800:
        monkeypatch.setattr(pruned_llama.model, "save_pretrained", lambda _: None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(Exception, match=r"File too large|os error 27"):
            pruning.save_pruned(pruned_llama, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_folder_knows_its_files(pruned_llama, tmp_path):
    folder = tmp_path / "model"
    pruning.save_pruned(pruned_llama, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [verdict[1:] for verdict in verify(folder)] == [("pruned model, 6 files", None)]
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    (verdict,) = verify(folder)
    assert "model.safetensors does not hold what was written" in str(verdict.damage)
    (folder / "matlens.json").write_text("null")
    assert ["matlens.json" in str(verdict.damage) for verdict in verify(folder)] == [True]


def test_what_is_measured_is_what_passes_by_hand_give(pruned_llama, small_model, plain_model, windows):
    table = pruning.compare_pruned(small_model("llama"), pruned_llama, windows("llama", 600), progress=False)
    values = {(row.method, row.metric): row.value for row in table.itertuples()}
    text = windows("llama", 600)
    whole = [text.tokens[a:b] for a, b in itertools.pairwise(text.offsets) if b - a == 24]
    tokens = torch.from_numpy(np.stack(whole)).long()
    logits = {}
    for name, model in (("original", plain_model("llama")), ("pruned", pruned_llama.model)):
        with torch.no_grad():
            logits[name] = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[name].flatten(0, 1), tokens[:, 1:].flatten())
        assert values[name, "perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    same = (logits["original"].argmax(-1) == logits["pruned"].argmax(-1)).double().mean()
    assert values["pruned", "agreement"] == pytest.approx(float(same))
    assert 0 < float(same) < 1
    ratio = values["pruned", "perplexity"] / values["original", "perplexity"]
    assert values["pruned", "ratio"] == pytest.approx(ratio)
