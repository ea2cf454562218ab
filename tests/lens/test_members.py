"""Members of the report are the lenses that their names say, fitted on the rows that are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_sentences

from matlens import InputError, Lens
from matlens.lens.members import METHODS, default_methods, fit_members
from matlens.lens.trained import best_start
from matlens.lens.training import polish, scale_map, tune

Settings = Callable[[str], Any]


def test_trained_members_start_from_the_best_closed_form(setting: Settings) -> None:
    model, train, _ = setting("llama")
    names = ["id", "mat", "scaled", "polished", "tuned"]
    members = fit_members(model, train, names, layers=[1], progress=False)
    assert list(members) == names
    last, h = train[model.cfg.n_layers], train[1]
    start = Lens.fit(model, train, method="normed+affine", layers=[1], progress=False)
    readout = start.on_readout
    expected = {
        "scaled": scale_map(readout, start.maps[1], h, last, norm=start.norm),
        "polished": polish(readout, start.maps[1], h, last, norm=start.norm),
        "tuned": tune(readout, h, last),
    }
    for name, held in expected.items():
        lens = members[name].lens
        torch.testing.assert_close(lens.maps[1].matrix(1), held.matrix(1))
        assert lens.maps[1].scale == pytest.approx(held.scale)
        assert lens.norm == (None if name == "tuned" else start.norm)
        assert lens.method == name
        assert lens.layers == (1,)
    assert members["mat"].lens.norm is None
    assert members["id"].seconds == members["id"].flops == 0
    assert members["polished"].seconds > members["scaled"].seconds * 0.5 > 0
    assert members["polished"].flops > members["scaled"].flops > members["mat"].flops > 0


def test_a_trained_lens_is_kept_and_read_back(setting: Settings, tmp_path: Any) -> None:
    model, train, validation = setting("llama")
    lens = fit_members(model, train, ["polished"], layers=[2], progress=False)["polished"].lens
    lens.save(tmp_path / "lens")
    read = Lens.load(tmp_path / "lens", model)
    torch.testing.assert_close(read.logits(validation[2], 2), lens.logits(validation[2], 2))
    assert read.method == "polished"


def test_a_masked_model_starts_from_vectors_as_they_are(setting: Settings) -> None:
    model, train, _ = setting("bert")
    assert best_start(model) == "affine"
    assert default_methods(model) == [name for name in METHODS if "normed" not in name]
    assert default_methods(setting("llama").model) == list(METHODS)
    lens = fit_members(model, train, ["polished"], layers=[1], progress=False)["polished"].lens
    assert lens.norm is None
    assert lens.maps[1].bias is not None


def test_jacobians_are_members_too(setting: Settings) -> None:
    model, train, _ = setting("gpt2")
    texts = tuple(text for text in make_sentences().sentences if len(text.split()) > 18)[:1]
    prompts = make_sentences().__class__("one", texts, 1, 0, 0, 0)
    member = fit_members(model, train, ["jacobian"], layers=[0, 2], prompts=prompts, progress=False)[
        "jacobian"
    ]
    assert member.lens.layers == (2,)
    assert member.seconds > 0
    assert member.flops > 0


@pytest.mark.refused
def test_rows_and_prompts_that_do_not_serve_are_refused(setting: Settings) -> None:
    model, train, _ = setting("llama")
    with pytest.raises(InputError, match="none are given"):
        fit_members(model, train, ["jacobian"])
    with pytest.raises(InputError, match="do not belong"):
        fit_members(setting("gpt2").model, train, ["mat"])
