"""Cards say what a lens was fitted on and how well it reads, and nothing of the machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import D_MODEL
from injections import INJECTIONS

from matlens.lens.cards import bare, lens_card, lens_entry, quality_of, repository_card
from matlens.lens.maps import LayerMap, LensParts
from matlens.models.identity import ModelIdentity, Provenance

COLUMNS = (
    "experiment", "model", "corpus", "method", "layer", "target", "metric", "k", "value", "low", "high", "n",
)  # fmt: skip


def table(*rows: tuple[str, int | None, str, int | None, float, str]) -> pd.DataFrame:
    """A table of results: method, layer, metric, k, value and against."""
    lines = [
        ("lens_report", "m", "c", method, layer, 30, metric, k, value, None, None, 9, against)
        for method, layer, metric, k, value, against in rows
    ]
    return pd.DataFrame(lines, columns=[*COLUMNS, "against"])


RESULTS = table(
    ("mat", 4, "r2", None, 0.5, ""), ("mat", 4, "precision", 1, 0.25, ""),
    ("mat", 5, "precision", 1, 0.35, ""), ("mat", 4, "precision", 1, 0.1, "id"),
    ("id", 4, "precision", 1, 0.01, ""), ("mat", None, "seconds", None, 3.0, ""),
    ("mat", 5, "r2", None, float("nan"), ""),
)  # fmt: skip


@pytest.fixture
def lens(small_model: Callable[[str], Any]) -> LensParts:
    identity = replace(
        ModelIdentity.from_model(small_model("llama")), name="maker/model-135m", revision="abc", n_layers=30
    )
    data = {"corpus": "wikipedia-sample", "n": 4000, "seed": 7}
    provenance = Provenance(identity, data, positions="all").with_details(n_fitted=112_344, n_sinks=4_001)
    maps = {layer: LayerMap(torch.eye(D_MODEL)) for layer in (3, 4, 5, 9)}
    return LensParts(maps, "mat without sinks", provenance)


def test_measures_are_those_of_the_method_and_no_differences() -> None:
    assert quality_of("mat", RESULTS) == {4: {"r2": 0.5, "Precision@1": 0.25}, 5: {"Precision@1": 0.35}}


def test_a_card_says_what_the_lens_was_fitted_on_and_how_well_it_reads(lens: LensParts) -> None:
    card = lens_card(lens, quality_of("mat", RESULTS))
    for part in (
        "# mat without sinks of maker/model-135m", "| corpus | wikipedia-sample, 4,000 sentences |",
        "| fitted on | 112,344 tokens |", "| attention sinks | out (4,001) |", "| positions | all |",
        "| layers | 3-5, 9 of 30, each onto the last |", "revision abc", "| seed | 7 |",
        "| layer | r2 | Precision@1 |", "| 4 | 0.500 | 0.250 |", "| 5 | – | 0.350 |",
        lens.provenance.identity.fingerprint,
    ):  # fmt: skip
        assert part in card, part
    assert "has not been measured" in lens_card(lens, None)


def test_the_repository_lists_its_lenses_with_their_means(lens: LensParts) -> None:
    entry = lens_entry("model-135m/mat/words", lens, quality_of("mat", RESULTS))
    assert entry["mean"] == {"r2": 0.5, "Precision@1": pytest.approx(0.3)}
    bare_entry = lens_entry("a/b", lens._replace(method="mat"), None)
    card = repository_card("someone/lenses", [entry, bare_entry])
    assert "base_model:\n- maker/model-135m\n---" in card
    row = "| wikipedia-sample | 112,344 | out (4,001) | 3-5, 9 | 0.500 | 0.300 |"
    assert row in card
    assert "| 112,344 | in | 3-5, 9 | – | – |" in card
    assert 'Lens.from_pretrained("someone/lenses", "model-135m/mat/words", model, revision="...")' in card


@pytest.mark.parametrize(
    ("name", "expected"),
    [("maker/model", "maker/model"), ("/home/somebody/model", "model"), ("./data/x.txt", "x.txt"),
     ("C:\\work\\x", "x"), ("~/x/", "x"), ("wikipedia-sample", "wikipedia-sample")],
)  # fmt: skip
def test_folders_of_the_machine_are_not_told(name: str, expected: str) -> None:
    assert bare(name) == expected


def test_texts_of_others_add_no_line_and_no_markup(lens: LensParts) -> None:
    harmless = lens_card(lens, None)
    for text in INJECTIONS:
        provenance = replace(lens.provenance, data={"corpus": text, "n": 1})
        card = lens_card(lens._replace(provenance=provenance, method=text), None)
        assert card.count("\n") == harmless.count("\n"), ascii(text)
        assert not re.search(r"(?<!\\)<", card), ascii(text)
        entry = lens_entry("a/b", lens._replace(provenance=provenance, method=text), None)
        listed = repository_card("a/b", [entry])
        assert listed.count("\n") == repository_card("a/b", [lens_entry("a/b", lens, None)]).count("\n")
        assert not [line for line in listed.splitlines()[10:] if line == "---"]
