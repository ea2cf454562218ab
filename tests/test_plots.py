"""Figures show the table that they are given: the right numbers at the right places, and whole files."""

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from matlens import plots
from matlens.errors import InputError
from matlens.evaluation import COLUMNS

METHODS = ("mat", "id")


def row(
    method: str, layer: int, target: int, metric: str, k: Any, value: float, spread: float
) -> dict[str, Any]:
    named = (
        "some/model",
        "some-corpus",
        method,
        layer,
        target,
        metric,
        k,
        value,
        value - spread,
        value + 2 * spread,
    )
    return dict(zip(COLUMNS, ("x", *named, 1234), strict=True))


def r2_table(last: int) -> pd.DataFrame:
    """r2 that tells by its value where it belongs."""
    pairs = [(a, b) for a in range(last) for b in range(a + 1, last + 1)]
    rows = [
        row(
            method,
            a,
            b,
            "r2",
            pd.NA,
            (1 if method == "mat" else -0.5) * (a / last - b / (3 * last)),
            float("nan"),
        )
        for method in METHODS
        for a, b in pairs
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def prediction_table(last: int) -> pd.DataFrame:
    """In an order that is not that of the layers."""
    rows = []
    for layer, (i, method) in itertools.product(reversed(range(last + 1)), enumerate(METHODS)):
        for k in (1, 5, 10):
            rows.append(
                row(method, layer, last, "precision", k, layer / last * (0.5 + k / 25 + i / 100), 0.01 * k)
            )
        rows.append(row(method, layer, last, "surprisal", pd.NA, 5 - layer / last + i, 0.2))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"k": "Int64"})


def panels(figure: Figure) -> list[Axes]:
    return figure.axes[:2]


# Heat maps


@pytest.mark.parametrize("last", [1, 2, 5, 12, 30])
def test_heatmaps_have_the_source_across_and_the_target_up_on_one_colour_scale(last: int) -> None:
    table = r2_table(last)
    figure = plots.r2_heatmaps(table)
    for ax, method in zip(panels(figure), METHODS, strict=True):
        (image,) = ax.images
        assert image.get_clim() == (-1, 1)
        shown = np.ma.filled(image.get_array(), np.nan)
        assert list(image.get_extent()) == [-0.5, last + 0.5, -0.5, last + 0.5]
        assert image.origin == "lower"
        assert not ax.yaxis_inverted()
        assert not ax.xaxis_inverted()
        expected = np.full((last + 1, last + 1), np.nan)
        for _, r in table[table["method"] == method].iterrows():
            expected[r["target"], r["layer"]] = r["value"]
        np.testing.assert_allclose(shown, expected, rtol=1e-6)
        assert method in ax.get_title()
        assert "source" in ax.get_xlabel()
    assert "target" in panels(figure)[0].get_ylabel()


def test_better_than_the_mean_is_blue_and_worse_is_red() -> None:
    (image,) = panels(plots.r2_heatmaps(r2_table(4)))[0].images
    red, _, blue, _ = image.to_rgba(np.array([0.9]))[0]
    assert blue > red
    red, _, blue, _ = image.to_rgba(np.array([-0.9]))[0]
    assert red > blue


def test_the_colour_bar_belongs_to_both_panels() -> None:
    figure = plots.r2_heatmaps(r2_table(4))
    bar = figure.axes[2]
    assert bar.get_ylim() == (-1, 1)
    assert "r^2" in bar.get_ylabel()
    figure.draw_without_rendering()
    assert bar.get_position().x0 > max(ax.get_position().x1 for ax in panels(figure))


# Curves


def style(ax: Axes, method: str, k: int | None) -> tuple[Any, PolyCollection]:
    """Line and band of a method, by its label."""
    wanted = rf"$\mathtt{{{method}}}$" + ("" if k is None else f", $k={k}$")
    found = [i for i, line in enumerate(ax.lines) if line.get_label() == wanted]
    assert len(found) == 1
    bands = [band for band in ax.collections if isinstance(band, PolyCollection)]
    assert len(bands) == len(ax.lines)
    return ax.lines[found[0]], bands[found[0]]


@pytest.mark.parametrize("last", [1, 3, 30])
def test_curves_go_through_the_values_and_bands_from_low_to_high(last: int) -> None:
    table = prediction_table(last)
    left, right = panels(plots.prediction(table))
    assert len(left.lines) == 6
    assert len(right.lines) == 2
    for method in METHODS:
        for ax, metric, k in ((left, "precision", 1), (left, "precision", 5), (left, "precision", 10),
                              (right, "surprisal", None)):  # fmt: skip
            own = table[(table["method"] == method) & (table["metric"] == metric)]
            own = (own if k is None else own[own["k"] == k]).sort_values("layer")
            line, band = style(ax, method, k)
            np.testing.assert_array_equal(line.get_xdata(), own["layer"])
            np.testing.assert_array_equal(line.get_ydata(), own["value"])
            corners = {(round(x, 9), round(y, 9)) for x, y in band.get_paths()[0].vertices}
            for edge in ("low", "high"):
                assert {
                    (layer, round(y, 9)) for layer, y in zip(own["layer"], own[edge], strict=True)
                } <= corners
            assert tuple(band.get_facecolor()[0][:3]) == to_rgb(line.get_color())
            assert 0 < band.get_facecolor()[0][3] < 0.5


def test_methods_differ_by_colour_and_k_by_style() -> None:
    left, _ = panels(plots.prediction(prediction_table(6)))
    for k in (1, 5, 10):
        mat, same = style(left, "mat", k)[0], style(left, "id", k)[0]
        assert mat.get_color() != same.get_color()
        assert mat.get_marker() != same.get_marker()
        assert mat.get_linestyle() == same.get_linestyle()
    assert len({style(left, "mat", k)[0].get_linestyle() for k in (1, 5, 10)}) == 3


def test_axes_start_at_zero_and_say_what_they_are() -> None:
    figure = plots.prediction(prediction_table(6))
    left, right = panels(figure)
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0
    assert left.get_ylim()[1] >= 1
    assert "Precision" in left.get_ylabel()
    assert "nats" in right.get_ylabel()
    for ax in (left, right):
        assert "layer" in ax.get_xlabel()
        legend = ax.get_legend()
        assert legend is not None
        assert len(legend.get_texts()) == len(ax.lines)


@pytest.mark.parametrize("figure", [plots.r2_heatmaps(r2_table(3)), plots.prediction(prediction_table(3))])
def test_the_title_says_what_was_evaluated_on_what(figure: Figure) -> None:
    assert figure.get_suptitle() == "some/model, some-corpus, n = 1,234"


def test_predictions_of_one_example_can_be_drawn() -> None:
    table = prediction_table(3)
    table.loc[table["metric"] == "surprisal", ["low", "high"]] = float("nan")
    table["n"] = 1
    figure = plots.prediction(table)
    figure.draw_without_rendering()
    assert len(panels(figure)[1].lines) == 2


# Ticks


@given(st.integers(1, 100))
def test_the_last_layer_is_among_the_ticks(last: int) -> None:
    ticks = plots._layer_ticks(last)
    assert ticks[0] == 0
    assert ticks[-1] == last
    assert all(isinstance(tick, int) for tick in ticks)
    gaps = np.diff(ticks)
    assert (gaps > 0).all()
    assert len(ticks) <= 10
    # Round layers are evenly spaced, and the last does not touch the one before it.
    assert len(set(gaps[:-1])) <= 1
    assert len(gaps) == 1 or gaps[-1] >= gaps[0] / 2


@pytest.mark.parametrize("last", [1, 2, 7, 11, 13, 24, 30, 31, 61])
def test_figures_have_those_ticks(last: int) -> None:
    for ax in panels(plots.r2_heatmaps(r2_table(last))):
        assert last in ax.get_xticks()
        assert last in ax.get_yticks()
        assert ax.get_xlim() == ax.get_ylim() == (-0.5, last + 0.5)
    for ax in panels(plots.prediction(prediction_table(last))):
        assert last in ax.get_xticks()


# Files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def small() -> Figure:
    return Figure(figsize=(1, 1))


def test_a_figure_is_written_as_png_and_pdf(tmp_path: Path) -> None:
    paths = plots.save(plots.r2_heatmaps(r2_table(3)), tmp_path / "new" / "folder", "r2")
    assert paths == [tmp_path / "new" / "folder" / "r2.png", tmp_path / "new" / "folder" / "r2.pdf"]
    written = contents(tmp_path / "new" / "folder")
    assert sorted(written) == ["r2.pdf", "r2.png"]
    assert written["r2.png"].startswith(b"\x89PNG\r\n")
    assert written["r2.png"].endswith(b"IEND\xaeB`\x82")
    assert written["r2.pdf"].startswith(b"%PDF-")
    assert written["r2.pdf"].rstrip().endswith(b"%%EOF")


def test_names_with_dots_are_kept(tmp_path: Path) -> None:
    assert [path.name for path in plots.save(small(), tmp_path, "smollm2.135m")] == [
        "smollm2.135m.png", "smollm2.135m.pdf",
    ]  # fmt: skip


@pytest.mark.parametrize("failing", ["png", "pdf"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), InputError),
        (RuntimeError("defect"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_what_fails_leaves_no_part_and_no_harm(
    error: BaseException,
    told: type[BaseException],
    failing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plots.save(small(), tmp_path, "r2")
    before = contents(tmp_path)
    savefig = Figure.savefig

    def fails(self: Figure, path: Path, **options: Any) -> None:
        if options["format"] != failing:
            return savefig(self, path, **options)
        path.write_bytes(b"half a figure")
        raise error

    monkeypatch.setattr(Figure, "savefig", fails)
    with pytest.raises(told):
        plots.save(Figure(figsize=(2, 2)), tmp_path, "r2")
    after = contents(tmp_path)
    assert sorted(after) == ["r2.pdf", "r2.png"]
    assert after[f"r2.{failing}"] == before[f"r2.{failing}"]
    with pytest.raises(told):
        plots.save(small(), tmp_path, "new")
    assert f"new.{failing}" not in contents(tmp_path)
    assert not any(b"half a figure" in content for content in contents(tmp_path).values())


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        plots.save(small(), tmp_path / "file" / "below", "r2")
    assert sorted(contents(tmp_path)) == ["file"]
