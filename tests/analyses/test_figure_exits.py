"""Figures of early exit show what is in their tables, and no accuracy that cannot be."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from exits import EvaluatedExits, summarize_exits
from figures.paper_b import exits_figure
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from plot_tables import (
    assert_legible,
    named,
)


def exits_table(seeds: int, accuracy: float = 0.9) -> pd.DataFrame:
    evaluated = {
        f"way {i}": [
            EvaluatedExits(min(1.0, accuracy - i / 20 + seed / 50), i + seed, 0.5, 0.4 - i / 30, 0.1)
            for seed in range(seeds)
        ]
        for i in range(10)
    }
    return summarize_exits(evaluated, 12).assign(model="folder/gpt2", corpus="words", n=2000)


def marks(figure: Figure) -> list[ErrorbarContainer]:
    return [bars for bars in figure.axes[0].containers if isinstance(bars, ErrorbarContainer)]


@pytest.mark.parametrize("seeds", [1, 3])
def test_each_method_has_a_mark_its_deviations_and_its_chance(seeds: int) -> None:
    table = exits_table(seeds)
    figure = exits_figure(table)
    (ax,) = figure.axes
    assert [mark.get_label() for mark in marks(figure)] == [f"way {i}" for i in range(10)]
    assert named(figure) == [*(f"way {i}" for i in range(10)), "its layers at random"]
    looks = set()
    hollow = {
        tuple(line.get_xydata()[0])
        for line in ax.get_lines()
        if line.get_mfc() == "white" and len(line.get_xydata())
    }
    for mark, row in zip(marks(figure), table.to_dict("records"), strict=True):
        point, _, bars = mark.lines
        assert point.get_xydata().tolist() == [[row["saved"], row["accuracy"]]]
        looks.add((point.get_color(), point.get_marker()))
        assert (row["saved"], row["chance"]) in hollow
        if seeds > 1:
            (across,), (up,) = (bar.get_segments() for bar in bars)
            assert np.ptp(across[:, 0]) == pytest.approx(2 * row["saved_sd"])
            assert np.ptp(up[:, 1]) == pytest.approx(2 * row["accuracy_sd"])
    assert len(looks) == 10
    low, high = ax.get_ylim()
    assert 0 <= low < table["chance"].min()
    assert high > table["accuracy"].max()
    assert figure.get_suptitle() == f"gpt2, words, n = 2,000, {seeds} splits"
    assert_legible(figure)
