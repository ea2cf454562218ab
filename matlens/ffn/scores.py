"""What a grader is given and what it gives, checked: anybody can write one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from matlens.errors import InputError, check, printable, short


def check_texts(texts: Any, name: str) -> list[str]:
    """Read a list of texts; raises InputError if it is one text, or if an item is not a text."""
    check(texts, Sequence[str], name)
    listed = list(texts)
    check(listed, Sequence[str], name)  # of an iterator too
    return listed


def grade_texts(grader: Any, texts: Sequence[str]) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of every text, for each attribute, of a grader that anybody may have written.

    Raises
    ------
    InputError
        It is no grader, or what it gives are not scores from 0 to 1, one for each text and attribute.
    """
    if not callable(getattr(grader, "grade", None)) or not getattr(grader, "attributes", None):
        raise InputError(
            f"The grader is {short(grader)}. Expected one of ffn.make_grader, or an object with a name, "
            "attributes and a method grade(texts)."
        )
    listed = check_texts(texts, "texts")
    return check_scores(grader.grade(listed), grader, len(listed))


def check_scores(scores: Any, grader: Any, n: int) -> dict[str, Float[np.ndarray, " n"]]:
    """Read what a grader gives for ``n`` texts.

    Raises
    ------
    InputError
        An attribute is missing, or its scores are not ``n`` numbers from 0 to 1.
    """
    name = printable(str(getattr(grader, "name", type(grader).__name__)), most=60)
    if not isinstance(scores, Mapping):
        raise InputError(f"The grader {name} gives {short(scores)}. Expected scores for each attribute.")
    return {
        attribute: _scores_of(attribute, scores.get(attribute), name, n)
        for attribute in check_texts(grader.attributes, f"The attributes of the grader {name}")
    }


def _scores_of(attribute: str, given: Any, name: str, n: int) -> Float[np.ndarray, " n"]:
    expected = f"Expected {n} numbers from 0 to 1, one for each text."
    what = f"of {printable(attribute, most=60)} by the grader {name}"
    try:
        scores = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of different lengths, tensors on a device
        raise InputError(f"The scores {what} are {short(given)}. {expected}") from error
    if scores.size == 0 and n == 0:
        return np.empty(0)
    if scores.dtype.kind not in "fiu":
        raise InputError(f"The scores {what} are {short(given)}. {expected}")
    if scores.shape != (n,):
        raise InputError(f"The scores {what} have the shape {scores.shape}. {expected}")
    wrong = np.flatnonzero(~((scores >= 0) & (scores <= 1)))
    if len(wrong):
        raise InputError(f"The score {what} of text {wrong[0]} is {scores[wrong[0]]}. {expected}")
    return scores.astype(np.float64)
