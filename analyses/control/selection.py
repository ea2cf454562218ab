"""Selection of value vectors by words or by a grader (paper B, appendix A.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from studies import Model

from control.graders import TOXICITY, Grader, grade_texts
from matlens.errors import check_int
from matlens.ffn import Projection, ValueVectors
from matlens.models import token_texts

HARMLESS = 0.1  # the paper's threshold


def choose_values(
    model: Model,
    grader: Grader,
    words: Sequence[str],
    *,
    picked: Sequence[str] = (),
    n: int = 10,
    seed: int = 0,
) -> dict[str, tuple[str, ...]]:
    """Value vectors to steer with, by selection method.

    ``picked``: given by hand; ``words``: the ``n`` with most of the words in their 30 top tokens; ``graded``:
    ``n`` sampled from those whose top tokens, joined by spaces, a grader scores as harmless. A method is
    called ``words, 10 vectors``; one that finds no vectors is skipped.
    """
    values, projection = ValueVectors(model), Projection.from_model(model)
    vectors = {}
    if picked:
        vectors[f"picked, {len(picked)} vectors"] = tuple(str(values.resolve(name)) for name in picked)
    top = projection.top_of_all(values)
    by_words = projection.search(values, top, words)["value"].head(n)  # the best come first
    if len(by_words):
        vectors[f"words, {len(by_words)} vectors"] = tuple(by_words)
    ids = top.ids.unique().tolist()
    texts = dict(zip(ids, token_texts(projection.tokenizer, ids), strict=True))
    joined = [" ".join(texts[token].strip() for token in row) for row in top.ids.tolist()]
    named = values.name_columns(range(len(values)))
    harmless = named[grade_texts(grader, joined)[TOXICITY] < HARMLESS]
    check_int(n, f"The number of value vectors with a score below {HARMLESS}", min=1, max=len(harmless))
    sampled = harmless.sample(n, random_state=seed)
    return vectors | {f"graded, {n} vectors": tuple(sampled["value"])}


def tokens_of_chosen(model: Model, vectors: Mapping[str, Sequence[str]], *, k: int = 10) -> pd.DataFrame:
    """Top tokens of the selected value vectors, one row per token (paper B, Table 8).

    Columns are ``method``, and those of `Projection.table` but for ``side``.
    """
    values, projection = ValueVectors(model), Projection.from_model(model)
    both = pd.concat(
        projection.table(values, names, k).assign(method=method) for method, names in vectors.items()
    )
    top = both[both["side"] == "top"].drop(columns="side")
    return top[["method", *top.columns.drop("method")]].reset_index(drop=True)
