"""Figures about feed-forward layers show what is in their table."""

from __future__ import annotations

import pandas as pd
import pytest

from matlens.evaluation import COLUMNS
from matlens.ffn.plots import shares_by_layer


def table(corpus: str) -> pd.DataFrame:
    rows = []
    for layer in range(13):
        for method, value, n in (("values", 0.5 + layer / 100, 48), ("random", 0.25, 20)):
            told = ("overlap", "folder/gpt2", corpus, method, layer, layer, "iou", 30)
            rows.append((*told, value, value - 0.1, value + 0.1, n))
    return pd.DataFrame(rows, columns=list(COLUMNS)).sample(frac=1, random_state=0)


def test_each_method_is_a_line_over_all_layers() -> None:
    figure = shares_by_layer(table("none"), "overlap")
    (ax,) = figure.axes
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert set(lines) == {"values, n = 48", "random, n = 20"}
    line = lines["values, n = 48"]
    assert list(line.get_xdata()) == list(range(13))
    assert list(line.get_ydata()) == pytest.approx([0.5 + layer / 100 for layer in range(13)])
    assert ax.get_ylabel() == "overlap"
    assert ax.get_ylim()[0] == 0
    assert ax.get_xticks()[-1] == 12
    assert len(ax.collections) == 2


@pytest.mark.parametrize(("corpus", "title"), [("none", "gpt2"), ("words", "gpt2, words")])
def test_the_title_names_the_model_and_the_corpus_if_there_is_one(corpus: str, title: str) -> None:
    assert shares_by_layer(table(corpus), "overlap").get_suptitle() == title
