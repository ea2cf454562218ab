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
from matplotlib.cbook import is_math_text
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from matlens.errors import InputError
from matlens.plots import layers
from matlens.storage.tables import COLUMNS

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
    figure = layers.r2_heatmaps(table)
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
    (image,) = panels(layers.r2_heatmaps(r2_table(4)))[0].images
    red, _, blue, _ = image.to_rgba(np.array([0.9]))[0]
    assert blue > red
    red, _, blue, _ = image.to_rgba(np.array([-0.9]))[0]
    assert red > blue


def test_the_colour_bar_belongs_to_both_panels() -> None:
    figure = layers.r2_heatmaps(r2_table(4))
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
    left, right = panels(layers.prediction(table))
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
    left, _ = panels(layers.prediction(prediction_table(6)))
    for k in (1, 5, 10):
        mat, same = style(left, "mat", k)[0], style(left, "id", k)[0]
        assert mat.get_color() != same.get_color()
        assert mat.get_marker() != same.get_marker()
        assert mat.get_linestyle() == same.get_linestyle()
    assert len({style(left, "mat", k)[0].get_linestyle() for k in (1, 5, 10)}) == 3


def test_axes_start_at_zero_and_say_what_they_are() -> None:
    figure = layers.prediction(prediction_table(6))
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


@pytest.mark.parametrize("figure", [layers.r2_heatmaps(r2_table(3)), layers.prediction(prediction_table(3))])
def test_the_title_says_what_was_evaluated_on_what(figure: Figure) -> None:
    assert figure.get_suptitle() == "some/model, some-corpus, n = 1,234"


def test_predictions_of_one_example_can_be_drawn() -> None:
    table = prediction_table(3)
    table.loc[table["metric"] == "surprisal", ["low", "high"]] = float("nan")
    table["n"] = 1
    figure = layers.prediction(table)
    figure.draw_without_rendering()
    assert len(panels(figure)[1].lines) == 2


# Curves of other analyses


def bands(ax: Axes) -> dict[str, PolyCollection]:
    """Bands by the label of the line that they belong to."""
    curves = [line for line in ax.lines if line.get_linestyle() != "None" and line.get_label()[0] != "_"]
    drawn = [band for band in ax.collections if isinstance(band, PolyCollection)]
    return {str(line.get_label()): band for line, band in zip(curves, drawn, strict=True)}


def assert_curve(ax: Axes, label: str, own: pd.DataFrame, x: str = "layer") -> Line2D:
    """One line has this label, in the legend too, and it and its band go through the table's numbers."""
    assert len(own) > 0
    (line,) = (line for line in ax.lines if line.get_label() == label)
    legend = ax.get_legend()
    assert legend is None or [text.get_text() for text in legend.get_texts()].count(label) == 1
    own = own.sort_values(x)
    np.testing.assert_allclose(line.get_xdata(), own[x], rtol=1e-12)
    np.testing.assert_array_equal(line.get_ydata(), own["value"])
    if line.get_linestyle() == "None":
        return line
    band = bands(ax)[label]
    corners = {(round(x, 9), round(y, 9)) for x, y in band.get_paths()[0].vertices}
    for edge in ("low", "high"):
        assert {(round(a, 9), round(b, 9)) for a, b in zip(own[x], own[edge], strict=True)} <= corners
    assert tuple(band.get_facecolor()[0][:3]) == to_rgb(line.get_color())
    return line


def math(method: str) -> str:
    return rf"$\mathtt{{{method}}}$"


def alternation_table() -> pd.DataFrame:
    """Several WRR schemes can run the same number of blocks."""
    table = prediction_table(6)
    table = table[table["k"] == 1]
    parts = [table, table[table["method"] == "mat"].assign(method="R2", value=0.9, low=0.8, high=0.95)]
    for i, start in enumerate(("blocks", "mat")):
        own = table[(table["method"] == "id") & table["layer"].isin([2, 3, 4])]
        own = pd.concat([own, own.assign(value=own["value"] / 2)])
        parts.append(own.assign(method=f"WRR, {start} first", value=own["value"] + 0.1 * i))
    return pd.concat(parts).sample(frac=1, random_state=0)


def test_schemes_are_points_and_fixed_exits_and_the_best_schemes_are_curves() -> None:
    table = alternation_table()
    (ax,) = layers.alternation(table).axes
    named = {"R2": "R2", "mat": f"{math('mat')}, fixed exit", "id": f"{math('id')}, fixed exit"}
    lines = [assert_curve(ax, label, table[table["method"] == method]) for method, label in named.items()]
    assert len({line.get_color() for line in lines}) == 3
    points = []
    for method in ("WRR, blocks first", "WRR, mat first"):
        own = table[table["method"] == method]
        (line,) = (line for line in ax.lines if line.get_label() == method)
        assert line.get_linestyle() == "None"
        shown = sorted(zip(line.get_xdata(), line.get_ydata(), strict=True))
        assert shown == sorted(zip(own["layer"], own["value"], strict=True))
        points.append((line.get_color(), line.get_marker()))
    assert len({colour for colour, _ in points}) == len({marker for _, marker in points}) == 2
    assert len(ax.lines) == 5
    assert ax.get_xlabel() == "blocks run"


def several_models() -> pd.DataFrame:
    parts = [
        prediction_table(last).assign(model=model)
        for model, last in (("org/small", 3), ("/some/folder/large_one", 6), ("other", 4))
    ]
    return pd.concat(parts, ignore_index=True)


def test_models_of_any_depth_lie_on_one_axis() -> None:
    table = several_models()
    table["depth"] = table["layer"] / table["target"]
    left, right = layers.relative_depth(table).axes
    styles, colours = {}, {}
    for model, name in (("org/small", "small"), ("/some/folder/large_one", "large_one"), ("other", "other")):
        for method in METHODS:
            own = table[(table["model"] == model) & (table["method"] == method)]
            label = f"{math(method)}, {name}"
            line = assert_curve(left, label, own[own["k"] == 1], "depth")
            assert_curve(right, label, own[own["metric"] == "surprisal"], "depth")
            styles[model, method], colours[model, method] = line.get_linestyle(), line.get_color()
    for method, other in itertools.permutations(METHODS):
        assert len({styles[model, method] for model in table["model"].unique()}) == 3
        assert len({colours[model, method] for model in table["model"].unique()}) == 1
        assert colours["other", method] != colours["other", other]
    assert len(left.lines) == len(right.lines) == 6
    assert "L" in left.get_xlabel()


def across_table() -> pd.DataFrame:
    """One corpus has a name that is part of the other's."""
    parts = []
    for i, (fitted, tested) in enumerate(itertools.product(("news", "news-2020"), repeat=2)):
        own = prediction_table(4)
        own = own[own["method"] == "mat"].assign(method=f"mat of {fitted}", corpus=tested)
        parts.append(own.assign(value=own["value"] * (1 - i / 10)))
    return pd.concat(parts, ignore_index=True)


def test_each_corpus_has_a_panel_where_its_own_maps_are_solid() -> None:
    table = across_table()
    axes = layers.across_corpora(table).axes
    assert [ax.get_title() for ax in axes] == ["tested on news", "tested on news-2020"]
    colours = []
    for ax, tested in zip(axes, ("news", "news-2020"), strict=True):
        for fitted in ("news", "news-2020"):
            own = table[(table["corpus"] == tested) & (table["method"] == f"mat of {fitted}")]
            line = assert_curve(ax, f"mat of {fitted}", own[own["k"] == 1])
            assert line.get_linestyle() == ("-" if fitted == tested else "--")
            colours.append(line.get_color())
        assert len(ax.lines) == 2
    assert colours[:2] == colours[2:]
    assert colours[0] != colours[1]


def exit_table() -> pd.DataFrame:
    """Early exits lie between layers, and many thresholds give the same."""
    fixed = prediction_table(5)
    fixed = fixed[(fixed["k"] == 1) & (fixed["layer"] > 0)].assign(lam=float("nan"))
    early = fixed.assign(
        lam=fixed["layer"] / 5, layer=fixed["layer"] * 0.77 + 0.1, value=fixed["value"] + 0.05
    )
    return pd.concat([early, fixed, early.assign(lam=early["lam"] + 0.01)], ignore_index=True)


def test_early_exits_are_solid_and_fixed_exits_of_the_same_colour_are_not() -> None:
    table = exit_table()
    (ax,) = layers.early_exit(table).axes
    colours = []
    for method in METHODS:
        own = table[table["method"] == method]
        early = assert_curve(ax, f"{math(method)}, early exit", own[own["lam"].notna()])
        fixed = assert_curve(ax, f"{math(method)}, fixed exit", own[own["lam"].isna()])
        assert early.get_color() == fixed.get_color()
        assert early.get_linestyle() != fixed.get_linestyle()
        colours.append(early.get_color())
    assert colours[0] != colours[1]
    (goal,) = (line for line in ax.lines if line.get_label()[0] == "_")
    assert list(goal.get_ydata()) == [0.95, 0.95]
    assert len(ax.lines) == 5


def many_methods(count: int) -> pd.DataFrame:
    parts = []
    for i in range(count):
        own = prediction_table(4)
        own = own[own["method"] == "mat"].assign(method=f"mat_{i}")
        parts.append(own.assign(value=own["value"] + own["k"].isna() * i / 5 - own["k"].notna() * i / 50))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_every_method_has_a_curve_of_its_precision_and_of_its_surprisal(count: int) -> None:
    table = many_methods(count)
    left, right = layers.by_method(table).axes
    colours = []
    for i in range(count):
        own = table[table["method"] == f"mat_{i}"]
        line = assert_curve(left, f"mat_{i}", own[own["k"] == 1])
        assert_curve(right, f"mat_{i}", own[own["metric"] == "surprisal"])
        colours.append(line.get_color())
    assert len(left.lines) == len(right.lines) == count
    assert len(set(colours)) >= min(count, 5)


DRAWN = {
    "alternation": (layers.alternation, alternation_table()),
    "relative_depth": (layers.relative_depth, several_models()),
    "across_corpora": (layers.across_corpora, across_table()),
    "early_exit": (layers.early_exit, exit_table()),
    "by_method": (layers.by_method, many_methods(4)),
}
TITLES = {
    "relative_depth": "some-corpus, n = 1,234",
    "across_corpora": "model, n = 1,234",
}


@pytest.mark.parametrize("name", DRAWN)
def test_every_figure_says_what_it_shows_and_can_be_written(name: str, tmp_path: Path) -> None:
    draw, table = DRAWN[name]
    before = table.copy()
    figure = draw(table)
    pd.testing.assert_frame_equal(table, before)
    assert figure.get_suptitle() == TITLES.get(name, "some/model, some-corpus, n = 1,234")
    for ax in figure.axes:
        assert ax.get_xlabel()
        assert ax.get_ylim()[0] == 0
        drawn = [y for line in ax.lines for y in line.get_ydata()]
        drawn += [y for band in bands(ax).values() for _, y in band.get_paths()[0].vertices]
        assert ax.get_ylim()[1] >= max(drawn), "a curve leaves the figure"
    assert "Precision@1" in figure.axes[0].get_ylabel()
    assert all(path.stat().st_size > 5_000 for path in layers.save(figure, tmp_path, name))


@pytest.mark.parametrize("lost", [[0, 1], [4], list(range(7))])
@pytest.mark.parametrize("name", ["prediction", "relative_depth", "by_method"])
def test_an_infinite_surprisal_is_a_gap_and_no_harm(name: str, lost: list[int], tmp_path: Path) -> None:
    """What is not finite predicts nothing, so a mean over it has no value and no interval to draw."""
    draw, table = {"prediction": (layers.prediction, prediction_table(6)), **DRAWN}[name]
    table = table.copy()
    rows = (table["metric"] == "surprisal") & table["layer"].isin(lost) & (table["method"] != "id")
    table.loc[rows, ["value", "low", "high"]] = float("inf"), float("nan"), float("nan")
    right = draw(table).axes[1]
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in right.lines])
    assert np.isinf(drawn).sum() == rows.sum() > 0
    layers.save(right.figure, tmp_path, name)
    low, high = right.get_ylim()
    assert low == 0
    assert np.isfinite(high)
    finite = drawn[np.isfinite(drawn)]
    assert not len(finite) or high >= finite.max()


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
    figure = layers.token_table(tables)
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
    paths = layers.save(layers.token_table({f"a prompt with {token}": table}), tmp_path, "tokens")
    assert all(path.stat().st_size > 2_000 for path in paths)


# Ticks


@given(st.integers(1, 100))
def test_the_last_layer_is_among_the_ticks(last: int) -> None:
    ticks = layers.layer_ticks(last)
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
    for ax in panels(layers.r2_heatmaps(r2_table(last))):
        assert last in ax.get_xticks()
        assert last in ax.get_yticks()
        assert ax.get_xlim() == ax.get_ylim() == (-0.5, last + 0.5)
    for ax in panels(layers.prediction(prediction_table(last))):
        assert last in ax.get_xticks()


# Files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def small() -> Figure:
    return Figure(figsize=(1, 1))


def test_a_figure_is_written_as_png_and_pdf(tmp_path: Path) -> None:
    paths = layers.save(layers.r2_heatmaps(r2_table(3)), tmp_path / "new" / "folder", "r2")
    assert paths == [tmp_path / "new" / "folder" / "r2.png", tmp_path / "new" / "folder" / "r2.pdf"]
    written = contents(tmp_path / "new" / "folder")
    assert sorted(written) == ["r2.pdf", "r2.png"]
    assert written["r2.png"].startswith(b"\x89PNG\r\n")
    assert written["r2.png"].endswith(b"IEND\xaeB`\x82")
    assert written["r2.pdf"].startswith(b"%PDF-")
    assert written["r2.pdf"].rstrip().endswith(b"%%EOF")


def test_names_with_dots_are_kept(tmp_path: Path) -> None:
    assert [path.name for path in layers.save(small(), tmp_path, "smollm2.135m")] == [
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
    layers.save(small(), tmp_path, "r2")
    before = contents(tmp_path)
    savefig = Figure.savefig

    def fails(self: Figure, path: Path, **options: Any) -> None:
        if options["format"] != failing:
            return savefig(self, path, **options)
        path.write_bytes(b"half a figure")
        raise error

    monkeypatch.setattr(Figure, "savefig", fails)
    with pytest.raises(told):
        layers.save(Figure(figsize=(2, 2)), tmp_path, "r2")
    after = contents(tmp_path)
    assert sorted(after) == ["r2.pdf", "r2.png"]
    assert after[f"r2.{failing}"] == before[f"r2.{failing}"]
    with pytest.raises(told):
        layers.save(small(), tmp_path, "new")
    assert f"new.{failing}" not in contents(tmp_path)
    assert not any(b"half a figure" in content for content in contents(tmp_path).values())


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        layers.save(small(), tmp_path / "file" / "below", "r2")
    assert sorted(contents(tmp_path)) == ["file"]


def test_many_methods_are_told_apart_and_named_beside_the_axes() -> None:
    """More of them than there are colours: no two look the same, and no name lies on a curve."""
    table = many_methods(12)
    figure = layers.by_method(table)
    left, right = figure.axes
    looks = [(line.get_color(), line.get_linestyle()) for line in left.lines]
    assert len(set(looks)) == len(looks) == table["method"].nunique() > 7
    assert [(line.get_color(), line.get_linestyle()) for line in right.lines] == looks
    assert left.get_legend() is None
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(table["method"].unique())
