"""Curves with bands, their axes, and marks of what is infinite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from figures.paper_a import by_method, relative_depth
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from plot_tables import assert_curve, assert_legible, methods_table, prediction_table

from matlens.plots.colours import Look
from matlens.plots.layers import draw_line, plot_layers, precision_axis, surprisal_axis
from matlens.plots.style import save

LOOK = Look("#123456", "--", "D", hollow=True)


def infinite(table: pd.DataFrame, layers: list[int]) -> tuple[pd.DataFrame, pd.Series]:
    """The table with the surprisal of all methods but ``id`` infinite at some layers, and which rows are."""
    table = table.copy()
    rows = (table["metric"] == "surprisal") & table["layer"].isin(layers) & (table["method"] != "id")
    table.loc[rows, ["value", "low", "high"]] = float("inf"), float("nan"), float("nan")
    return table, rows


def marks(ax: Axes) -> list[PathCollection]:
    return [dots for dots in ax.collections if isinstance(dots, PathCollection)]


def test_a_line_has_the_look_of_its_method() -> None:
    rows = prediction_table(5)
    rows = rows[(rows["method"] == "mat") & (rows["k"] == 1)]
    ax = Figure().subplots()
    draw_line(ax, rows, LOOK, "name")
    line = assert_curve(ax, "name", rows)
    assert to_rgb(line.get_color()) == to_rgb(LOOK.colour)
    assert (line.get_linestyle(), line.get_marker()) == ("--", "D")
    assert line.get_markerfacecolor() == "white"


def test_axes_start_at_zero_and_hold_all_that_is_drawn() -> None:
    left, right = Figure().subplots(1, 2)
    left.plot([0, 1], [0.2, 1.0])
    right.plot([0, 1], [3, 40])
    precision_axis(left)
    surprisal_axis(right)
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0
    assert left.get_ylim()[1] >= 1
    assert right.get_ylim()[1] >= 40
    assert "Precision" in left.get_ylabel()
    assert "nats" in right.get_ylabel()


@pytest.mark.parametrize("lost", [[0, 1], [4], list(range(7))])
@pytest.mark.parametrize("draw", [plot_layers, relative_depth, by_method])
def test_an_infinite_surprisal_is_a_gap_and_no_harm(draw: object, lost: list[int], tmp_path: Path) -> None:
    """What is not finite predicts nothing, so a mean over it has no value and no interval to draw."""
    table, rows = infinite(prediction_table(6), lost)
    figure = draw(table)  # type: ignore[operator]
    right = figure.axes[1]
    heights = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in right.lines])
    assert np.isinf(heights).sum() == rows.sum() > 0
    save(figure, tmp_path / "figure")
    low, high = right.get_ylim()
    assert low == 0
    assert np.isfinite(high)
    finite = heights[np.isfinite(heights)]
    assert not len(finite) or high >= finite.max()


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([0, 1], "infinite before layer 2"),
        ([0, 1, 2, 3], "infinite before layer 4"),
        ([2], "infinite at layer 2"),
        ([0, 3], "infinite at layers 0, 3"),
        ([0, 1, 2, 3, 4], "infinite at every layer"),
    ],
)
def test_infinite_values_are_marked_above_the_top_edge_and_named(lost: list[int], words: str) -> None:
    table, _ = infinite(methods_table(["mat_ffn", "id", "mat_ln1_ln2"]), lost)
    left, right = by_method(table).axes
    assert_legible(right.figure)
    assert marks(left) == []
    assert [text.get_text() for text in right.texts] == [words, words]
    curves = [line for line in right.lines if line.get_label() != "id"]
    heights = set()
    for row, line in zip(marks(right), curves, strict=True):
        assert row.get_offsets()[:, 0].tolist() == lost
        assert tuple(row.get_edgecolor()[0][:3]) == to_rgb(line.get_color())
        places = row.get_offset_transform().transform(row.get_offsets())
        inside = right.transData.transform([[layer, 0] for layer in lost])
        np.testing.assert_allclose(places[:, 0], inside[:, 0])
        assert (places[:, 1] > right.get_window_extent().y1).all()
        heights.add(round(places[0, 1], 3))
        for text in right.texts:
            box = text.get_window_extent()
            on_text = (box.x0 < places[:, 0]) & (places[:, 0] < box.x1) & (box.y0 < places[:, 1]) & (
                places[:, 1] < box.y1
            )  # fmt: skip
            assert not on_text.any()
    assert len(heights) == 2


def test_a_panels_title_stands_above_the_marks() -> None:
    ax = Figure(layout="constrained").subplots()
    ax.plot([0, 1, 2], [np.inf, np.inf, 1], label="a")
    ax.set_title("title")
    surprisal_axis(ax)
    assert_legible(ax.figure)
    ((mark,),) = ([row] for row in marks(ax))
    top = mark.get_offset_transform().transform(mark.get_offsets())[:, 1].max()
    assert ax.title.get_window_extent().y0 > top
