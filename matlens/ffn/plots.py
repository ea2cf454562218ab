"""Figures about feed-forward layers, from the tables; nothing is computed here."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from matlens.plots import layer_ticks

_COLOURS = ("#1f5fa8", "#c8553d", "#3f8f5f", "#8a5fb0")


def shares_by_layer(results: pd.DataFrame, label: str) -> Figure:
    """A share at every layer, a line for each method, with intervals (paper B, Figures 4 and 6).

    Parameters
    ----------
    results
        Rows of one metric, such as `overlap` and `dominance` give.
    label
        What the share is of.
    """
    figure = Figure(figsize=(6.2, 3.6), layout="constrained")
    ax = figure.subplots()
    for (method, part), colour in zip(results.groupby("method", sort=False), _COLOURS, strict=False):
        part = part.sort_values("layer")
        line = f"{method}, n = {part['n'].iloc[0]:,}"
        ax.plot(part["layer"], part["value"], color=colour, label=line, lw=1.4, marker="o", ms=2.6)
        ax.fill_between(part["layer"], part["low"], part["high"], color=colour, alpha=0.12, lw=0)
    ax.set_xlabel("layer")
    ax.set_ylabel(label)
    ax.set_ylim(bottom=0)
    ax.set_xticks(layer_ticks(int(results["layer"].max())))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    first = results.iloc[0]
    corpus = "" if first["corpus"] == "none" else f", {first['corpus']}"
    figure.suptitle(f"{Path(first['model']).name}{corpus}", fontsize=10)
    return figure
