"""Figures about feed-forward layers, from the tables; nothing is computed here."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from matlens.plots.layers import layer_ticks

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


def concept_shares(results: pd.DataFrame) -> Figure:
    """Share of top tokens in a concept at every layer, stacked by class, a panel a kind (paper B, Figure 2).

    Parameters
    ----------
    results
        What `concepts.tally` gives.
    """
    classes = ("semantic", "syntactic", "names", "stopwords")
    kinds = list(results["method"].unique())
    figure = Figure(figsize=(7.2, 1.1 + 1.7 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), sharex=True, sharey=True, squeeze=False)[:, 0]
    by_layer = results.dropna(subset="layer").astype({"layer": int})
    for ax, kind in zip(axes, kinds, strict=True):
        part = by_layer[by_layer["method"] == kind].pivot(index="layer", columns="metric", values="value")
        floor = part["covered"] * 0
        for name, colour in zip(classes, (*_COLOURS[:1], *_COLOURS[2:], "#b5b5b5"), strict=True):
            ax.bar(part.index, part[name], bottom=floor, color=colour, label=name, width=0.8)
            floor = floor + part[name]
        overall = results[(results["method"] == kind) & results["layer"].isna()].set_index("metric")
        vectors = overall["n"].iloc[0]
        ax.set_title(f"{kind}, {overall['value']['covered']:.0%} of the tokens, n = {vectors}", fontsize=9)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.grid(alpha=0.25, axis="y")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("layer")
    axes[-1].set_xticks(layer_ticks(int(by_layer["layer"].max())))
    figure.supylabel("share of top tokens in a concept", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=len(classes), loc="outside lower center")
    figure.suptitle(Path(results.iloc[0]["model"]).name, fontsize=10)
    return figure


def pattern_sizes(results: pd.DataFrame, size: int) -> Figure:
    """How many vectors have a pattern of so many words, over all layers and layer by layer.

    Parameters
    ----------
    results
        What `patterns.shares` gives.
    size
        Words of the patterns that are drawn layer by layer.
    """
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = results[results["metric"] == "pattern"]
    for (method, part), colour in zip(found.groupby("method", sort=False), _COLOURS, strict=False):
        overall = part[part["layer"].isna() & (part["value"] > 0)].sort_values("k")
        label = f"{method}, n = {part['n'].max():,}"
        left.plot(overall["k"], overall["value"], color=colour, label=label, lw=1.4, marker="o", ms=3)
        left.fill_between(overall["k"], overall["low"], overall["high"], color=colour, alpha=0.12, lw=0)
        own = part[(part["k"] == size) & part["layer"].notna()].astype({"layer": int}).sort_values("layer")
        right.plot(own["layer"], own["value"], color=colour, lw=1.4, marker="o", ms=2.6)
        right.fill_between(own["layer"], own["low"], own["high"], color=colour, alpha=0.12, lw=0)
    if (found["value"] > 0).any():  # else there is nothing to draw on such a scale
        left.set_yscale("log")
    left.set_xlabel("words of the largest pattern, at least")
    left.set_ylabel("share of vectors")
    left.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    left.legend(frameon=False, fontsize=8)
    right.set_xlabel("layer")
    right.set_ylabel(f"with at least {size} words")
    right.set_ylim(bottom=0)
    right.set_xticks(layer_ticks(int(found["layer"].max())))
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    first = results.iloc[0]
    figure.suptitle(f"{Path(first['model']).name}, {first['corpus']}", fontsize=10)
    return figure
