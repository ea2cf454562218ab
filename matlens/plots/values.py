"""What value vectors hold: shares layer by layer, concepts and patterns among their top tokens."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from matlens.errors import PositiveInt
from matlens.plots.colours import CLASSES, method_looks
from matlens.plots.lines import draw_line
from matlens.plots.style import finish, layer_axis, literal, model_title, percent_ticks, short_name, styled

_VECTORS = {"values": "value vectors", "random": "random vectors", "dealt": "tokens dealt anew"}


@styled
def shares_by_layer(results: pd.DataFrame, label: str) -> Figure:
    """A share at every layer, a line for each method, with intervals (paper B, Figures 4 and 6).

    Parameters
    ----------
    results
        Rows of one metric, such as `norm_overlap` and `dominance` give.
    label
        What the share is of.
    """
    figure = Figure(figsize=(6.2, 3.8))
    ax = figure.subplots()
    looks = method_looks(results["method"])
    for method, part in results.groupby("method", sort=False):
        draw_line(ax, part, looks[str(method)], literal(f"{method}, n = {part['n'].iloc[0]:,}"))
    ax.set_ylabel(label)
    ax.set_ylim(bottom=0)
    layer_axis(ax, results["layer"].max(), "layer")
    percent_ticks(ax.yaxis)
    first = results.iloc[0]
    return finish(figure, model_title(first["model"], None if first["corpus"] == "none" else first["corpus"]))


@styled
def concept_shares(results: pd.DataFrame) -> Figure:
    """Share of top tokens in a concept at every layer, stacked by class, a panel a kind (paper B, Figure 2).

    Parameters
    ----------
    results
        What `tally_concepts` gives.
    """
    kinds = list(results["method"].unique())
    figure = Figure(figsize=(7.2, 1.1 + 1.7 * len(kinds)))
    axes = figure.subplots(len(kinds), sharex=True, sharey=True, squeeze=False)[:, 0]
    by_layer = results.dropna(subset="layer").astype({"layer": int})
    for ax, kind in zip(axes, kinds, strict=True):
        part = by_layer[by_layer["method"] == kind].pivot(index="layer", columns="metric", values="value")
        floor = part["covered"] * 0
        for name, colour in CLASSES.items():
            ax.bar(part.index, part[name], bottom=floor, color=colour, label=name, width=0.8)
            floor = floor + part[name]
        overall = results[(results["method"] == kind) & results["layer"].isna()].set_index("metric")
        vectors = overall["n"].iloc[0]
        ax.set_title(f"{kind}, {overall['value']['covered']:.0%} of the tokens, n = {vectors}")
        percent_ticks(ax.yaxis)
        ax.grid(False, axis="x")
    layer_axis(axes[-1], by_layer["layer"].max(), "layer")
    figure.supylabel("share of top tokens in a concept", fontsize=9)
    return finish(figure, literal(short_name(results.iloc[0]["model"])))


@styled
def pattern_sizes(results: pd.DataFrame, size: PositiveInt) -> Figure:
    """How many vectors have a pattern of so many words, over all layers and layer by layer.

    Parameters
    ----------
    results
        What `pattern_shares` gives.
    size
        Words of the patterns that are drawn layer by layer.
    """
    figure = Figure(figsize=(8.2, 3.7))
    left, right = figure.subplots(1, 2)
    patterns = results[results["metric"] == "pattern"]
    looks = method_looks(patterns["method"])
    for method, part in patterns.groupby("method", sort=False):
        look, label = looks[str(method)], f"{_VECTORS.get(str(method), method)}, n = {part['n'].max():,}"
        overall = part[part["layer"].isna() & (part["value"] > 0)]
        draw_line(left, overall.assign(layer=overall["k"]), look, label)
        by_layer = part[(part["k"] == size) & part["layer"].notna()].astype({"layer": int})
        draw_line(right, by_layer, look, label)
    if (patterns["value"] > 0).any():  # else there is nothing to draw on such a scale
        left.set_yscale("log")
    left.set_xlabel("words of the largest pattern, at least")
    left.set_ylabel("share of vectors")
    percent_ticks(left.yaxis)
    right.set_ylabel(f"share with a pattern of {size} words or more")
    right.set_ylim(bottom=0)
    layer_axis(right, patterns["layer"].max(), "layer")
    percent_ticks(right.yaxis)
    first = results.iloc[0]
    return finish(figure, model_title(first["model"], first["corpus"]))
