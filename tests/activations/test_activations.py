"""Collected vectors are read by site, from memory and from a folder that may be damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    N_LAYERS,
)

import matlens
from matlens import collect, make_examples
from matlens.activations.activations import Activations
from matlens.data.corpus import Corpus
from matlens.data.examples import Examples
from matlens.models.weights import fingerprint

STREAM = [f"h.{layer}" for layer in range(N_LAYERS + 1)]


@pytest.fixture
def llama(small_model: Callable[[str], Any], sentences: Corpus) -> tuple[Any, Examples]:
    """A model, and sentences of different lengths."""
    model = small_model("llama")
    return model, make_examples(model, sentences)


def test_activations_are_read_by_name_number_or_site(llama: tuple[Any, Examples]) -> None:
    found = collect(*llama, ["h.2", "attn_out.0"], progress=False)
    assert torch.equal(found[2], found["h.2"])
    assert torch.equal(found[matlens.Site("h", 2)], found["h.2"])
    assert (len(found), found.n_rows, list(found)) == (2, 40, ["h.2", "attn_out.0"])
    with pytest.raises(KeyError, match=r"h\.1 was not collected; there are h\.2, attn_out\.0"):
        found[1]


def test_provenance_says_what_was_run(llama: tuple[Any, Examples]) -> None:
    model, examples = llama
    found = collect(model, examples, progress=False).provenance
    assert found.identity.fingerprint == fingerprint(model)
    assert found.data == examples.provenance
    assert (list(found.details["columns"]), found.positions, found.examples) == (
        STREAM,
        "drawn",
        examples.fingerprint,
    )
    assert set(found.details["software"]) > {"matlens", "torch", "transformers"}


def test_a_loaded_collection_does_not_change_on_disk(llama: tuple[Any, Examples], tmp_path: Path) -> None:
    found = collect(*llama, [0], folder=tmp_path / "out", progress=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    found[0].zero_()
    for rows in found.shards([0]):
        rows.vectors["h.0"].zero_()
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert float(Activations.load(tmp_path / "out")[0].abs().max()) > 0
