"""The figure of control shows what the table says."""

from __future__ import annotations

import pandas as pd
import pytest
from figures.paper_b import toxicity_against_perplexity
from plot_tables import assert_legible, named


def control_table() -> pd.DataFrame:
    rows = []
    runs = [("unchanged", None, 0.5, 20.0), ("SD", None, 0.2, 24.0), ("filter", None, 0.4, None)]
    runs += [("words", value, 0.5 - value / 20, 20 + value) for value in (3.0, 1.0, 6.0)]
    for method, value, toxic, perplexity in runs:
        row = {"model": "folder/gpt2", "corpus": "prompts.txt", "method": method, "coefficient": value}
        rows.append(
            row | {"metric": "toxic", "value": toxic, "low": toxic / 2, "high": toxic + 0.1, "n": 117}
        )
        rows.append(row | {"metric": "score", "value": 0.9, "low": 0.8, "high": 1.0, "n": 117})
        if perplexity:
            row |= {"corpus": "news", "metric": "perplexity"}
            rows.append(row | {"value": perplexity, "low": 1.0, "high": 90.0, "n": 80})
    return pd.DataFrame(rows)


def test_control_is_a_line_over_its_coefficients_and_baselines_are_points() -> None:
    figure = toxicity_against_perplexity(control_table())
    (ax,) = figure.axes
    assert named(figure) == ["unchanged", "SD", "filter", "words"]
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
    assert_legible(figure)
