"""What a grader gives is scores of every text, or is refused by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from matlens.errors import InputError
from matlens.ffn.scores import check_texts, grade_texts

TEXTS = ["one", "two", "three"]


class Given:
    """A grader that gives what it is told to."""

    name = "given"
    attributes = ("toxicity", "threat")

    def __init__(self, scores: Any) -> None:
        self.scores = scores

    def grade(self, texts: list[str]) -> Any:
        return self.scores


@pytest.mark.parametrize(
    "scores",
    [[0, 0.5, 1], (0.0, 0.5, 1.0), np.array([0, 0.5, 1], np.float32), torch.tensor([0, 0.5, 1])],
)
def test_numbers_from_0_to_1_are_scores(scores: Any) -> None:
    graded = grade_texts(Given({"toxicity": scores, "threat": scores, "more": "x"}), TEXTS)
    assert list(graded) == ["toxicity", "threat"]
    assert graded["threat"].dtype == np.float64
    assert graded["threat"].tolist() == [0, 0.5, 1]
    assert grade_texts(Given({"toxicity": [], "threat": ()}), [])["toxicity"].shape == (0,)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "The grader given gives None"),
        ([0, 0, 0], "gives .0, 0, 0."),
        ({}, "scores of toxicity by the grader given are None"),
        ({"toxicity": [0, 0, 0]}, "scores of threat by the grader given are None"),
        ({"toxicity": [0, 0]}, r"have the shape \(2,\)\. Expected 3 numbers"),
        ({"toxicity": [[0, 0, 0]]}, r"shape \(1, 3\)"),
        ({"toxicity": 0.5}, r"shape \(\)"),
        ({"toxicity": [0, [1], 0]}, "scores of toxicity"),
        ({"toxicity": ["0", "0", "0"]}, "scores of toxicity"),
        ({"toxicity": [0, None, 0]}, "scores of toxicity"),
        ({"toxicity": [True, False, True]}, "scores of toxicity"),
        ({"toxicity": [0, float("nan"), 0]}, "of text 1 is nan. Expected 3 numbers from 0 to 1"),
        ({"toxicity": [0, 0, float("inf")]}, "of text 2 is inf"),
        ({"toxicity": [-0.001, 0, 0]}, "of text 0 is -0.001"),
        ({"toxicity": [0, 0, 1.5]}, "of text 2 is 1.5"),
        ({"toxicity": [0j, 0, 0]}, "scores of toxicity"),
        ({"toxicity": "abc"}, "scores of toxicity"),
        ({"toxicity": [10**400, 0, 0]}, "scores of toxicity"),
    ],
)
def test_what_are_no_scores_is_told(scores: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        grade_texts(Given(scores), TEXTS)


@given(st.lists(st.floats(0, 1), max_size=5))
def test_scores_come_through_unchanged(scores: list[float]) -> None:
    graded = grade_texts(Given({"toxicity": scores, "threat": scores}), ["x"] * len(scores))
    assert graded["toxicity"].tolist() == scores


@pytest.mark.parametrize("grader", [None, "perspective", object(), type("Half", (), {"grade": len})()])
def test_what_is_no_grader_is_told(grader: Any) -> None:
    with pytest.raises(InputError, match=r"The grader is .* Expected one of ffn\.make_grader"):
        grade_texts(grader, TEXTS)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("abc", r"^texts must be"),
        (None, r"^texts must be"),
        ([1], r"^texts must be"),
        (["a", None], r"^texts must be"),
        ({"a": 1}, r"^texts must be"),
        (b"abc", r"^texts must be"),
    ],
)
def test_what_are_no_texts_is_told(texts: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_texts(texts, "texts")
