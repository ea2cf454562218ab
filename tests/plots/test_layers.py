"""Figures of what layers tell show their table: the right numbers at the right places."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figures.paper_a import token_table
from matplotlib.axes import Axes
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure
from plot_tables import (
    METHODS,
    assert_legible,
    lens_table,
    meet,
    named,
    prediction_table,
    result,
)

from matlens import InputError
from matlens.io.tables import COLUMNS
from matlens.plots import plot_layers, plot_r2, plot_report, plot_trajectory, save
from matlens.plots.style import literal


def r2_table(last: int) -> pd.DataFrame:
    """r2 that tells by its value where it belongs."""
    pairs = [(a, b) for a in range(last) for b in range(a + 1, last + 1)]
    rows = [
        result(
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


def panels(figure: Figure) -> list[Axes]:
    return figure.axes[:2]


# Heat maps


@pytest.mark.parametrize("last", [1, 2, 5, 12, 30])
def test_heatmaps_have_the_source_across_and_the_target_up_on_one_colour_scale(last: int) -> None:
    table = r2_table(last)
    figure = plot_r2(table)
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
    (image,) = panels(plot_r2(r2_table(4)))[0].images
    red, _, blue, _ = image.to_rgba(np.array([0.9]))[0]
    assert blue > red
    red, _, blue, _ = image.to_rgba(np.array([-0.9]))[0]
    assert red > blue


def test_the_colour_bar_belongs_to_both_panels() -> None:
    figure = plot_r2(r2_table(4))
    bar = figure.axes[2]
    assert bar.get_ylim() == (-1, 1)
    assert "r^2" in bar.get_ylabel()
    figure.draw_without_rendering()
    assert bar.get_position().x0 > max(ax.get_position().x1 for ax in panels(figure))


def test_the_heatmaps_can_be_read_and_say_what_they_show() -> None:
    figure = plot_r2(r2_table(30))
    assert_legible(figure)
    assert figure.get_suptitle() == "model, some-corpus, n = 1,234"


# Curves


@pytest.mark.parametrize("methods", [("mat",), ("id", "mat", "polished", "tuned")])
def test_lenses_have_a_bar_of_seconds_and_a_logarithmic_axis_of_kl(methods: tuple[str, ...]) -> None:
    _, _, costs, surprisal, kl = plot_report(lens_table(12, methods)).axes
    assert (surprisal.get_yscale(), kl.get_yscale()) == ("linear", "log")
    labels = [tick.get_text() for tick in kl.get_yticklabels()]
    assert {"1", "2", "5", "10", "20"} <= set(labels)
    assert not any(is_math_text(label) or "e" in label for label in labels)
    assert [bar.get_width() for bar in costs.patches] == pytest.approx(
        [23.4 * i for i in range(len(methods))]
    )
    assert [tick.get_text() for tick in costs.get_yticklabels()] == list(methods)


def test_methods_differ_by_colour_and_k_by_style_and_the_legend_says_so() -> None:
    figure = plot_layers(prediction_table(6))
    left, right = figure.axes
    lines = {line.get_label(): line for line in left.lines}
    for k in (1, 5, 10):
        mat, same = lines[f"mat, k = {k}"], lines[f"id, k = {k}"]
        assert mat.get_color() != same.get_color()
        assert mat.get_marker() != same.get_marker()
        assert mat.get_linestyle() == same.get_linestyle()
    assert named(figure) == ["mat", "id", "k = 1", "k = 5", "k = 10"]
    entries = dict(zip(named(figure), figure.legends[0].legend_handles, strict=True))
    for method, line in zip(METHODS, right.lines, strict=True):
        assert entries[method].get_color() == line.get_color() == lines[f"{method}, k = 1"].get_color()
    styles = [entries[f"k = {k}"].get_linestyle() for k in (1, 5, 10)]
    assert styles == [lines[f"mat, k = {k}"].get_linestyle() for k in (1, 5, 10)]
    assert len(set(styles)) == 3


def test_predictions_of_one_example_can_be_drawn() -> None:
    table = prediction_table(3)
    table.loc[table["metric"] == "surprisal", ["low", "high"]] = float("nan")
    table["n"] = 1
    figure = plot_layers(table)
    figure.draw_without_rendering()
    assert len(figure.axes[1].lines) == 2


@pytest.mark.parametrize("last", [1, 2, 7, 11, 13, 24, 30, 31, 61])
def test_the_last_layer_has_a_tick(last: int) -> None:
    for ax in panels(plot_r2(r2_table(last))):
        assert last in ax.get_xticks()
        assert last in ax.get_yticks()
        assert ax.get_xlim() == ax.get_ylim() == (-0.5, last + 0.5)
    for ax in plot_layers(prediction_table(last)).axes:
        assert last in ax.get_xticks()


# Tokens


def read_cell(cell: Any) -> str:
    """What a cell shows: nothing of it is read as a formula, and dollars are escaped for that."""
    text = cell.get_text().get_text()
    assert not is_math_text(text)
    return text.replace(r"\$", "$")


def test_a_token_table_shows_each_prompts_columns_below_its_name() -> None:
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


@pytest.mark.parametrize(
    "token", ["$", "$a$", "_x_", "a\\b", "日本", "한국", "привет", "🙂", "ﷺ", "\u200b", "\x00", "\x07", "�"]
)
def test_a_figure_can_be_written_whatever_the_tokens_are(token: str, tmp_path: Path) -> None:
    table = pd.DataFrame({"id_0": [token, "x"], "mat_0": ["y", f"a {token}"]})
    paths = save(token_table({f"a prompt with {token}": table}), tmp_path / "tokens")
    assert all(path.stat().st_size > 2_000 for path in paths)


@pytest.mark.parametrize("count", [1, 3])
def test_cells_of_a_token_table_do_not_meet(count: int) -> None:
    names = [f"{method}_{layer}" for layer in (0, 2, 4) for method in METHODS]
    table = pd.DataFrame({name: [f"token {i}" for i in range(5)] for name in names})
    figure = token_table({f"prompt {i}": table for i in range(count)})
    figure.draw_without_rendering()
    cells = [
        c.get_text().get_window_extent() for ax in figure.axes for c in ax.tables[0].get_celld().values()
    ]
    titles = [ax._left_title.get_window_extent() for ax in figure.axes]
    assert len(titles) == count
    for first, second in itertools.combinations([*cells, *titles], 2):
        assert not meet(first, second)


# Trajectories of prompts


def trajectory_table(tokens: int = 4, layers: tuple[int, ...] = (0, 2, 3)) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    rows = [
        (i, f" t{i}", layer, f" p{layer}{i}", generator.uniform(), generator.uniform(0, 5),
         0.0 if layer == 3 else generator.uniform(0, 9), int(generator.integers(0, 50)))
        for i in range(tokens) for layer in layers
    ]  # fmt: skip
    names = ["position", "token", "layer", "predicted", "probability", "entropy", "kl", "rank"]
    return pd.DataFrame(rows, columns=names).sample(frac=1, random_state=1)


@pytest.mark.parametrize("colour", ["probability", "kl", "rank", "entropy"])
def test_every_cell_is_that_of_its_token_and_layer(colour: str) -> None:
    table = trajectory_table()
    figure = plot_trajectory(table, colour=colour, title="mat: a $prompt$")
    ax = figure.axes[0]
    shown = np.asarray(ax.images[0].get_array())
    texts = {(round(t.get_position()[0]), round(t.get_position()[1])): t.get_text() for t in ax.texts}
    for row in table.to_dict("records"):
        line = (0, 2, 3).index(row["layer"])
        assert shown[line, row["position"]] == pytest.approx(row[colour])
        assert texts[row["position"], line] == literal(f"␣{row['predicted'].strip()}")
    assert len(texts) == 12
    assert [label.get_text() for label in ax.get_yticklabels()][-1] == "3"
    assert ax.get_xticklabels()[2].get_text().endswith("t2")
    assert figure.get_suptitle() == r"mat: a \$prompt\$"


def test_sure_cells_are_dark() -> None:
    table = trajectory_table()
    for colour, dark in (("probability", 1.0), ("kl", 0.0), ("rank", 0), ("entropy", 0.0)):
        table[colour] = np.where(table["layer"] == 3, dark, 5.0 if dark == 0 else 0.1)
        image = plot_trajectory(table, colour=colour).axes[0].images[0]
        lightness = np.asarray(image.cmap(image.norm(image.get_array())))[..., :3].mean(-1)
        assert (lightness[2] < 0.35).all()
        assert (lightness[:2] > lightness[2].max()).all()


def test_a_figure_is_written_as_its_name_says(tmp_path: Path) -> None:
    figure = plot_trajectory(trajectory_table())
    for name, starts in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")):
        assert save(figure, tmp_path / "new" / name) == [tmp_path / "new" / name]
        assert (tmp_path / "new" / name).read_bytes().startswith(starts)
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.refused
def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(InputError, match=r"^colour must be"):
        plot_trajectory(trajectory_table(), colour="blue")
    with pytest.raises(InputError, match="70 tokens, more than the 60"):
        plot_trajectory(trajectory_table(70))
    with pytest.raises(KeyError, match="predicted"):
        plot_trajectory(trajectory_table().drop(columns="predicted"))
