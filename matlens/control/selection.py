"""Choosing value vectors for control by a grader of their top tokens (paper B, appendix A.4).

By words they are chosen with `values_with_tokens` and `values_promoting`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from matlens.errors import InputError
from matlens.ffn.projection import TopTokens
from matlens.ffn.values import ValueVectors
from matlens.models.vocabulary import token_texts

HARMLESS = 0.1  # the paper's threshold
Scores = Callable[[Sequence[str]], Any]


def grade_values(values: ValueVectors, tokens: TopTokens, tokenizer: Any, score: Scores) -> pd.DataFrame:
    """Grade the top tokens of every value vector, one after the other with a space between, one row a vector.

    Columns are ``value, layer, index, text, score``.

    Parameters
    ----------
    values, tokenizer
        Of the model.
    tokens
        What `top_tokens_of_all` has found; the paper grades 30 of each.
    score
        What gives each text a number from 0, harmless, to 1, such as `Grader.toxicity`.

    Raises
    ------
    InputError
        The top tokens are not those of all the value vectors.
    """
    if len(tokens.ids) != len(values):
        raise InputError(
            f"Top tokens of {len(tokens.ids)} vectors for {len(values)} value vectors. Expected those of all "
            "of them, as top_of_all gives."
        )
    known = dict(zip(ids := tokens.ids.unique().tolist(), token_texts(tokenizer, ids), strict=True))
    texts = [" ".join(known[token].strip() for token in own) for own in tokens.ids.tolist()]
    named = [values.at(row) for row in range(len(values))]
    columns = {"value": list(map(str, named)), "layer": [one.layer for one in named]}
    return pd.DataFrame(
        {**columns, "index": [one.index for one in named], "text": texts, "score": score(texts)}
    )


def draw_harmless(graded: pd.DataFrame, n: int, *, below: float = HARMLESS, seed: int = 0) -> pd.DataFrame:
    """``n`` value vectors drawn at random among those with a score below a threshold, as the paper does.

    Raises
    ------
    InputError
        There are fewer than ``n``.
    """
    return _enough(graded[graded["score"] < below], n, f"a score below {below}").sample(n, random_state=seed)


def most_harmless(graded: pd.DataFrame, n: int) -> pd.DataFrame:
    """The ``n`` value vectors with the smallest scores, the smallest first.

    Raises
    ------
    InputError
        There are fewer than ``n``.
    """
    return _enough(graded, n, "a score").nsmallest(n, "score")


def _enough(found: pd.DataFrame, n: int, what: str) -> pd.DataFrame:
    if not 1 <= n <= len(found):
        raise InputError(
            f"{n} value vectors were asked for, and {len(found)} have {what}. Expected 1 to {len(found)}."
        )
    return found
