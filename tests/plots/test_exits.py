"""Figures of early exit show what is in their tables, and no accuracy that cannot be."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from exits import JudgedExits, summarize_exits
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from plot_tables import METHODS, assert_curve, assert_legible, named, prediction_table

from matlens.plots.exits import early_exit, exits_figure


def early_table() -> pd.DataFrame:
    """Early exits lie between layers, and many thresholds give the same."""
    fixed = prediction_table(5)
    fixed = fixed[(fixed["k"] == 1) & (fixed["layer"] > 0)].assign(lam=float("nan"))
    early = fixed.assign(
        lam=fixed["layer"] / 5, layer=fixed["layer"] * 0.77 + 0.1, value=fixed["value"] + 0.05
    )
    return pd.concat([early, fixed, early.assign(lam=early["lam"] + 0.01)], ignore_index=True)


def test_early_exits_are_solid_and_fixed_exits_of_the_same_colour_are_not() -> None:
    table = early_table()
    figure = early_exit(table)
    (ax,) = figure.axes
    colours = []
    for method in METHODS:
        rows = table[table["method"] == method]
        early = assert_curve(ax, f"{method}, early exit", rows[rows["lam"].notna()])
        fixed = assert_curve(ax, f"{method}, fixed exit", rows[rows["lam"].isna()])
        assert early.get_color() == fixed.get_color()
        assert early.get_linestyle() != fixed.get_linestyle()
        colours.append(early.get_color())
    assert colours[0] != colours[1]
    (goal,) = (line for line in ax.lines if line.get_label()[0] == "_")
    assert list(goal.get_ydata()) == [0.95, 0.95]
    assert [text.get_text() for text in ax.texts] == ["95%"]
    assert len(ax.lines) == 5
    assert figure.get_suptitle() == "model, some-corpus, n = 1,234"
    assert_legible(figure)


def exits_table(seeds: int, accuracy: float = 0.9) -> pd.DataFrame:
    judged = {
        f"way {i}": [
            JudgedExits(min(1.0, accuracy - i / 20 + seed / 50), i + seed, 0.5, 0.4 - i / 30, 0.1)
            for seed in range(seeds)
        ]
        for i in range(10)
    }
    return summarize_exits(judged, 12).assign(model="folder/gpt2", corpus="words", n=2000)


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


def test_bars_end_where_no_accuracy_and_no_layers_can_be() -> None:
    table = exits_table(3).assign(accuracy=0.9, accuracy_sd=0.2, saved=0.5, saved_sd=0.8)
    table.loc[0, ["accuracy", "saved"]] = 0.1, 2.0
    for mark, row in zip(marks(exits_figure(table)), table.to_dict("records"), strict=True):
        (across,), (up,) = (bar.get_segments() for bar in mark.lines[2])
        expected = max(0.0, row["saved"] - 0.8), row["saved"] + 0.8
        assert sorted(across[:, 0]) == pytest.approx(expected)
        expected = max(0.0, row["accuracy"] - 0.2), min(1.0, row["accuracy"] + 0.2)
        assert sorted(up[:, 1]) == pytest.approx(expected)
