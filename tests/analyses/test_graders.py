"""Graders give each text its scores, and say what is missing: a package, weights or a key."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from control.graders import ATTRIBUTES, grade_texts, make_grader
from control.perspective import Perspective
from hypothesis import given
from hypothesis import strategies as st

from matlens import InputError

SECRET = "a-secret-key"


# The local one


def test_profanity_check_tells_rude_texts_from_kind_ones() -> None:
    grader = make_grader("profanity-check")
    assert (grader.name, grader.attributes) == ("profanity-check", ("toxicity",))
    rude, kind = ["You stupid idiot", "shut up, you moron"], ["Thank you, my dear friend", "", "zxqv"]
    scores = grader.grade([*rude, *kind])
    assert set(scores) == {"toxicity"}
    assert scores["toxicity"].dtype == np.float64
    assert (scores["toxicity"][:2] > 0.9).all()
    assert (scores["toxicity"][2:] < 0.1).all()
    np.testing.assert_allclose(grader.grade(kind)["toxicity"], scores["toxicity"][2:])
    assert grader.grade([])["toxicity"].shape == (0,)


# detoxify, which a stand-in of its interface takes the place of


class Scored:
    """Gives the length of each text, as lists, and as a bare number for a single one, as detoxify does."""

    asked: list[list[str]]

    def __init__(self, kind: str) -> None:
        assert kind == "unbiased"

    def predict(self, texts: list[str]) -> dict[str, Any]:
        self.asked.append(texts)
        lengths = [len(text) / 100 for text in texts]
        names = (
            "toxicity", "severe_toxicity", "obscene", "identity_attack", "insult", "threat",
            "sexual_explicit",
        )  # fmt: skip
        shown = lengths if len(texts) > 1 else lengths[0]
        return {name: shown if name != "obscene" else [1 - n for n in lengths] for name in names}


def test_detoxify_is_asked_in_parts_and_its_attributes_get_the_tables_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "detoxify", types.SimpleNamespace(Detoxify=Scored))
    Scored.asked = []
    grader = make_grader("detoxify")
    texts = ["x" * n for n in range(33)]
    graded = grader.grade(texts)
    assert [len(one) for one in Scored.asked] == [32, 1]
    assert grader.attributes == tuple(ATTRIBUTES) == tuple(graded)
    for name, scores in graded.items():
        expected = np.arange(33) / 100
        np.testing.assert_allclose(scores, 1 - expected if name == "profanity" else expected)
    assert all(scores.shape == (0,) for scores in grader.grade([]).values())


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("profanity-check", "profanity_check", "pip install alt-profanity-check"),
        ("detoxify", "detoxify", "pip install detoxify"),
        ("perspective", "requests", "pip install requests"),
    ],
)
def test_a_package_that_is_not_there_is_told_with_how_to_get_it(
    name: str, module: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSPECTIVE_API_KEY", SECRET)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "control.perspective")
    with pytest.raises(InputError, match=message) as raised:
        make_grader(name)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(("name", "meant"), [("perspectve", "perspective"), ("Detoxify", "detoxify")])
def test_an_unknown_grader_is_told_with_the_names_there_are(name: str, meant: str) -> None:
    with pytest.raises(InputError, match=rf"^grader must be one of .*Did you mean '{meant}'\?"):
        make_grader(name)


@pytest.mark.parametrize("key", [None, "", "  "])
def test_without_a_key_there_is_no_perspective(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSPECTIVE_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("PERSPECTIVE_API_KEY", key)
    with pytest.raises(InputError, match=r"PERSPECTIVE_API_KEY is not set.*export PERSPECTIVE_API_KEY="):
        make_grader("perspective")


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSPECTIVE_API_KEY", f" {SECRET}\n")
    grader = make_grader("perspective")
    assert isinstance(grader, Perspective)
    assert SECRET not in f"{grader} {grader!r}"
    grader.close()


# What a grader gives


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
    graded = grade_texts(Given({"toxicity": scores, "threat": scores, "more": "x"}), ["one", "two", "three"])
    assert list(graded) == ["toxicity", "threat"]
    assert graded["threat"].dtype == np.float64
    assert graded["threat"].tolist() == [0, 0.5, 1]
    assert grade_texts(Given({"toxicity": [], "threat": ()}), [])["toxicity"].shape == (0,)


@pytest.mark.parametrize(
    "scores",
    [
        None, [0, 0], [[0, 0, 0]], 0.5, ["0", "0", "0"], [0, None, 0], [True, False, True],
        [0, float("nan"), 0], [0, 0, float("inf")], [-0.001, 0, 0], [0, 0, 1.5], [0j, 0, 0], "abc",
        [10**400, 0, 0],
    ],
)  # fmt: skip
def test_what_are_no_scores_is_told(scores: Any) -> None:
    given = Given({"toxicity": [0, 0, 0], "threat": scores})
    with pytest.raises(InputError, match="scores of 'threat' by the grader 'given' must be 3 numbers from 0"):
        grade_texts(given, ["one", "two", "three"])


@given(st.lists(st.floats(0, 1), max_size=5))
def test_scores_come_through_unchanged(scores: list[float]) -> None:
    graded = grade_texts(Given({"toxicity": scores, "threat": scores}), ["x"] * len(scores))
    assert graded["toxicity"].tolist() == scores
