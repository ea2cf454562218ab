"""Pairs of texts become what the encoder and the decoder read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS

import matlens
from matlens import InputError
from matlens.activations.activations import Activations
from matlens.data import make_pairs

SOURCES = [" ".join(WORDS[(3 * i + j) % 50] for j in range(4 + i)) for i in range(5)]
TARGETS = [" ".join(WORDS[(7 * i + 2 * j) % 50] for j in range(8 - i)) for i in range(5)]


@pytest.fixture(scope="module")
def decoder(model_folder: Callable[[str], Path]) -> Any:
    return matlens.load(str(model_folder("t5")), device="cpu", stack="decoder")


def test_pairs_are_shifted_as_in_training_and_kept_in_folders(decoder: Any, tmp_path: Path) -> None:
    model = decoder
    examples = make_pairs(model, SOURCES, TARGETS, seed=3)
    for number, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        start, end = examples.offsets[number : number + 2]
        first, last = examples.source_offsets[number : number + 2]
        ids = model.tokenizer(target)["input_ids"]
        assert examples.source_tokens[first:last].tolist() == model.tokenizer(source)["input_ids"]
        assert examples.tokens[start:end].tolist() == [0, *ids[:-1]]
    assert len(set(examples.positions.tolist())) > 0
    alone = make_pairs(model, SOURCES[2:3], TARGETS[2:3], seed=3)
    assert alone.positions[0] == examples.positions[2]
    matlens.collect(model, examples, folder=tmp_path / "kept", progress=False)
    kept = Activations.load(tmp_path / "kept").examples
    assert kept.fingerprint == examples.fingerprint
    assert kept.head(2).fingerprint == make_pairs(model, SOURCES[:2], TARGETS[:2], seed=3).fingerprint
    # Other sources are other examples.
    others = make_pairs(model, SOURCES[::-1], TARGETS, seed=3)
    assert others.fingerprint != examples.fingerprint


def test_what_is_no_pair_is_refused(decoder: Any, small_model: Callable[[str], Any]) -> None:
    with pytest.raises(InputError, match="Pairs are for the decoder"):
        make_pairs(small_model("gpt2"), SOURCES, TARGETS)
    with pytest.raises(InputError, match="There are 5 sources and 4 targets"):
        make_pairs(decoder, SOURCES, TARGETS[1:])
    with pytest.raises(InputError, match="There are 0 sources and 0 targets"):
        make_pairs(decoder, [], [])
    with pytest.raises(InputError, match=r"has 0 tokens\. Expected 1 to"):
        make_pairs(decoder, [""], ["w1"])
    with pytest.raises(InputError, match=r"^sources must be"):
        make_pairs(decoder, "w1 w2", ["w1"])
