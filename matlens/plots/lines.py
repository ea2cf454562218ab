"""Curves over layers with their intervals, the two axes that they are drawn on, and curves over updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from matlens.plots.colours import DARK, Look
from matlens.plots.style import literal, percent_ticks, short_name, styled

_ROW, _LETTER = 9.0, 3.6  # points between two rows about infinite values, and of a letter


def draw_line(ax: Axes, part: pd.DataFrame, look: Look, label: str) -> Line2D:
    """Draw values over layers, with a band from low to high."""
    part = part.sort_values("layer")
    (line,) = ax.plot(
        part["layer"], part["value"], color=look.colour, ls=look.line, marker=look.marker, label=label,
        mfc="white" if look.hollow else look.colour,
    )  # fmt: skip
    ax.fill_between(part["layer"], part["low"], part["high"], color=look.colour, alpha=0.12, lw=0)
    return line


def draw_methods(ax: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """Draw a line over layers for each method."""
    for method, look in looks.items():
        draw_line(ax, rows[rows["method"] == method], look, literal(method))


def line_key(label: str, colour: str = DARK, **look: Any) -> Line2D:
    """What a legend shows beside a name."""
    return Line2D([], [], color=colour, label=label, **look)


def draw_both(axes: Sequence[Axes], part: pd.DataFrame, look: Look, label: str) -> None:
    """Draw Precision@1 on the first axes and surprisal on the second."""
    draw_line(axes[0], part[(part["metric"] == "precision") & (part["k"] == 1)], look, label)
    draw_line(axes[1], part[part["metric"] == "surprisal"], look, label)


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

    The words stand beside the marks of their curve, or above them where there is no room.
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


@styled
def training_curves(table: pd.DataFrame) -> Figure:
    """Draw losses over updates, those of training and of held-out text, for each model of a table.

    Parameters
    ----------
    table
        As `training.training_table` gives it; several of them, one behind the other.
    """
    losses = table[table["metric"] == "loss"]
    figure = Figure(figsize=(5.2, 3.2))
    ax = figure.add_subplot()
    for number, (model, part) in enumerate(losses.groupby("model", sort=False)):
        for method, dashes in (("training", "--"), ("held-out", "-")):
            curve = part[part["method"] == method].astype({"k": float}).sort_values("k")
            label = literal(f"{short_name(str(model))}, {method}")
            ax.plot(curve["k"], curve["value"], ls=dashes, color=f"C{number}", label=label)
    ax.set_xlabel("update")
    ax.set_ylabel("loss (nats a token)")
    ax.legend()
    figure.suptitle(literal(str(losses["corpus"].iloc[0])))
    return figure
