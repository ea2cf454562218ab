"""The figure of extreme clusters shows what is in its table."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from matlens.ffn.extremes import ACTIVITY_COLUMNS
from matlens.plots.groups import extremes_figure, model_title

N = 12


def table() -> pd.DataFrame:
    rows = []
    for read in ("score", "lift"):
        for name, n in (("extreme", N), ("drawn", 30)):
            for i in range(n):
                common = 0.5 if read == "score" else i / n
                told = (40 + i, 1 - 2 * (i % 2), "other", 4, 0.5, n - i, (n - i) / 100, i % 3 / 2, 0.0, 0.1)
                where = (i % 8, 0, 7, common, 0.25, "L0D0", "␣a$b, \U0001f600, \uf8ff, third, fourth")
                rows.append((*told, *where, name, read))
    return pd.DataFrame(rows, columns=[*ACTIVITY_COLUMNS, "sub_updates", "read"])


def test_dots_are_clusters_by_layer_commonness_and_share() -> None:
    clusters = table()
    figure = extremes_figure(clusters, "some title")
    assert figure.get_suptitle() == "some title"
    assert len(figure.axes) == 2
    for ax, read in zip(figure.axes, ("score", "lift"), strict=True):
        drawn, extreme = (dots for dots in ax.collections if len(dots.get_offsets()) > 0)
        for dots, name in ((drawn, "drawn"), (extreme, "extreme")):
            own = clusters[(clusters["read"] == read) & (clusters["sub_updates"] == name)]
            assert dots.get_offsets()[:, 0].tolist() == own["layer"].tolist()
            expected = (own["common"] - own["unseen"]).tolist()
            assert dots.get_offsets()[:, 1].tolist() == pytest.approx(expected)
        areas = extreme.get_sizes()
        assert np.diff(areas) == pytest.approx(np.full(N - 1, areas[0] - areas[1]) * -1)
        colours = [to_hex(colour) for colour in extreme.get_facecolors()]
        raised = [i % 3 / 2 >= 0.5 for i in range(N)]
        assert [colour == colours[1] for colour in colours] == raised
        assert ax.get_xticks()[-1] == 7


def test_the_largest_are_named_and_the_names_do_not_meet() -> None:
    figure = extremes_figure(table(), "some title")
    figure.savefig(io.BytesIO())  # which would complain of what the font cannot draw
    for ax in figure.axes:
        assert len(ax.texts) == 8
        assert sorted(text.get_text()[:3] for text in ax.texts) == sorted(
            f"{40 + i}{'−' if i % 2 else '+'}" for i in range(8)
        )
        for text in ax.texts:
            assert text.get_text()[3:] == "  ␣a\\$b, \U0001f600, \\uf8ff"
        boxes = [Text.get_window_extent(text) for text in ax.texts]  # without their lines
        for i, one in enumerate(boxes):
            assert one.x0 > ax.get_window_extent().x1
            assert one.x1 <= figure.bbox.x1
            assert not any(min(one.y1, other.y1) > max(one.y0, other.y0) for other in boxes[:i])


def test_fewer_clusters_than_names() -> None:
    clusters = table()
    few = clusters[(clusters["sub_updates"] == "drawn") | (clusters["cluster"] < 42)]
    assert [len(ax.texts) for ax in extremes_figure(few, "title").axes] == [2, 2]


def test_the_title_names_the_model_and_the_corpus() -> None:
    assert model_title("folder/gpt2", "words", 2000) == "gpt2, words, n = 2,000"
