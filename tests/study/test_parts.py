"""Positions of the training sentences: sampled, or all of few."""

from __future__ import annotations

import pytest
from studying import collect_parts

import matlens


@pytest.mark.parametrize("options", [{}, {"sample_special": False}])
def test_all_positions_of_a_masked_model_are_refused(options, small_model, sentences, tmp_path):
    model = small_model("llama" if options else "bert")
    with pytest.raises(matlens.InputError, match=r"masked|sample_special"):
        collect_parts(model, sentences, tmp_path, positions="all", **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "positions"), [("gpt2", "all"), ("bert", "sampled")])
def test_few_sentences_take_all_positions(name, positions, small_model, collect, tmp_path):
    train, validation = collect(small_model(name), tmp_path, positions="auto")
    assert (train.positions, validation.positions) == (positions, "sampled")
