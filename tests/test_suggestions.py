"""A typo in a name is answered with the name that was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import matlens
from matlens import InputError
from matlens.lens.trained import check_method_names

TYPOS: dict[str, tuple[Callable[[], Any], str]] = {
    "a model": (lambda: matlens.load("smolm2-135m"), "smollm2-135m"),
    "a sample": (lambda: matlens.load_corpus("wikipedia-smaple"), "wikipedia-sample"),
    "a method": (lambda: check_method_names("rigde"), "ridge"),
    "a method of several": (lambda: check_method_names("normed+afine"), "affine"),
    "a trained method": (lambda: check_method_names("polised"), "polished"),
}


@pytest.mark.parametrize("what", TYPOS)
def test_a_typo_gets_a_suggestion(what: str) -> None:
    use, meant = TYPOS[what]
    with pytest.raises(InputError, match=rf"Did you mean '{meant}'\?"):
        use()


@pytest.mark.parametrize("name", ["", "xyz", "\n", "a" * 500])
def test_what_is_like_no_name_gets_none(name: str) -> None:
    with pytest.raises(InputError) as refused:
        check_method_names(name)
    assert "Did you mean" not in str(refused.value)
