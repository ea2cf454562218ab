"""The figure of extreme clusters shows what is in its table."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from figures.paper_b import extremes_figure
from matplotlib.colors import to_hex
from plot_tables import assert_legible
from sub_updates.extremes import ACTIVITY_COLUMNS

N = 12


def table() -> pd.DataFrame:
    rows = []
    for read in ("score", "lift"):
        for name, n in (("extreme", N), ("sampled", 30)):
            for i in range(n):
                common = 0.5 if read == "score" else i / n
                first = (40 + i, 1 - 2 * (i % 2), "other", 4, 0.5, n - i, (n - i) / 100, i % 3 / 2, 0.0, 0.1)
                where = (i % 8, 0, 7, common, 0.25, "L0D0", "␣a$b, \U0001f600, \uf8ff, third, fourth")
                rows.append((*first, *where, name, read))
    table = pd.DataFrame(rows, columns=[*ACTIVITY_COLUMNS, "sub_updates", "read"])
    return table.assign(model="folder/gpt2", corpus="words")


def test_dots_are_clusters_by_layer_commonness_and_share() -> None:
    clusters = table()
    figure = extremes_figure(clusters, 2000)
    assert figure.get_suptitle() == "gpt2, words, n = 2,000"
    assert len(figure.axes) == 2
    for ax, read in zip(figure.axes, ("score", "lift"), strict=True):
        drawn, extreme = (dots for dots in ax.collections if len(dots.get_offsets()) > 0)
        for dots, name in ((drawn, "sampled"), (extreme, "extreme")):
            rows = clusters[(clusters["read"] == read) & (clusters["sub_updates"] == name)]
            assert dots.get_offsets()[:, 0].tolist() == rows["layer"].tolist()
            expected = (rows["common"] - rows["unseen"]).tolist()
            assert dots.get_offsets()[:, 1].tolist() == pytest.approx(expected)
        areas = extreme.get_sizes()
        assert np.diff(areas) == pytest.approx(np.full(N - 1, areas[0] - areas[1]) * -1)
        colours = [to_hex(colour) for colour in extreme.get_facecolors()]
        raised = [i % 3 / 2 >= 0.5 for i in range(N)]
        assert [colour == colours[1] for colour in colours] == raised
        assert ax.get_xticks()[-1] == 7


def test_the_largest_are_named_and_the_names_do_not_meet() -> None:
    figure = extremes_figure(table(), 2000)
    figure.savefig(io.BytesIO())  # which would complain of what the font cannot draw
    assert_legible(figure)
    for ax in figure.axes:
        dots = ax.collections[1].get_offsets()
        numbers, names = ax.texts[::2], ax.texts[1::2]
        for i, (number, name) in enumerate(zip(numbers, names, strict=True)):
            assert number.get_position() == pytest.approx(tuple(dots[i]))
            assert name.get_text().startswith(f"{i + 1}  {40 + i}{'−' if i % 2 else '+'}  ␣a\\$b")
        assert len(names) == 8
