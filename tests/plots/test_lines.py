"""Curves with bands, their axes, and marks of what is infinite."""

from __future__ import annotations

import numpy as np
import pytest
from figures.paper_a import by_method
from matplotlib.axes import Axes
from matplotlib.cbook import is_math_text
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from plot_tables import assert_legible, lens_table, methods_table

from matlens.plots import plot_report


def marks(ax: Axes) -> list[PathCollection]:
    return [dots for dots in ax.collections if isinstance(dots, PathCollection)]


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([0, 1], "infinite before layer 2"), ([2], "infinite at layer 2"),
        ([0, 3], "infinite at layers 0, 3"), ([0, 1, 2, 3, 4], "infinite at every layer"),
    ],
)  # fmt: skip
def test_infinite_values_are_marked_above_the_top_edge_and_named(lost, words):
    table = methods_table(["mat_ffn", "id", "mat_ln1_ln2"])
    rows = (table["metric"] == "surprisal") & table["layer"].isin(lost) & (table["method"] != "id")
    table.loc[rows, ["value", "low", "high"]] = float("inf"), float("nan"), float("nan")
    left, right = by_method(table).axes
    assert_legible(right.figure)
    assert marks(left) == []
    assert [text.get_text() for text in right.texts] == [words, words]
    assert right.get_ylim()[0] == 0
    assert np.isfinite(right.get_ylim()[1])
    curves = [line for line in right.lines if line.get_label() != "id"]
    heights = set()
    for row, line in zip(marks(right), curves, strict=True):
        assert row.get_offsets()[:, 0].tolist() == lost
        assert np.isinf(line.get_ydata()).sum() == len(lost)
        assert tuple(row.get_edgecolor()[0][:3]) == to_rgb(line.get_color())
        places = row.get_offset_transform().transform(row.get_offsets())
        inside = right.transData.transform([[layer, 0] for layer in lost])
        np.testing.assert_allclose(places[:, 0], inside[:, 0])
        assert (places[:, 1] > right.get_window_extent().y1).all()
        heights.add(round(places[0, 1], 3))
    assert len(heights) == 2


@pytest.mark.parametrize("methods", [("mat",), ("id", "mat", "polished", "tuned")])
def test_lenses_have_a_bar_of_seconds_and_a_logarithmic_axis_of_kl(methods):
    _, _, costs, surprisal, kl = plot_report(lens_table(12, methods)).axes
    assert (surprisal.get_yscale(), kl.get_yscale()) == ("linear", "log")
    labels = [tick.get_text() for tick in kl.get_yticklabels()]
    assert {"1", "2", "5", "10", "20"} <= set(labels)
    assert not any(is_math_text(label) or "e" in label for label in labels)
    assert [bar.get_width() for bar in costs.patches] == pytest.approx(
        [23.4 * i for i in range(len(methods))]
    )
    assert [tick.get_text() for tick in costs.get_yticklabels()] == list(methods)
