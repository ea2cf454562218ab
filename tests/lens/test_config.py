"""Lenses are named by their options, methods of other packages are found, and contradictions refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import D_MODEL

from matlens import InputError, Lens, collect, make_examples
from matlens.lens.config import LensConfig, parse_methods


def test_a_name_tells_the_options():
    everything = LensConfig(standardise=True, intercept=True, rank=64, sinks="exclude")
    names = {
        "mat": LensConfig(), "affine": LensConfig(intercept=True), "ridge=loo": LensConfig(ridge="loo"),
        "standardise+intercept+rank=64+sinks=exclude": everything,
        "weighted+ridge=0.01+shared_map": LensConfig(ridge=0.01, weighted=True, shared_map=True),
        "intercept+sinks=exclude": LensConfig(intercept=True, sinks="exclude"),
    }  # fmt: skip
    assert {config.name: config for config in names.values()} == names
    contradictions: list[dict[str, Any]] = [
        {"toward": "identity"}, {"toward": "identity", "ridge": 1.0, "rank": 3},
        {"weighted": True, "standardise": True},
    ]  # fmt: skip
    for options in contradictions:
        with pytest.raises(InputError, match=r"requires a ridge|rank=None|not be combined"):
            LensConfig(**options)
    parsed = parse_methods(["tuned", everything, "mat"])
    assert parsed == {"tuned": None, everything.name: everything, "mat": LensConfig()}
    assert list(parsed) == ["tuned", everything.name, "mat"]


def test_another_package_adds_a_method(tmp_path, monkeypatch, small_model, sentences):
    """A package with an entry point is found once it is installed, here as a folder on the path."""
    (tmp_path / "means_to_last.py").write_text(
        "import torch\n"
        "from matlens import LinearMap\n"
        "def fit(model, vectors, *, layers, seed, progress):\n"
        "    last = f'h.{model.cfg.n_layers}'\n"
        "    shift = {n: (vectors[last] - vectors[n]).mean(0) + seed for n in layers}\n"
        "    one = torch.eye(model.cfg.d_model)\n"
        "    return {n: LinearMap(one, b, f'h.{n}', last) for n, b in shift.items()}\n"
    )
    installed = tmp_path / "means_to_last-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: means-to-last\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[matlens.lens_methods]\nmeans = means_to_last:fit\n")
    model, examples = small_model("llama"), make_examples(small_model("llama"), sentences)
    with pytest.raises(InputError, match="method must be one of"):
        Lens.fit(model, examples, method="means")
    monkeypatch.syspath_prepend(str(tmp_path))
    lenses = Lens.fit(model, examples, method=["mat", "means"], layers=[1], seed=2, progress=False)
    vectors = collect(model, examples, [1, 3], positions="all", progress=False)
    h = torch.zeros(1, D_MODEL)
    torch.testing.assert_close(lenses["means"](h, 1)[0], (vectors[3] - vectors[1]).mean(0) + 2)
    assert lenses["means"].method == "means"
    assert lenses["means"].n_samples == vectors.n_rows
    assert lenses["means"].logits(h, 1).shape == (1, model.cfg.d_vocab)
    lenses["means"].save(tmp_path / "lens")
    assert Lens.load(tmp_path / "lens", model).digest == lenses["means"].digest
