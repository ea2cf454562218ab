"""Figures of replaced parts show their table, and say where surprisal is infinite."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
from figures.paper_a import alternation, by_fitting, transfer_heatmaps
from plot_tables import (
    alternation_table,
    assert_legible,
    fitting_table,
    result,
)

from matlens.linearity import rank_correlations
from matlens.plots import plot_atlas, save


def test_schemes_are_points_and_fixed_exits_are_curves() -> None:
    (ax,) = alternation(alternation_table()).axes
    styles = {str(line.get_label()): line.get_linestyle() for line in ax.lines}
    assert [label for label, style in styles.items() if style == "None"] == [
        "WRR, blocks first", "WRR, mat first",
    ]  # fmt: skip
    assert ax.get_xlabel() == "blocks run"


def test_panels_of_ways_of_fitting_share_their_axes() -> None:
    figure = by_fitting(fitting_table())
    upper, lower = figure.axes[:3], figure.axes[3:]
    assert len({ax.get_title() for ax in upper}) == 3
    assert all(ax.get_title().startswith("fitted on all") for ax in upper)
    assert len({ax.get_ylim() for ax in upper}) == len({ax.get_ylim() for ax in lower}) == 1


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
    figure = plot_atlas(table, correlations)
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
    save(figure, tmp_path / "linearity")


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
