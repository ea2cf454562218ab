"""Clusters of value vectors that extreme sub-updates are of."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment

from matlens.plots.colours import DARK, GREY, LOWERED, OTHER, RAISED
from matlens.plots.style import finish, layer_ticks, literal, styled

_AREA = 1400.0  # points squared of a cluster with all extreme sub-updates
_NAMED = 8  # clusters of each panel that are named
_APART, _LONGEST = 0.14, 38  # of the names: least distance on the axis, and characters
_LOWER = 0.55  # of the layers: the names of clusters below stand beside their dots
_REACH = 0.35  # of the layers: how far such a name goes, about
_BESIDE = 1.07  # of the layers: where the other names start, right of the panel
_WIDTH, _LETTER = 230, 3.8  # points of a panel and of a letter, about
_LEADER = {"arrowstyle": "-", "color": DARK, "lw": 0.5, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)}
_READS = {"score": "by score", "lift": "by score above the vocabulary's mean"}


@styled
def extremes_figure(clusters: pd.DataFrame, title: str) -> Figure:
    """Clusters of extreme sub-updates by layer and by how common the tokens are that they promote.

    A panel for each reading of scores. The area of a dot is the share of the extreme sub-updates that are of
    the cluster, blue where most of these raise the top candidate and red where most lower it. Grey are the
    clusters of drawn sub-updates. The largest are named: their number, the sign of the coefficients, and the
    tokens that they promote.

    Parameters
    ----------
    clusters
        What `cluster_activity` gives, with the columns ``read`` and ``sub_updates``, extreme or drawn.
    title
        Title of the figure.
    """
    reads = list(clusters["read"].unique())
    figure = Figure(figsize=(5.9 * len(reads), 4.4))
    panels = figure.subplots(1, len(reads), sharey=True, squeeze=False)[0]
    for ax, read in zip(panels, reads, strict=True):
        rows = clusters[clusters["read"] == read]
        extreme = rows[rows["sub_updates"] == "extreme"]
        _draw_clusters(ax, extreme, rows[rows["sub_updates"] == "drawn"])
        ax.set_title(_READS[read])
        last = int(clusters["last_layer"].max())
        ax.set_xlim(-0.04 * last, 1.04 * last)
        ax.set_xticks(layer_ticks(last))
        _name_largest(ax, extreme, last)
    panels[0].set_ylabel("share of common tokens less share of unseen tokens")
    handles = [
        panels[0].scatter([], [], s=30, color=colour, alpha=0.6, lw=0, label=label)
        for colour, label in (
            (RAISED, "extreme, mostly raising the candidate"), (LOWERED, "extreme, mostly lowering it"),
            (OTHER, "other clusters of dominant sub-updates"),
        )
    ]  # fmt: skip
    return finish(figure, literal(title), handles)


def _draw_clusters(ax: Axes, extreme: pd.DataFrame, drawn: pd.DataFrame) -> None:
    ax.scatter(drawn["layer"], _heights(drawn), s=5, color=OTHER, alpha=0.5, lw=0, rasterized=True)
    colours = [RAISED if raised >= 0.5 else LOWERED for raised in extreme["raised"]]
    areas = 4 + _AREA * extreme["share"]
    ax.scatter(extreme["layer"], _heights(extreme), s=areas, color=colours, alpha=0.6, lw=0, clip_on=False)
    ax.axhline(0, color=GREY, lw=0.8)
    ax.set_ylim(-1.06, 1.06)
    ax.set_xlabel("mean layer of the sub-updates")


def _heights(clusters: pd.DataFrame) -> pd.Series:
    return clusters["common"] - clusters["unseen"]


def _name_largest(ax: Axes, extreme: pd.DataFrame, last: int) -> None:
    """Write names of clusters of lower layers beside their dots, and the others right of the panel."""
    largest = extreme.head(_NAMED)
    every = np.column_stack([extreme["layer"].to_numpy() / last, _heights(extreme).to_numpy()])
    dots = every[: len(largest)]
    low, high = np.flatnonzero(dots[:, 0] < _LOWER), np.flatnonzero(dots[:, 0] >= _LOWER)
    radii = 0.02 + np.sqrt(_AREA * largest["share"].to_numpy() / np.pi) / _WIDTH
    places = [
        (i, dots[i, 0] + radii[i], height)
        for i, height in zip(low, _free_heights(dots[low], every), strict=True)
    ]
    rows, heights = _leaders(dots[high], _spread(dots[high, 1]))
    places += [(i, _BESIDE, height) for i, height in zip(high[rows], heights, strict=True)]
    for i, x, y in places:
        longest = _LONGEST if x == _BESIDE else int((0.9 - x) * _WIDTH / _LETTER)
        straight = x != _BESIDE and y == dots[i, 1]
        ax.annotate(
            _name(largest.iloc[i], longest), (dots[i, 0] * last, dots[i, 1]), xytext=(x * last, y),
            fontsize=7, va="center", annotation_clip=False, arrowprops=None if straight else _LEADER,
        )  # fmt: skip


def _name(cluster: pd.Series, longest: int) -> str:
    """Number and sign of a cluster, and as many of its first three tokens as there is room for."""
    name = f"{cluster['cluster']}{'+' if cluster['sign'] > 0 else '−'}"
    for i, token in enumerate(cluster["tokens"].split(", ")[:3]):
        longer = f"{name} · {token}" if i else f"{name}  {token}"
        if i and len(longer) > longest:
            break
        name = longer
    return literal(name[:_LONGEST])


def _free_heights(dots: np.ndarray, every: np.ndarray) -> list[float]:
    """Heights of names that start at dots: the nearest where none of every dot and no other name is."""
    heights: list[float] = []
    for x, y in dots:
        behind = every[(every[:, 0] > x) & (every[:, 0] < x + _REACH)]
        taken = [*heights, *behind[:, 1]]
        free = (y + side * step * _APART for step in range(len(dots) + 2) for side in (1, -1))
        heights.append(
            next((h for h in free if abs(h) <= 1 and all(abs(h - t) >= 0.7 * _APART for t in taken)), y)
        )
    return heights


def _spread(heights: np.ndarray) -> np.ndarray:
    """Places for as many names as there are heights, each near one of them and all apart, from below."""
    places, free = [], -1.0
    for i, height in enumerate(np.sort(heights)):
        room = _APART * (len(heights) - 1 - i)  # for those that follow
        free = min(max(float(height), free), 1.0 - room)
        places.append(free)
        free += _APART
    return np.array(places)


def _leaders(dots: np.ndarray, places: np.ndarray) -> tuple[list[int], list[float]]:
    """Which dot has its name at which place: the shortest leader lines in sum, of which no two cross."""
    across, up = (1.06 - dots[:, 0])[:, None], dots[:, 1][:, None] - places[None, :]
    rows, chosen = linear_sum_assignment(np.hypot(across, up))
    return rows.tolist(), places[chosen].tolist()
