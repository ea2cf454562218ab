"""Heatmaps and tables of tokens show the right values in the right cells."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figures.paper_a import token_table, transfer_heatmaps
from matplotlib.cbook import is_math_text
from plot_tables import METHODS, assert_legible, result

from matlens.drawing import literal
from matlens.io.tables import COLUMNS
from matlens.linearity import rank_correlations
from matlens.plots import plot_atlas, plot_r2, plot_trajectory, save


def test_r2_has_the_source_across_and_the_target_up_on_one_color_scale():
    last, nan = 5, float("nan")
    rows = [
        result(method, a, b, "r2", pd.NA, (1 if method == "mat" else -0.5) * (a / last - b / (3 * last)), nan)
        for method, a, b in itertools.product(METHODS, range(last), range(1, last + 1))
        if a < b
    ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    figure = plot_r2(table)
    *panels, bar = figure.axes
    for ax, method in zip(panels, METHODS, strict=True):
        (image,) = ax.images
        assert image.get_clim() == bar.get_ylim() == (-1, 1)
        assert list(image.get_extent()) == [-0.5, last + 0.5, -0.5, last + 0.5]
        assert image.origin == "lower"
        assert not ax.yaxis_inverted()
        expected = np.full((last + 1, last + 1), np.nan)
        for _, row in table[table["method"] == method].iterrows():
            expected[row["target"], row["layer"]] = row["value"]
        np.testing.assert_allclose(np.ma.filled(image.get_array(), np.nan), expected, rtol=1e-6)
    assert_legible(figure)
    assert figure.get_suptitle() == "model, some-corpus, n = 1,234"


def trajectory_table(tokens: int = 4, layers: tuple[int, ...] = (0, 2, 3)) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    rows = [
        (i, f" t{i}", layer, f" p{layer}{i}", generator.uniform(), generator.uniform(0, 5),
         0.0 if layer == 3 else generator.uniform(0, 9), int(generator.integers(0, 50)))
        for i in range(tokens) for layer in layers
    ]  # fmt: skip
    names = ["position", "token", "layer", "predicted", "probability", "entropy", "kl", "rank"]
    return pd.DataFrame(rows, columns=names).sample(frac=1, random_state=1)


@pytest.mark.parametrize("color", ["probability", "kl", "rank", "entropy"])
def test_every_cell_of_a_trajectory_is_that_of_its_token_and_layer(color):
    table = trajectory_table()
    figure = plot_trajectory(table, color=color, title="mat: a $prompt$")
    ax = figure.axes[0]
    shown = np.asarray(ax.images[0].get_array())
    texts = {(round(t.get_position()[0]), round(t.get_position()[1])): t.get_text() for t in ax.texts}
    for row in table.to_dict("records"):
        line = (0, 2, 3).index(row["layer"])
        assert shown[line, row["position"]] == pytest.approx(row[color])
        assert texts[row["position"], line] == literal(f"␣{row['predicted'].strip()}")
    assert len(texts) == 12
    assert [label.get_text() for label in ax.get_yticklabels()][-1] == "3"
    assert ax.get_xticklabels()[2].get_text().endswith("t2")
    assert figure.get_suptitle() == r"mat: a \$prompt\$"


def test_the_atlas_has_a_cell_for_each_part_and_a_point_for_each_score(tmp_path):
    generator, rows = np.random.default_rng(0), []
    kinds, modes = ("ln1", "attn", "ffn", "block"), ("all", "no sinks")
    for kind, layer, tokens in itertools.product(kinds, range(7), modes):
        for method, metric in (
            ("map", "loss increase"), ("map", "r2 of the variance"), ("map", "nbl bound"),
            ("removed", "loss increase"),
        ):  # fmt: skip
            if method == "map" or tokens == "all":
                row = result(method, layer, layer + 1, metric, pd.NA, float(generator.exponential()), 0.1)
                rows.append(row | {"kind": kind, "tokens": tokens, "parts": ""})
    table = pd.DataFrame(rows)
    figure = plot_atlas(table, rank_correlations(table, resamples=9))
    maps = [ax for ax in figure.axes if ax.images]
    rises = table[table["metric"] == "loss increase"].set_index(["method", "tokens", "kind", "layer"])[
        "value"
    ]
    rises = rises.sort_index()
    ways = [("map", "all"), ("map", "no sinks"), ("removed", "all")]
    for ax, (method, tokens) in zip(maps, ways, strict=True):
        cells = np.asarray(ax.images[0].get_array())
        for row, kind in enumerate(kinds):
            assert cells[row].tolist() == rises[method, tokens, kind].tolist()
    scatter = next(ax for ax in figure.axes if "variance" in ax.get_xlabel())
    scores = table[(table["metric"] == "r2 of the variance") & (table["tokens"] == "no sinks")]
    (line,) = (line for line in scatter.lines if line.get_label() == "ffn")
    assert sorted(line.get_xdata()) == sorted(scores[scores["kind"] == "ffn"]["value"])
    save(figure, tmp_path / "linearity")


def test_matrices_have_a_row_for_each_corpus_fitted_on_and_a_column_for_each_evaluated_on():
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
        shown = ax.images[0].get_array()
        for (i, fitted), (j, tested) in itertools.product(enumerate(corpora), enumerate(corpora)):
            assert shown[i, j] == value[metric, fitted, tested]
        assert [text.get_text() for text in ax.texts][:2] == [f"{float(shown[0, j]):.2f}" for j in (0, 1)]
        assert [tick.get_text() for tick in ax.get_xticklabels()] == ["news", "wiki", "messages"]
    assert_legible(figure)


def read_cell(cell: Any) -> str:
    """What a cell shows: nothing of it is read as a formula, and dollars are escaped for that."""
    text = cell.get_text().get_text()
    assert not is_math_text(text)
    return text.replace(r"\$", "$")


def test_a_token_table_shows_whatever_the_tokens_are(tmp_path):
    odd = ["日本", "🙂", "ﷺ", "\u200b", "\x00", "�"]
    tables = {
        "a $5 [MASK] and $6": pd.DataFrame(
            {"id_0": ["$x$", "_y_"], "mat_0": ["a^b", "␣c"], "id_3": ["\\alpha", "%"]}
        ),
        "an_other": pd.DataFrame({"id_0": ["{", "}"], "mat_0": ["$", "$$"], "id_3": ["&", "#"]}),
    }
    figure = token_table(tables)
    figure.draw_without_rendering()
    for ax, (prompt, table) in zip(figure.axes, tables.items(), strict=True):
        title = ax.get_title(loc="left")
        assert not is_math_text(title)
        assert title.replace(r"\$", "$") == f"Input: {prompt}"
        (drawn,) = ax.tables
        cells = {place: read_cell(cell) for place, cell in drawn.get_celld().items()}
        shown = [[cells[row, column] for column in range(3)] for row in range(3)]
        assert shown == [list(table.columns), *table.to_numpy().tolist()]
    paths = save(token_table({"".join(odd): pd.DataFrame({"id_0": odd, "mat_0": odd})}), tmp_path / "tokens")
    assert all(path.stat().st_size > 2_000 for path in paths)
