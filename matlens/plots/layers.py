"""Predictions and lenses over layers, a line for each method with its 95% interval."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from matlens.drawing import (
    LAYER,
    STYLES,
    Look,
    check_unique,
    draw_line,
    draw_methods,
    finish,
    layer_axis,
    line_key,
    literal,
    mark_infinite,
    method_looks,
    of_metric,
    percent_ticks,
    precision_axis,
    styled,
    surprisal_axis,
    title_of,
)
from matlens.errors import check_names

_MANY = 8  # methods; the names of more stand on the right
_REPORT = {
    ("precision", 1): "Precision@1",
    ("precision", 10): "Precision@10",
    ("surprisal", None): "surprisal (nats)",
    ("kl", None): "KL from the model (nats)",
}


@styled
def plot_layers(
    results: pd.DataFrame,
    *,
    looks: Mapping[str, Look] | None = None,
    x: str = "layer",
    label: str = LAYER,
    title: str | None = None,
) -> Figure:
    """Precision@k and surprisal by layer, one line per method and ``k`` (Figure 4).

    Infinite surprisal is marked above the top edge.

    Parameters
    ----------
    results
        Rows of ``precision`` and ``surprisal``, such as those of `matlens.lens.prediction_quality`.
    looks
        Methods with their colors, line styles and markers, by default all methods with their own.
    x, label
        The column of the horizontal axis, and its label.
    """
    title = title_of(results) if title is None else title
    check_names(looks or (), results["method"].unique(), "looks")
    looks = looks or method_looks(results["method"])
    drawn = results["metric"].isin(["precision", "surprisal"]) & results["method"].isin(looks)
    check_unique(results[drawn], ["method", "metric", "k", x])
    many = len(looks) > _MANY
    figure = Figure(figsize=(12 if many else 9.4, 4))
    left, right = figure.subplots(1, 2)
    ks = dict(zip(sorted(results["k"].dropna().unique()), STYLES, strict=False))
    for method, look in looks.items():
        rows = results[results["method"] == method]
        for k, style in ks.items():
            name, line = (f"{method}, k = {k}", style) if len(ks) > 1 else (method, look.line)
            draw_line(left, of_metric(rows, "precision", k), look._replace(line=line), literal(name), x)
        draw_line(right, of_metric(rows, "surprisal"), look, literal(method), x)
    precision_axis(left, "Precision@k" if len(ks) > 1 else f"Precision@{next(iter(ks))}")
    surprisal_axis(right)
    for ax in (left, right):
        ax.set_xlabel(label)
        if x == "layer":
            layer_axis(ax, results["target"].max(), label)
    if many:
        return finish(figure, title, columns=1, place="outside right center")
    if len(ks) == 1:
        return finish(figure, title, columns=3)
    keys = [line_key(literal(method), look.color, marker=look.marker) for method, look in looks.items()]
    return finish(
        figure, title, [*keys, *(line_key(f"k = {k}", ls=style) for k, style in ks.items())], columns=5
    )


@styled
def plot_report(results: pd.DataFrame) -> Figure:
    """Four metrics of each lens by layer, with 95% intervals, and fit times.

    Surprisal and KL have a logarithmic axis where the worst lens would press the others together.

    Parameters
    ----------
    results
        The table of `matlens.lens.evaluate_lenses` with seconds.
    """
    plain = results[results["against"].fillna("") == ""]
    title = title_of(plain[plain["metric"] == "kl"])
    looks = method_looks(plain["method"])
    figure = Figure(figsize=(10.4, 7.0))
    panels = figure.subplot_mosaic([[0, 1, "cost"], [2, 3, "cost"]], width_ratios=[1, 1, 0.6])
    for number, ((metric, k), label) in enumerate(_REPORT.items()):
        ax, rows = panels[number], of_metric(plain, metric, k)
        draw_methods(ax, rows, looks)
        ax.set_ylabel(label)
        layer_axis(ax, results["target"].max())
        if metric == "precision":
            percent_ticks(ax.yaxis)
        else:
            _spread_axis(ax, rows["value"].to_numpy(dtype=float))
            mark_infinite(ax)
    _draw_costs(panels["cost"], plain[plain["metric"] == "seconds"].set_index("method")["value"], looks)
    return finish(figure, title, columns=5)


def _spread_axis(ax: Axes, values: np.ndarray) -> None:
    """Make an axis logarithmic if values differ by a factor of five, and label 1, 2, 5, 10 and so on."""
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() >= 5 * finite.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())


def _draw_costs(ax: Axes, seconds: pd.Series, looks: Mapping[str, Look]) -> None:
    """A bar for each lens, with its seconds at the end."""
    names = list(looks)
    values = seconds[names].astype(float)
    bars = ax.barh(range(len(names)), values, color=[looks[name].color for name in names])
    ax.bar_label(bars, [f"{v:,.0f}" if v >= 10 else f"{v:.2g}" for v in values], padding=3, fontsize=7)
    ax.margins(x=0.2, y=0.02)
    ax.grid(False)
    ax.set_yticks(range(len(names)), [literal(name) for name in names])
    ax.invert_yaxis()
    ax.set_xlabel("CPU seconds per layer")
