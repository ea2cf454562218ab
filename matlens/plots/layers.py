"""Lines over layers, each with its 95% interval: predictions, lenses, and the axes that they are drawn on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from matlens.plots.colours import DARK, STYLES, Look, method_looks
from matlens.plots.style import LAYER, finish, layer_axis, literal, percent_ticks, styled, title_of

_ROW, _LETTER = 9.0, 3.6  # points between two rows about infinite values, and of a letter
_MANY = 8  # methods; the names of more stand on the right
_REPORT = {
    ("precision", 1): "Precision@1",
    ("precision", 10): "Precision@10",
    ("surprisal", None): "surprisal (nats)",
    ("kl", None): "KL from the model (nats)",
}


# Lines and their axes


def draw_line(ax: Axes, rows: pd.DataFrame, look: Look, label: str, x: str = "layer") -> None:
    """Draw values over layers or another column, with a band from low to high."""
    rows = rows.astype({x: float, "value": float, "low": float, "high": float}).sort_values(x)
    ax.plot(
        rows[x], rows["value"], color=look.colour, ls=look.line, marker=look.marker, label=label,
        mfc="white" if look.hollow else look.colour,
    )  # fmt: skip
    ax.fill_between(rows[x], rows["low"], rows["high"], color=look.colour, alpha=0.12, lw=0)


def draw_methods(ax: Axes, rows: pd.DataFrame, looks: Mapping[str, Look], x: str = "layer") -> None:
    """Draw a line over layers for each method."""
    for method, look in looks.items():
        draw_line(ax, rows[rows["method"] == method], look, literal(method), x)


def of_metric(results: pd.DataFrame, metric: str, k: int | None = None) -> pd.DataFrame:
    """Rows of a metric, and of one ``k``."""
    return results[(results["metric"] == metric) & (results["k"].isna() if k is None else results["k"] == k)]


def line_key(label: str, colour: str = DARK, **look: Any) -> Line2D:
    """What a legend shows next to a name."""
    return Line2D([], [], color=colour, label=label, **look)


def precision_axis(ax: Axes, label: str = "Precision@1") -> None:
    """Label and limit an axis of shares once all curves are there, so that they are seen whole."""
    ax.set_ylabel(label)
    ax.set_ylim(0, 1.02)
    percent_ticks(ax.yaxis)


def surprisal_axis(ax: Axes) -> None:
    """Label and limit an axis of surprisal once all curves are there, and mark its infinite values."""
    ax.set_ylabel("Surprisal (nats)")
    ax.set_ylim(bottom=0)
    mark_infinite(ax)


def mark_infinite(ax: Axes) -> None:
    """Mark infinite values above the top edge, a row for each curve that has them, and say where they are.

    The words stand next to the marks of their curve, or above them where there is no room.
    """
    curves = [line for line in ax.get_lines() if np.isinf(np.asarray(line.get_ydata(), dtype=float)).any()]
    if not curves:
        return
    everywhere = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in ax.get_lines()])
    margin = 0.05 * np.ptp(everywhere)  # by itself an axis leaves out where nothing is finite
    x_limits = (
        min(ax.get_xlim()[0], everywhere.min() - margin),
        max(ax.get_xlim()[1], everywhere.max() + margin),
    )
    y_limits = ax.get_ylim()
    figure, height = ax.figure, 6.0
    assert isinstance(figure, Figure)
    columns = getattr(ax.get_gridspec(), "ncols", 1)
    width = 0.85 * 72 * figure.get_figwidth() / columns  # points, about
    for line in curves:
        x, y = (np.asarray(data, dtype=float) for data in line.get_data())
        lost = np.sort(x[np.isinf(y)])
        marks = ax.get_xaxis_transform() + ScaledTranslation(0, height / 72, figure.dpi_scale_trans)
        ax.scatter(
            lost, np.ones(len(lost)), s=14, marker="^", edgecolor=line.get_color(), lw=0.7, transform=marks,
            facecolor=line.get_markerfacecolor(), clip_on=False,
        )  # fmt: skip
        words = f"infinite {_where_infinite(lost, x)}"
        start = (lost[-1] - x_limits[0]) / (x_limits[1] - x_limits[0])
        if start * width + len(words) * _LETTER > width:
            start, height = 0.0, height + _ROW
        place = ax.transAxes + ScaledTranslation(6 / 72, height / 72, figure.dpi_scale_trans)
        ax.text(start, 1, words, transform=place, fontsize=7, va="center", color=DARK)
        height += _ROW + 2
    ax.set_xlim(x_limits)
    ax.set_ylim(y_limits)
    if ax.get_title():
        ax.set_title(ax.get_title(), pad=height)


def _where_infinite(lost: np.ndarray, layers: np.ndarray) -> str:
    finite = np.setdiff1d(layers, lost)
    if not len(finite):
        return "at every layer"
    if lost[-1] < finite[0]:
        return f"before layer {finite[0]:g}"
    return f"at layer{'s' * (len(lost) > 1)} {', '.join(f'{layer:g}' for layer in lost)}"


# Figures


@styled
def plot_layers(
    results: pd.DataFrame,
    *,
    looks: Mapping[str, Look] | None = None,
    x: str = "layer",
    label: str = LAYER,
    title: str | None = None,
) -> Figure:
    """Precision@k and surprisal over layers, a line for each method and ``k`` (paper A, Figure 4).

    Infinite surprisal is marked above the top edge.

    Parameters
    ----------
    results
        Rows of ``precision`` and ``surprisal``, such as those of `matlens.lens.prediction_quality`.
    looks
        Methods with their colours, line styles and markers, by default all methods with their own.
    x, label
        The column of the horizontal axis, and its label.
    title
        Title of the figure, by default the model, the corpus and the number of examples.
    """
    looks = looks or method_looks(results["method"])
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
    title = title_of(results) if title is None else title
    if many:
        return finish(figure, title, columns=1, place="outside right center")
    if len(ks) == 1:
        return finish(figure, title, columns=3)
    keys = [line_key(literal(method), look.colour, marker=look.marker) for method, look in looks.items()]
    return finish(
        figure, title, [*keys, *(line_key(f"k = {k}", ls=style) for k, style in ks.items())], columns=5
    )


@styled
def plot_report(results: pd.DataFrame) -> Figure:
    """Four measures of each lens over layers, with 95% intervals, and the time that its fit takes.

    Surprisal and KL have a logarithmic axis where the worst lens would press the others together.

    Parameters
    ----------
    results
        The table of `matlens.lens.evaluate_lenses` with seconds.
    """
    plain = results[results["against"].fillna("") == ""]
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
    return finish(figure, title_of(plain[plain["metric"] == "kl"]), columns=5)


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
    bars = ax.barh(range(len(names)), values, color=[looks[name].colour for name in names])
    ax.bar_label(bars, [f"{v:,.0f}" if v >= 10 else f"{v:.2g}" for v in values], padding=3, fontsize=7)
    ax.margins(x=0.2, y=0.02)
    ax.grid(False)
    ax.set_yticks(range(len(names)), [literal(name) for name in names])
    ax.invert_yaxis()
    ax.set_xlabel("CPU seconds per layer")
