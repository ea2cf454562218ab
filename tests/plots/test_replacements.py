"""Figures of replaced parts show their table, and say where surprisal is infinite."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from plot_tables import assert_curve, assert_legible, methods_table, named, prediction_table, result

from matlens.linearity import rank_correlations
from matlens.plots.replacements import alternation, by_fitting, by_method, linearity_figure, transfer_heatmaps
from matlens.plots.style import save

FITTED, REPLACED = ("all", "not-first", "not-sink"), ("all", "not-first", "not-sink", "predicted")


def alternation_table() -> pd.DataFrame:
    """Several WRR schemes can run the same number of blocks."""
    table = prediction_table(6)
    table = table[table["k"] == 1]
    parts = [table, table[table["method"] == "mat"].assign(method="R2", value=0.9, low=0.8, high=0.95)]
    for i, start in enumerate(("blocks", "mat")):
        rows = table[(table["method"] == "id") & table["layer"].isin([2, 3, 4])]
        rows = pd.concat([rows, rows.assign(value=rows["value"] / 2)])
        parts.append(rows.assign(method=f"WRR, {start} first", value=rows["value"] + 0.1 * i))
    return pd.concat(parts).sample(frac=1, random_state=0)


def fitting_table() -> pd.DataFrame:
    ways = itertools.product(FITTED, REPLACED)
    return methods_table(["mat", *(f"mat_ffn, fit {fitted}, replace {where}" for fitted, where in ways)])


def test_schemes_are_points_and_fixed_exits_and_the_best_schemes_are_curves() -> None:
    table = alternation_table()
    (ax,) = alternation(table).axes
    labels = {"R2": "R2", "mat": "mat, fixed exit", "id": "id, fixed exit"}
    lines = [assert_curve(ax, label, table[table["method"] == method]) for method, label in labels.items()]
    assert len({line.get_color() for line in lines}) == 3
    points = []
    for method in ("WRR, blocks first", "WRR, mat first"):
        rows = table[table["method"] == method]
        (line,) = (line for line in ax.lines if line.get_label() == method)
        assert line.get_linestyle() == "None"
        shown = sorted(zip(line.get_xdata(), line.get_ydata(), strict=True))
        assert shown == sorted(zip(rows["layer"], rows["value"], strict=True))
        points.append((line.get_color(), line.get_marker()))
    assert len({colour for colour, _ in points}) == len({marker for _, marker in points}) == 2
    assert len(ax.lines) == 5
    assert ax.get_xlabel() == "blocks run"


@pytest.mark.parametrize("count", [1, 4, 9])
def test_every_method_has_a_curve_of_its_precision_and_of_its_surprisal(count: int) -> None:
    table = methods_table(f"mat_{i}" for i in range(count))
    left, right = by_method(table).axes
    for i in range(count):
        rows = table[table["method"] == f"mat_{i}"]
        line = assert_curve(left, f"mat_{i}", rows[rows["k"] == 1])
        other = assert_curve(right, f"mat_{i}", rows[rows["metric"] == "surprisal"])
        assert (line.get_color(), line.get_linestyle()) == (other.get_color(), other.get_linestyle())
    assert len(left.lines) == len(right.lines) == count
    assert len({line.get_color() for line in left.lines}) >= min(count, 5)


def test_many_methods_are_told_apart_and_named_beside_the_axes() -> None:
    """More of them than there are colours: no two look the same, and no name lies on a curve."""
    table = methods_table(f"mat_{i}" for i in range(12))
    figure = by_method(table)
    left, right = figure.axes
    looks = [(line.get_color(), line.get_linestyle()) for line in left.lines]
    assert len(set(looks)) == len(looks) == table["method"].nunique() > 7
    assert [(line.get_color(), line.get_linestyle()) for line in right.lines] == looks
    assert named(figure) == list(table["method"].unique())
    assert_legible(figure)


def test_each_way_of_fitting_has_a_column_with_mat_and_each_way_of_replacing() -> None:
    table = fitting_table()
    figure = by_fitting(table)
    assert len(figure.axes) == 6
    assert len(named(figure)) == 5
    for column, fitted in enumerate(FITTED):
        upper, lower = figure.axes[column], figure.axes[column + 3]
        assert upper.get_title().startswith("fitted on all")
        methods = ["mat", *(f"mat_ffn, fit {fitted}, replace {where}" for where in REPLACED)]
        for method, name in zip(methods, named(figure), strict=True):
            rows = table[table["method"] == method]
            assert_curve(upper, name, rows[rows["k"] == 1])
            assert_curve(lower, name, rows[rows["metric"] == "surprisal"])
        assert len(upper.lines) == len(lower.lines) == 5
        assert upper.get_ylim() == figure.axes[0].get_ylim()
        assert lower.get_ylim() == figure.axes[3].get_ylim()
    assert len({ax.get_title() for ax in figure.axes[:3]}) == 3
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 5
    assert figure.get_suptitle() == "mat_ffn: model, some-corpus, n = 1,234"


DRAWN = {
    "alternation": (alternation, alternation_table()),
    "by_method": (by_method, methods_table(f"mat_{i}" for i in range(4))),
    "by_fitting": (by_fitting, fitting_table()),
}


@pytest.mark.parametrize("name", DRAWN)
def test_every_figure_says_what_it_shows_and_can_be_read_and_written(name: str, tmp_path: Path) -> None:
    draw, table = DRAWN[name]
    before = table.copy()
    figure = draw(table)
    pd.testing.assert_frame_equal(table, before)
    assert figure.get_suptitle().endswith("model, some-corpus, n = 1,234")
    assert_legible(figure)
    for ax in figure.axes:
        assert ax.get_ylim()[0] == 0
        heights = [y for line in ax.lines for y in line.get_ydata()]
        heights += [y for band in ax.collections for _, y in band.get_paths()[0].vertices]
        assert ax.get_ylim()[1] >= max(heights), "a curve leaves the figure"
    assert figure.axes[-1].get_xlabel()
    assert "Precision@1" in figure.axes[0].get_ylabel()
    assert all(path.stat().st_size > 5_000 for path in save(figure, tmp_path, name))


def atlas_table() -> pd.DataFrame:
    generator, rows = np.random.default_rng(0), []
    for kind, layer, tokens in itertools.product(
        ("ln1", "attn", "ffn", "block"), range(7), ("all", "no sinks")
    ):
        for method, metric in (
            ("map", "rise"), ("map", "r2 of the variance"), ("map", "nbl bound"), ("left out", "rise"),
        ):  # fmt: skip
            if method == "map" or tokens == "all":
                row = result(method, layer, layer + 1, metric, pd.NA, float(generator.exponential()), 0.1)
                rows.append(row | {"kind": kind, "tokens": tokens, "parts": ""})
    return pd.DataFrame(rows)


def test_the_atlas_has_a_cell_for_each_part_and_a_point_for_each_score(tmp_path: Path) -> None:
    table = atlas_table()
    correlations = rank_correlations(table, resamples=9)
    figure = linearity_figure(table, correlations)
    maps = [ax for ax in figure.axes if ax.images]
    rises = table[table["metric"] == "rise"].set_index(["method", "tokens", "kind", "layer"])["value"]
    rises = rises.sort_index()
    for ax, (method, tokens) in zip(
        maps, [("map", "all"), ("map", "no sinks"), ("left out", "all")], strict=True
    ):
        cells = np.asarray(ax.images[0].get_array())
        for row, kind in enumerate(("ln1", "attn", "ffn", "block")):
            assert cells[row].tolist() == rises[method, tokens, kind].tolist()
    scatter = next(ax for ax in figure.axes if "variance" in ax.get_xlabel())
    scores = table[(table["metric"] == "r2 of the variance") & (table["tokens"] == "no sinks")]
    (line,) = (line for line in scatter.lines if line.get_label() == "ffn")
    assert sorted(line.get_xdata()) == sorted(scores[scores["kind"] == "ffn"]["value"])
    save(figure, tmp_path, "linearity")


def test_matrices_have_a_row_for_each_corpus_fitted_on_and_a_column_for_each_judged_on() -> None:
    corpora, metrics = ("news", "folder/wiki", "messages"), ("r2", "precision", "surprisal")
    value = {
        (metric, fitted, tested): 10 * i + 3 * j + k
        for k, metric in enumerate(metrics)
        for i, fitted in enumerate(corpora)
        for j, tested in enumerate(corpora)
    }
    rows = [
        result(f"mat of {fitted}", pd.NA, 3, metric, 1 if metric == "precision" else pd.NA, number, 0.0)
        | {"corpus": tested}
        for (metric, fitted, tested), number in value.items()
    ]
    rows += [row | {"k": 5, "value": 99.0} for row in rows if row["metric"] == "precision"]
    figure = transfer_heatmaps(pd.DataFrame(rows))
    assert [ax.get_title() for ax in figure.axes] == ["$r^2$", "Precision@1", "surprisal (nats)"]
    for ax, metric in zip(figure.axes, metrics, strict=True):
        (image,) = ax.images
        shown = image.get_array()
        for (i, fitted), (j, tested) in itertools.product(enumerate(corpora), enumerate(corpora)):
            assert shown[i, j] == value[metric, fitted, tested]
        assert [text.get_text() for text in ax.texts][:2] == [f"{float(shown[0, j]):.2f}" for j in (0, 1)]
        assert [tick.get_text() for tick in ax.get_xticklabels()] == ["news", "wiki", "messages"]
    assert figure.get_suptitle() == "model, means over layers"
    assert_legible(figure)
