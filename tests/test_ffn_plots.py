"""Figures about feed-forward layers show what is in their table."""

from __future__ import annotations

import pandas as pd
import pytest

from matlens.evaluation import COLUMNS
from matlens.ffn.plots import shares_by_layer, toxicity_against_perplexity


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


def control_table() -> pd.DataFrame:
    rows = []
    runs = [("unchanged", None, 0.5, 20.0), ("SD", None, 0.2, 24.0), ("filter", None, 0.4, None)]
    runs += [("words", value, 0.5 - value / 20, 20 + value) for value in (3.0, 1.0, 6.0)]
    for method, value, toxic, perplexity in runs:
        told = {"model": "folder/gpt2", "corpus": "prompts.txt", "method": method, "coefficient": value}
        rows.append(
            told | {"metric": "toxic", "value": toxic, "low": toxic / 2, "high": toxic + 0.1, "n": 117}
        )
        rows.append(told | {"metric": "score", "value": 0.9, "low": 0.8, "high": 1.0, "n": 117})
        if perplexity:
            told |= {"corpus": "news", "metric": "perplexity"}
            rows.append(told | {"value": perplexity, "low": 1.0, "high": 90.0, "n": 80})
    return pd.DataFrame(rows)


def test_control_is_a_line_over_its_coefficients_and_baselines_are_points() -> None:
    figure = toxicity_against_perplexity(control_table())
    (ax,) = figure.axes
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["unchanged", "SD", "filter", "words"]
    bars = {box.get_label(): box for box in ax.containers}
    words = bars["words"].lines[0]
    assert list(words.get_xdata()) == [21, 23, 26]
    assert list(words.get_ydata()) == pytest.approx([0.45, 0.35, 0.2])
    assert list(bars["SD"].lines[0].get_xdata()) == [24]
    ends = bars["SD"].lines[2][0].get_segments()[0][:, 1]
    assert list(ends) == pytest.approx([0.1, 0.3])
    levels = [line for line in ax.get_lines() if line.get_label() == "filter"]
    assert list(levels[0].get_ydata()) == [0.4, 0.4]
    assert {text.get_text() for text in ax.texts} == {"1", "3", "6"}
    assert figure.get_suptitle() == "gpt2, prompts.txt, 117 prompts"
