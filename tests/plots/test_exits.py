"""The figure of early exit shows what is in its table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer

from matlens.ffn.early_exit import JudgedExits, summarize_exits
from matlens.plots.exits import exits_figure


def table(seeds: int) -> pd.DataFrame:
    found = {
        f"way {i}": [
            JudgedExits(0.9 - i / 20 + seed / 50, i + seed, 0.5, 0.4 - i / 30) for seed in range(seeds)
        ]
        for i in range(10)
    }
    return summarize_exits(found, 12).assign(model="folder/gpt2", corpus="words", n=2000)


@pytest.mark.parametrize("seeds", [1, 3])
def test_each_method_has_a_mark_its_deviations_and_its_chance(seeds: int) -> None:
    rows = table(seeds)
    figure = exits_figure(rows)
    (ax,) = figure.axes
    marks = [one for one in ax.containers if isinstance(one, ErrorbarContainer)]
    assert [one.get_label() for one in marks] == [f"way {i}" for i in range(10)]
    looks = set()
    hollow = {
        tuple(line.get_xydata()[0])
        for line in ax.get_lines()
        if line.get_mfc() == "white" and len(line.get_xydata())
    }
    for one, row in zip(marks, rows.to_dict("records"), strict=True):
        point, _, bars = one.lines
        assert point.get_xydata().tolist() == [[row["saved"], row["accuracy"]]]
        looks.add((point.get_color(), point.get_marker()))
        assert (row["saved"], row["chance"]) in hollow
        if seeds > 1:
            (across,), (up,) = (bar.get_segments() for bar in bars)
            assert np.ptp(across[:, 0]) == pytest.approx(2 * row["saved_sd"])
            assert np.ptp(up[:, 1]) == pytest.approx(2 * row["accuracy_sd"])
    assert len(looks) == 10
    low, high = ax.get_ylim()
    assert 0 <= low < rows["chance"].min()
    assert high > rows["accuracy"].max()
    assert figure.get_suptitle() == f"gpt2, words, n = 2,000, {seeds} splits"
