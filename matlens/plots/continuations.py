"""Control of continuations: what it changes, and what it costs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from matlens.plots.colours import Look, method_looks
from matlens.plots.lines import line_key
from matlens.plots.style import finish, literal, model_title, percent_ticks, short_name, styled

_AROUND = [
    (distance * np.cos(angle), distance * np.sin(angle))
    for distance, angle in itertools.product((8, 11, 15, 20), np.linspace(0, 2 * np.pi, 16, endpoint=False))
]  # points from a mark to the middle of its coefficient, nearest first


@styled
def toxicity_against_perplexity(results: pd.DataFrame) -> Figure:
    """Share of toxic continuations against perplexity (paper B, Table 5), a panel for each list of prompts.

    Control is a line over its coefficients, which stand beside its points; a baseline is a point, and a
    method without perplexity a level.

    Parameters
    ----------
    results
        Rows of one attribute with the metrics ``toxic`` and ``perplexity``, and a column ``coefficient``,
        which is empty for what is no control.
    """
    toxic = results[results["metric"] == "toxic"]
    lists = toxic["corpus"].unique()
    looks = method_looks(toxic["method"])
    figure = Figure(figsize=(7.2 if len(lists) == 1 else 4.8 * len(lists), 4.6))
    panels = figure.subplots(1, len(lists), sharex=True, sharey=True, squeeze=False)[0]
    keys = ["method", "coefficient"]
    perplexity = results[results["metric"] == "perplexity"][[*keys, "value"]]
    points = toxic.merge(perplexity.rename(columns={"value": "perplexity"}), on=keys, how="left")
    for ax, name in zip(panels, lists, strict=True):
        shown = points[points["corpus"] == name].rename(columns={"value": "toxic"})
        _draw_methods(ax, shown, looks)
        if len(lists) > 1:
            ax.set_title(f"{literal(short_name(name))}, {shown['n'].iloc[0]:,} prompts")
    panels[0].set_ylabel("toxic continuations")
    panels[0].set_ylim(bottom=0)
    percent_ticks(panels[0].yaxis)
    handles = [
        line_key(literal(method), look.colour, ls=look.line, marker=look.marker, ms=5)
        for method, look in looks.items()
    ]
    first = toxic.iloc[0]
    title = model_title(first["model"])
    if len(lists) == 1:
        title = f"{model_title(first['model'], first['corpus'])}, {first['n']:,} prompts"
    finish(figure, title, handles, columns=3)
    figure.draw_without_rendering()  # settles where the points are
    for ax, name in zip(panels, lists, strict=True):
        shown = points[points["corpus"] == name].rename(columns={"value": "toxic"})
        _write_coefficients(ax, shown.dropna(subset=["coefficient", "perplexity"]), looks)
    return figure


def _draw_methods(ax: Axes, points: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    for method, look in looks.items():
        part = points[points["method"] == method].sort_values("coefficient")
        if part["perplexity"].isna().all():
            for level in part["toxic"].head(1):
                ax.axhline(level, color=look.colour, ls="--", lw=1.2, label=method)
            continue
        bars = [part["toxic"] - part["low"], part["high"] - part["toxic"]]
        ax.errorbar(
            part["perplexity"], part["toxic"], yerr=bars, fmt=f"{look.marker}-", color=look.colour, lw=1.2,
            ms=5, elinewidth=0.7, label=literal(method),
        )  # fmt: skip
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("perplexity")


def _write_coefficients(ax: Axes, points: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """Write the coefficient of each point where it covers least of what is drawn."""
    covered = _ink(ax)
    for method, coefficient, *point in points[["method", "coefficient", "perplexity", "toxic"]].to_numpy():
        centre = ax.transData.transform(point)
        text = ax.annotate(
            f"{coefficient:g}", tuple(point), (0, 0), textcoords="offset points",
            ha="center", va="center", fontsize=7.5, color=looks[method].colour,
        )  # fmt: skip
        box = text.get_window_extent()
        reach = np.array([box.width, box.height]) / 2 + 2
        scale = ax.figure.dpi / 72
        places = centre + scale * np.array(_AROUND)
        hidden = [int((np.abs(covered - place) < reach).all(axis=1).sum()) for place in places]
        inside = [all(ax.bbox.contains(*(place + side * reach)) for side in (-1, 1)) for place in places]
        best = min(range(len(places)), key=lambda i: (not inside[i], hidden[i], i))
        text.set_position(_AROUND[best])
        corners = places[best] + np.linspace(-1, 1, 7)[:, None] * reach * [1, 0]
        covered = np.concatenate([covered, corners, np.repeat(places[best][None], 20, axis=0)])


def _ink(ax: Axes) -> np.ndarray:
    """Points along all lines and bars, in pixels."""
    paths = [line.get_transform().transform(line.get_xydata()) for line in ax.get_lines()]
    for bars in ax.collections:
        assert isinstance(bars, LineCollection)
        paths += [ax.transData.transform(segment) for segment in bars.get_segments()]
    steps = np.linspace(0, 1, 200)[:, None]
    dense = [a + steps * (b - a) for path in paths for a, b in itertools.pairwise(path)]
    return np.concatenate([*dense, *paths])
