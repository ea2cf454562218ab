"""Families are found in their folder and in installed packages, and the core asks them alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from conftest import assert_near

import matlens
from matlens import InputError
from matlens.models import registry
from matlens.models.registry import families

PACKAGE = '''
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from matlens.models import Family, register

class Halved(torch.nn.Module):
    def forward(self, x):
        return x / 2

@register
class Tiny(Family):
    """Models in files that name a folder, whose logits are halved."""

    def read_file(self, path, dtype):
        if path.suffix != ".tiny":
            return None
        folder = path.read_text()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return AutoTokenizer.from_pretrained(folder), model

    def head(self, model):
        if str(model.cfg.model_name).endswith(".tiny"):
            return [model.ln_final.original_component, Halved(), model.unembed.original_component]
'''


@pytest.fixture
def forgotten(monkeypatch):
    """What a test registers is gone after it."""
    families()
    monkeypatch.setattr(registry, "_REGISTERED", list(registry._REGISTERED))
    yield
    registry._find.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_an_installed_package_adds_an_architecture(model_folder, plain_model, tmp_path, monkeypatch):
    (tmp_path / "tiny_models.py").write_text(PACKAGE)
    about = tmp_path / "tiny_models-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-models\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[matlens.families]\ntiny = tiny_models\n")
    (tmp_path / "a.tiny").write_text(str(model_folder("llama")))
    with pytest.raises(InputError, match="unknown file format"):
        matlens.load(tmp_path / "a.tiny", device="cpu")
    monkeypatch.syspath_prepend(tmp_path)
    registry._find.cache_clear()
    model = matlens.load(tmp_path / "a.tiny", device="cpu")
    tokens = torch.arange(1, 9)[None]
    with torch.inference_mode():
        assert_near(model(tokens), plain_model("llama")(tokens).logits)
    with pytest.raises(InputError, match="do not give the model's own logits"):
        matlens.Readout(model)  # by the head of the family, which halves them


def test_the_core_imports_no_architecture():
    """An architecture is a new file in ``families``, and no other module of the package changes."""
    for path in Path(registry.__file__).parent.glob("*.py"):
        imported = {
            node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        }
        assert not [name for name in imported if name and "families" in name], path.name
