"""Figures about clusters of value vectors, from the tables; nothing is computed here."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from matlens.plots.layers import layer_ticks, literal

_RAISED, _LOWERED, _DRAWN = "#1f5fa8", "#c8553d", "#b5b5b5"
_AREA = 1400.0  # points squared of a cluster with all extreme sub-updates
_NAMED = 8  # clusters of each panel that are named
_APART, _LONGEST = 0.14, 34  # of the names: least distance on the axis, and characters
_LINE = {"arrowstyle": "-", "color": "#777777", "lw": 0.5, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)}
_READS = {"score": "by score", "lift": "by score above the vocabulary's mean"}


def extremes_figure(clusters: pd.DataFrame, title: str) -> Figure:
    """Clusters of extreme sub-updates by layer and by how common the tokens are that they promote.

    A panel for each reading of scores. The area of a dot is the share of the extreme sub-updates that are of
    the cluster, blue where most of these raise the top candidate and red where most lower it. Grey are the
    clusters of drawn sub-updates. The largest are named: their number, the sign of the coefficients, and the
    tokens that they promote.

    Parameters
    ----------
    clusters
        Of `extremes.cluster_activity`, with the columns ``read`` and ``sub_updates``, extreme or drawn.
    title
        Of the figure.
    """
    reads = list(clusters["read"].unique())
    figure = Figure(figsize=(5.6 * len(reads), 4.4), layout="constrained")
    panels = figure.subplots(1, len(reads), sharey=True, squeeze=False)[0]
    for ax, read in zip(panels, reads, strict=True):
        own = clusters[clusters["read"] == read]
        _panel(ax, own[own["sub_updates"] == "extreme"], own[own["sub_updates"] == "drawn"])
        ax.set_title(_READS[read], fontsize=9)
        ax.set_xticks(layer_ticks(int(clusters["last_layer"].max())))
        _named(ax, own[own["sub_updates"] == "extreme"])
    panels[0].set_ylabel("share of common tokens less share of unseen tokens")
    handles = [
        panels[0].scatter([], [], s=30, color=colour, alpha=0.6, lw=0, label=label)
        for colour, label in (
            (_RAISED, "extreme, mostly raising the candidate"), (_LOWERED, "extreme, mostly lowering it"),
            (_DRAWN, "other clusters of dominant sub-updates"),
        )
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _panel(ax: Axes, extreme: pd.DataFrame, drawn: pd.DataFrame) -> None:
    height = drawn["common"] - drawn["unseen"]
    ax.scatter(drawn["layer"], height, s=5, color=_DRAWN, alpha=0.5, lw=0, rasterized=True)
    height = extreme["common"] - extreme["unseen"]
    colours = [_RAISED if raised >= 0.5 else _LOWERED for raised in extreme["raised"]]
    ax.scatter(
        extreme["layer"],
        height,
        s=4 + _AREA * extreme["share"],
        color=colours,
        alpha=0.6,
        lw=0,
        clip_on=False,
    )
    ax.axhline(0, color="#999999", lw=0.8)
    ax.set_ylim(-1.06, 1.06)
    ax.set_xlabel("mean layer of the sub-updates")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _named(ax: Axes, extreme: pd.DataFrame) -> None:
    """Names of the largest on the right of the panel, so far from each other that all can be read."""
    first = extreme.head(_NAMED)
    heights = (first["common"] - first["unseen"]).to_numpy()
    order = heights.argsort(kind="stable")
    free = -1.0
    for place, row in enumerate(order):
        one = first.iloc[row]
        above = _APART * (len(first) - 1 - place)  # room for those that follow
        free = min(max(float(heights[row]), free), 1.0 - above)
        name = (
            f"{one['cluster']}{'+' if one['sign'] > 0 else '−'}  {', '.join(one['tokens'].split(', ')[:3])}"
        )
        ax.annotate(
            literal(name[:_LONGEST]), (one["layer"], heights[row]), xytext=(1.03, free),
            textcoords=("axes fraction", "data"), fontsize=7, va="center", annotation_clip=False,
            arrowprops=_LINE,
        )  # fmt: skip
        free += _APART


def model_title(model: str, corpus: str, n: int) -> str:
    """The title of a figure: the model, the corpus and how many sentences."""
    return f"{Path(model).name}, {corpus}, n = {n:,}"
