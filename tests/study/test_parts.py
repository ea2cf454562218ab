"""Positions of the training sentences: sampled, or all of few."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from studying import collect_parts

import matlens


@pytest.mark.parametrize("options", [{}, {"sample_special": False}])
def test_all_positions_of_a_masked_model_are_refused(options, small_model, sentences, tmp_path):
    model = small_model("llama" if options else "bert")
    with pytest.raises(matlens.InputError, match=r"masked|sample_special"):
        collect_parts(model, sentences, tmp_path, positions="all", **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "free", "positions"),
    [("gpt2", 1 << 40, "all"), ("gpt2", 40_000, "sampled"), ("bert", 1 << 40, "sampled")],
)
def test_few_sentences_take_all_positions_if_memory_allows(
    name, free, positions, small_model, collect, tmp_path, monkeypatch
):
    monkeypatch.setattr("matlens.study.plan.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    train, validation = collect(small_model(name), tmp_path, positions="auto")
    assert (train.positions, validation.positions) == (positions, "sampled")
    if free == 1 << 40:  # what exists is used, however little disk is free
        monkeypatch.setattr("matlens.study.plan.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        again, _ = collect(small_model(name), tmp_path, positions="auto")
        assert again.positions == positions
