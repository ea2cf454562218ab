"""Choosing value vectors for control by a grader of their top tokens (paper B, appendix A.4).

To choose them by words, see `values_with_tokens` and `values_promoting` of `matlens.ffn`.
"""

from __future__ import annotations

import pandas as pd

from matlens.errors import InputError, Seed, Tokenizer, check_int, checked
from matlens.ffn.graders import TOXICITY, Grader
from matlens.ffn.projection import TopTokens, name_columns
from matlens.ffn.scores import grade_texts
from matlens.ffn.values import ValueVectors
from matlens.io.tables import check_columns
from matlens.models.vocabulary import token_texts

HARMLESS = 0.1  # the paper's threshold


@checked
def grade_values(
    values: ValueVectors, tokens: TopTokens, tokenizer: Tokenizer, grader: Grader
) -> pd.DataFrame:
    """Grade every value vector by the toxicity of its top tokens, one row a vector (appendix A.4).

    The tokens stand one after the other with a space between. Columns are ``value, layer, index, text,
    score``.

    Parameters
    ----------
    values, tokenizer
        Value vectors of the model, and its tokenizer.
    tokens
        Top tokens of all value vectors, as `top_tokens_of_all` gives them; the paper grades 30 of each.
    grader
        A grader, whose toxicity from 0, harmless, to 1 is the score.

    Raises
    ------
    InputError
        The top tokens are not those of all the value vectors.
    """
    if len(tokens.ids) != len(values):
        raise InputError(
            f"Top tokens of {len(tokens.ids)} vectors for {len(values)} value vectors. Expected those of all "
            "of them, as top_tokens_of_all gives."
        )
    ids = tokens.ids.unique().tolist()
    words = dict(zip(ids, token_texts(tokenizer, ids), strict=True))
    texts = [" ".join(words[token].strip() for token in row) for row in tokens.ids.tolist()]
    return name_columns(values, range(len(values))).assign(
        text=texts, score=grade_texts(grader, texts)[TOXICITY]
    )


@checked
def draw_harmless(graded: pd.DataFrame, n: int, *, below: float = HARMLESS, seed: Seed = 0) -> pd.DataFrame:
    """Draw ``n`` value vectors at random among those with a score below a threshold (appendix A.4).

    Parameters
    ----------
    graded
        Graded value vectors, as `grade_values` gives them.
    n
        How many value vectors to draw.
    below
        The threshold.
    seed
        Seed of the draw.

    Raises
    ------
    InputError
        There are fewer than ``n`` such vectors, or ``n`` is less than 1.
    """
    _check_graded(graded)
    harmless = graded[graded["score"] < below]
    return _check_enough(harmless, n, f"a score below {below}").sample(n, random_state=seed)


@checked
def most_harmless(graded: pd.DataFrame, n: int) -> pd.DataFrame:
    """The ``n`` value vectors with the smallest scores, the smallest first.

    Parameters
    ----------
    graded
        Graded value vectors, as `grade_values` gives them.
    n
        How many value vectors to take.

    Raises
    ------
    InputError
        There are fewer than ``n`` vectors, or ``n`` is less than 1.
    """
    _check_graded(graded)
    return _check_enough(graded, n, "a score").nsmallest(n, "score")


def _check_graded(graded: pd.DataFrame) -> None:
    check_columns(graded, ["score"], what="what grade_values gives")


def _check_enough(graded: pd.DataFrame, n: int, quality: str) -> pd.DataFrame:
    check_int(n, f"The number of value vectors with {quality}", min=1, max=len(graded))
    return graded
