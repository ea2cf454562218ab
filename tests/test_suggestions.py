"""A typo in a name is answered with the name that was meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import matlens
from matlens import InputError
from matlens.lens.config import parse_methods

TYPOS: dict[str, tuple[Callable[[], Any], str]] = {
    "a model": (lambda: matlens.load("smolm2-135m"), "smollm2-135m"),
    "a sample": (lambda: matlens.load_corpus("wikipedia-smaple"), "wikipedia-sample"),
    "a method": (lambda: parse_methods("jacobain"), "jacobian"),
    "a method of several": (lambda: parse_methods(["mat", "afine"]), "affine"),
    "a trained method": (lambda: parse_methods("polised"), "polished"),
}


@pytest.mark.parametrize("what", TYPOS)
def test_a_typo_gets_a_suggestion(what: str) -> None:
    use, meant = TYPOS[what]
    with pytest.raises(InputError, match=re.escape(f"Did you mean '{meant}'?")):
        use()


@pytest.mark.parametrize("name", ["", "xyz", "\n", "a" * 500])
def test_what_is_like_no_name_gets_none(name: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_methods(name)
    assert "Did you mean" not in str(refused.value)
