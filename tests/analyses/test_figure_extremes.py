"""The figure of extreme clusters shows what is in its table."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pandas as pd
import pytest
from figures.paper_b import extremes_figure
from matplotlib.colors import to_hex
from matplotlib.text import Text
from plot_tables import assert_legible
from sub_updates.extremes import ACTIVITY_COLUMNS

N = 12


def table() -> pd.DataFrame:
    rows = []
    for read in ("score", "lift"):
        for name, n in (("extreme", N), ("drawn", 30)):
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
        for dots, name in ((drawn, "drawn"), (extreme, "extreme")):
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
        assert len(ax.texts) == 8
        assert sorted(text.get_text()[:3] for text in ax.texts) == sorted(
            f"{40 + i}{'−' if i % 2 else '+'}" for i in range(8)
        )
        dots = ax.collections[1].get_offsets()
        for text in ax.texts:
            i = int(text.get_text()[:2]) - 40
            assert text.xy == pytest.approx(dots[i])
            box = Text.get_window_extent(text)  # without its line
            assert "  ␣a\\$b · \U0001f600 · \\uf8ff".startswith(text.get_text()[3:])
            if dots[i][0] > 0.55 * 7:
                assert text.get_text()[3:].endswith("uf8ff")
                assert box.x0 > ax.get_window_extent().x1
            else:
                assert box.x1 < ax.get_window_extent().x1


def test_leader_lines_do_not_cross() -> None:
    clusters = table()
    rng = np.random.default_rng(0)
    for _ in range(20):
        extreme = clusters["sub_updates"] == "extreme"
        clusters.loc[extreme, "layer"] = rng.integers(5, 8, extreme.sum())
        clusters.loc[extreme, "common"] = rng.uniform(0, 0.4, extreme.sum())
        for ax in extremes_figure(clusters, 2000).axes:
            lines = [(np.array(text.xy), np.array(text.xyann)) for text in ax.texts]
            assert len(lines) == 8
            for first, second in itertools.combinations(lines, 2):
                assert not cross(*first, *second)


def cross(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> bool:
    """Whether the line from a to b crosses that from c to d."""

    def side(p: np.ndarray, q: np.ndarray, r: np.ndarray) -> float:
        return float((q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0]))

    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0


def test_fewer_clusters_than_names() -> None:
    clusters = table()
    few = clusters[(clusters["sub_updates"] == "drawn") | (clusters["cluster"] < 42)]
    assert [len(ax.texts) for ax in extremes_figure(few, 2000).axes] == [2, 2]
