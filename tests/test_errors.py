"""A message shows what others wrote, and does nothing to the terminal."""

from __future__ import annotations

import pickle
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matlens.errors import InputError, did_you_mean, printable


@pytest.mark.parametrize("text", ["", "plain", "日本 é ␣ 𝄞", "a\u00a0b\u3000c", "\\x1b", "[red]"])
def test_what_can_be_seen_stays(text):
    assert printable(text) == text


@given(st.text(st.characters()), st.integers(1, 120))
def test_nothing_unseen_is_left_and_no_more_than_asked_for(text, limit):
    for shown in (printable(text), printable(text, limit=limit)):
        assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
        assert shown.encode() or not text
    assert len(printable(text, limit=limit)) <= limit
    assert printable(printable(text)) == printable(text)


def test_an_error_cleans_its_message_and_keeps_its_lines():
    error = InputError(f"First.\nSecond \x1b[2J\u202e{'x' * 10**6}. Do that.")
    assert str(error).startswith("First.\nSecond \\x1b[2J\\u202exxx")
    assert str(error).endswith("x…")
    assert len(str(error)) <= 2000
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == str(InputError(error))
    assert isinstance(error, ValueError)
    assert str(InputError()) == ""


def test_a_typo_is_answered_with_the_closest_name():
    known = ["mat", "affine", "jacobian"]
    assert "jacobian" in did_you_mean("jacobain", known)
    for name in ("", "xyz", "\n", "a" * 500, 3):
        assert did_you_mean(name, known) == ""
