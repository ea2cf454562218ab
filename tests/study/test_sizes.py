"""Sizes of a study: in proportion where a corpus is small, and what is said of few samples."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matlens.linear.samples import are_few
from matlens.study.sizes import fitting_sizes, note_on_samples


@given(st.integers(0, 200), st.integers(1, 300), st.integers(2, 300))
def test_a_small_corpus_is_split_in_proportion(n: int, n_train: int, n_validation: int) -> None:
    sizes = fitting_sizes(n, n_train, n_validation)
    if n_train + n_validation <= n:
        assert sizes == (n_train, n_validation)
    elif sizes != (n_train, n_validation):
        assert n - 2 <= sum(sizes) <= n
        assert sizes[0] >= 1
        assert sizes[1] >= 2
        assert abs(sizes[0] * n_validation - sizes[1] * n_train) <= n_train + n_validation
    else:  # one of the parts would be too small, which is said where the corpus is split
        share = n / (n_train + n_validation)
        assert n_train * share < 1 or n_validation * share < 2


@pytest.mark.parametrize(
    ("adjustable", "expected"),
    [
        ((), (90, 30)),
        (("train", "validation"), (30, 10)),
        (("train",), (10, 30)),
        (("validation",), (90, 30)),  # nothing would be left
    ],
)
def test_what_the_user_gave_is_kept(adjustable: Any, expected: tuple[int, int]) -> None:
    assert fitting_sizes(40, 90, 30, adjustable) == expected
    assert fitting_sizes(100, 90, 30, ("validation",)) == (90, 10)


@pytest.mark.parametrize(("n", "few"), [(0, True), (1151, True), (1152, False), (9000, False)])
def test_few_are_fewer_than_twice_the_width(n: int, few: bool) -> None:
    assert are_few(n, 576) is few


def test_few_samples_are_said() -> None:
    fit: dict[str, Any] = {"model": {"d_model": 576}, "n_samples": 800, "ridge": 0.0}
    note = note_on_samples(fit)
    assert note is not None
    for part in ("800 samples", "576 dimensions", "noise", "--train", "--positions all", "--ridge"):
        assert part in note
    assert "a ridge of 26000" in (note_on_samples({**fit, "ridge": 26000.0}) or "")
    assert note_on_samples({**fit, "n_samples": 1152}) is None
    assert note_on_samples({}) is None
