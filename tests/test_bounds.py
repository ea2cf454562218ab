"""Bounds of foreign data hold, and JSON within them is read as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from matlens.errors import InputError
from matlens.io.bounds import BOUNDS, Bound, parse_json

PLANKS = Bound("MATLENS_TEST_PLANKS", 3, "planks in a box", 10)


def test_a_bound_names_the_variable_that_raises_it(monkeypatch):
    PLANKS.check(30, "The box")
    with pytest.raises(InputError, match=r"^The box has more than 3 planks in a box.*MATLENS_TEST_PLANKS"):
        PLANKS.check(31, "The box")
    monkeypatch.setenv("MATLENS_TEST_PLANKS", " 4 ")
    PLANKS.check(40, "The box")
    with pytest.raises(InputError, match="more than 4 planks"):
        PLANKS.check(41, "The box")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "9" * 30, "٣", "1e3", "\x1b[2J"])
def test_a_variable_that_is_no_number_is_refused(text, monkeypatch):
    monkeypatch.setenv("MATLENS_TEST_PLANKS", text)
    with pytest.raises(InputError, match=r"MATLENS_TEST_PLANKS .* must be an integer above 0"):
        PLANKS.check(1, "The box")


@pytest.mark.parametrize("text", ["{", "", "1" * 5000, "[" * 100_000, "nul"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(InputError, match="it must be JSON") as raised:
        parse_json(text, "it")
    assert len(str(raised.value)) < 400


def test_every_bound_stands_in_the_how_to():
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "own-sentences.md").read_text(encoding="utf-8")
    for bound in BOUNDS:
        assert f"| `{bound.variable}` | {bound.default} |" in page
