"""Tables that figures are drawn from in tests, and where what is drawn stands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from matlens.io.tables import COLUMNS

METHODS = ("mat", "id")


def result(
    method: str, layer: int, target: int, metric: str, k: Any, value: float, spread: float
) -> dict[str, Any]:
    """One row of a table of results."""
    columns = ("x", "some/model", "some-corpus", method, layer, target, metric, k, value)
    return dict(zip(COLUMNS, (*columns, value - spread, value + 2 * spread, 1234), strict=True))


def prediction_table(last: int) -> pd.DataFrame:
    """Predictions of all layers by ``mat`` and ``id``, in an order that is not that of the layers."""
    rows = []
    for layer, (i, method) in itertools.product(reversed(range(last + 1)), enumerate(METHODS)):
        for k in (1, 5, 10):
            share = layer / last * (0.5 + k / 25 + i / 100)
            rows.append(result(method, layer, last, "precision", k, share, 0.01 * k))
        rows.append(result(method, layer, last, "surprisal", pd.NA, 5 - layer / last + i, 0.2))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"k": "Int64"})


def methods_table(names: Iterable[str]) -> pd.DataFrame:
    """Predictions by methods of any name."""
    parts = []
    for i, name in enumerate(names):
        rows = prediction_table(4)
        rows = rows[rows["method"] == "mat"].assign(method=name)
        parts.append(rows.assign(value=rows["value"] + rows["k"].isna() * i / 5 - rows["k"].notna() * i / 50))
    return pd.concat(parts, ignore_index=True)


def lens_table(last: int, methods: tuple[str, ...]) -> pd.DataFrame:
    """A report on lenses at every layer before the last, whose KL is 1 at the best and 40 at the worst."""
    rows = []
    for (i, method), layer in itertools.product(enumerate(methods), range(last)):
        for k in (1, 10):
            rows.append(result(method, layer, last, "precision", k, (layer + 1 + i) / (last + 9), 0.01))
        rows.append(result(method, layer, last, "surprisal", pd.NA, 3 + i / 9 - layer / (2 * last), 0.1))
        rows.append(result(method, layer, last, "kl", pd.NA, 40.0 if layer else 1 + i / 9, 0.1))
    for i, method in enumerate(methods):
        rows.append(result(method, 0, last, "seconds", pd.NA, 23.4 * i, 0.1) | {"layer": float("nan")})
    return pd.DataFrame(rows, columns=list(COLUMNS)).assign(against="")


def several_models() -> pd.DataFrame:
    parts = [
        prediction_table(last).assign(model=model)
        for model, last in (("org/small", 3), ("/some/folder/large_one", 6), ("other", 4))
    ]
    return pd.concat(parts, ignore_index=True)


def across_table(*corpora: str) -> pd.DataFrame:
    parts = []
    for i, (fitted, tested) in enumerate(itertools.product(corpora, repeat=2)):
        rows = prediction_table(4)
        rows = rows[rows["method"] == "mat"].assign(method=f"mat of {fitted}", corpus=tested)
        parts.append(rows.assign(value=rows["value"] * (1 - i / 10)))
    return pd.concat(parts, ignore_index=True)


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
    ways = itertools.product(("all", "not-first", "not-sink"), ("all", "not-first", "not-sink", "predicted"))
    return methods_table(["mat", *(f"mat_ffn, fit {fitted}, replace {where}" for fitted, where in ways)])


def early_table() -> pd.DataFrame:
    """Early exits lie between layers, and many thresholds give the same."""
    fixed = prediction_table(5)
    fixed = fixed[(fixed["k"] == 1) & (fixed["layer"] > 0)].assign(lam=float("nan"))
    early = fixed.assign(
        lam=fixed["layer"] / 5, layer=fixed["layer"] * 0.77 + 0.1, value=fixed["value"] + 0.05
    )
    return pd.concat([early, fixed, early.assign(lam=early["lam"] + 0.01)], ignore_index=True)


def shares_table(corpus: str) -> pd.DataFrame:
    rows = []
    for layer in range(13):
        for method, value, n in (("values", 0.5 + layer / 100, 48), ("random", 0.25, 20)):
            columns = ("overlap", "folder/gpt2", corpus, method, layer, layer, "iou", 30)
            rows.append((*columns, value, value - 0.1, value + 0.1, n))
    return pd.DataFrame(rows, columns=list(COLUMNS)).sample(frac=1, random_state=0)


def removal_table() -> pd.DataFrame:
    """How far readings agree with removals, over layers and over all."""
    effects = itertools.product(("correlation", "common"), ("at the layer", "at the end"))
    cells = itertools.product(enumerate(("v", "f v", "another v")), (None, 0, 2), effects)
    return pd.DataFrame(
        result(method, layer, 3, metric, None, 0.1 * i + (layer or 0) / 100, 0.01) | {"effect": effect}  # type: ignore[arg-type]
        for (i, method), layer, (metric, effect) in cells
    )


def bands(ax: Axes) -> dict[str, PolyCollection]:
    """Bands by the label of the line that they belong to."""
    curves = [line for line in ax.lines if line.get_linestyle() != "None" and line.get_label()[0] != "_"]
    filled = [band for band in ax.collections if isinstance(band, PolyCollection)]
    return {str(line.get_label()): band for line, band in zip(curves, filled, strict=True)}


def assert_curve(ax: Axes, label: str, rows: pd.DataFrame, x: str = "layer") -> Line2D:
    """Check that one line has this label, and that it and its band go through the table's numbers."""
    assert len(rows) > 0
    (line,) = (line for line in ax.lines if line.get_label() == label)
    rows = rows.sort_values(x)
    if line.get_linestyle() == "None":  # points, in any order
        points = sorted(zip(line.get_xdata(), line.get_ydata(), strict=True))
        assert points == sorted(zip(rows[x], rows["value"], strict=True))
        return line
    np.testing.assert_allclose(np.asarray(line.get_xdata(), float), rows[x].astype(float), rtol=1e-12)
    np.testing.assert_array_equal(line.get_ydata(), rows["value"])
    band = bands(ax)[label]
    corners = {(round(x, 9), round(y, 9)) for x, y in band.get_paths()[0].vertices}
    for edge in ("low", "high"):
        assert {(round(a, 9), round(b, 9)) for a, b in zip(rows[x], rows[edge], strict=True)} <= corners
    assert tuple(band.get_facecolor()[0][:3]) == to_rgb(line.get_color())
    assert 0 < band.get_facecolor()[0][3] < 0.5
    return line


def named(figure: Figure) -> list[str]:
    """Names in the legends of a figure."""
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def assert_legible(figure: Figure) -> None:
    """Check that legends stand outside the panels, and that no text leaves the figure or meets another."""
    figure.draw_without_rendering()
    legends = [legend.get_window_extent() for legend in figure.legends]
    texts = [Text.get_window_extent(text) for ax in figure.axes for text in ax.texts if text.get_text()]
    titles = [ax.title.get_window_extent() for ax in figure.axes if ax.get_title()]
    ticks = [
        tick.label1.get_window_extent()
        for ax in figure.axes
        for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim()))
        for tick in axis.get_major_ticks()
        if tick.label1.get_text() and tick.label1.get_visible()
        if min(limits) <= tick.get_loc() <= max(limits)
    ]
    labels = [
        label.get_window_extent()
        for ax in figure.axes
        for label in (ax.xaxis.label, ax.yaxis.label)
        if label.get_text() and label.get_visible()
    ]
    head = [figure._suptitle.get_window_extent()] if figure._suptitle is not None else []
    written = [*legends, *texts, *titles, *ticks, *labels, *head]
    for box in written:
        inside = (
            box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        )
        assert inside, f"{box} leaves the figure"
    for first, second in itertools.combinations(written, 2):
        assert not meet(first, second), f"{first} lies on {second}"
    for legend, ax in itertools.product(legends, figure.axes):
        assert not meet(legend, ax.get_window_extent()), "a legend lies on a panel"


def meet(first: Bbox, second: Bbox, slack: float = 1.0) -> bool:
    """Whether two boxes share more than a pixel."""
    across = min(first.x1, second.x1) - max(first.x0, second.x0)
    up = min(first.y1, second.y1) - max(first.y0, second.y0)
    return bool(across > slack and up > slack)
