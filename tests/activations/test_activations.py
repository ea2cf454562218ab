"""Collected vectors are read by site, from memory and from a folder that may be damaged."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    N_LAYERS,
)

import matlens
from matlens import InputError, collect, make_examples
from matlens.activations.activations import Activations
from matlens.data.corpus import Corpus
from matlens.data.examples import Examples
from matlens.io.arrays import describe_file
from matlens.io.files import read_json, sealed, write_json

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
    assert found.identity.fingerprint == matlens.models.fingerprint(model)
    assert found.data == examples.provenance
    assert (list(found.details["columns"]), found.positions, found.examples) == (
        STREAM,
        "drawn",
        examples.fingerprint,
    )
    assert set(found.details["software"]) > {"matlens", "torch", "transformers"}


def test_a_loaded_collection_does_not_change_on_disk(llama: tuple[Any, Examples], tmp_path: Path) -> None:
    found = collect(*llama, [0], folder=tmp_path / "out", progress=False)
    before = (tmp_path / "out" / "h.0.npy").read_bytes()
    found[0].zero_()
    assert (tmp_path / "out" / "h.0.npy").read_bytes() == before
    assert float(Activations.load(tmp_path / "out")[0].abs().max()) > 0


def _truncate(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, int((folder / name).stat().st_size * keep))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_truncate("h.1.npy", 0.5), id="rows cut"),
        pytest.param(_truncate("h.3.npy", 0.001), id="header cut"),
        pytest.param(_truncate("h.3.npy", 0.0), id="no bytes"),
        pytest.param(_truncate("tokens.npy", 0.5), id="tokens cut"),
        pytest.param(_truncate("offsets.npy", 0.0), id="offsets without bytes"),
        pytest.param(lambda folder: (folder / "h.2.npy").unlink(), id="rows missing"),
        pytest.param(lambda folder: (folder / "h.2.npy").write_bytes(b"not numpy's"), id="garbage"),
        pytest.param(lambda folder: (folder / "config.json").write_text("{"), id="config cut"),
        pytest.param(
            lambda folder: (folder / "config.json").write_text('{"request": {}}'), id="other config"
        ),
        pytest.param(lambda folder: shutil.rmtree(folder), id="no folder"),
    ],
)
def test_a_damaged_collection_is_refused(
    damage: Callable[[Path], None], llama: tuple[Any, Examples], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    collect(*llama, folder=folder, progress=False)
    damage(folder)
    with pytest.raises(InputError, match=re.escape(str(folder))):
        Activations.load(folder)


def test_tokens_that_the_record_does_not_know_are_refused(
    llama: tuple[Any, Examples], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    collect(*llama, [0], folder=folder, progress=False)
    tokens = np.load(folder / "tokens.npy")
    np.save(folder / "tokens.npy", tokens[::-1].copy())  # with a record that fits the file
    config = read_json(folder / "config.json")
    config["files"]["tokens.npy"] = describe_file(folder / "tokens.npy")
    write_json(folder / "config.json", sealed(config))
    with pytest.raises(InputError, match="does not belong to the tokens and positions"):
        Activations.load(folder)
