"""Heatmaps: pairs of layers, prompts layer by layer, and the atlas of linearity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure

from matlens.drawing import (
    cells_of,
    draw_cells,
    finish,
    layer_axis,
    layer_ticks,
    literal,
    method_looks,
    styled,
    title_of,
    write_cells,
)
from matlens.errors import InputError, check_choice
from matlens.io.tables import check_one
from matlens.models.tokens import visible

_MOST_TOKENS = 60  # tokens side by side; more cannot be read
_LONGEST_TOKEN = 9  # characters of a token in a cell
_COLORS = {  # color map, dark for confident cells, and label of the color bar
    "probability": ("Blues", "probability of the token"),
    "kl": ("Blues_r", "KL from the model (nats)"),
    "rank": ("Blues_r", "rank of the prediction"),
    "entropy": ("Blues_r", "entropy (nats)"),
}
_KINDS = ("ln1", "attn", "ln2", "ffn", "block", "jump 2", "jump 4", "jump 8")
_WAYS = {"all": "replaced at all tokens", "no sinks": "replaced at all but sinks"}
_SCORES = (("r2 of the variance", r"$r^2$ of the whole variance"), ("nbl bound", "NBL's bound"))
_MIN_INCREASE = 1e-3  # nats; smaller increases are drawn there


@styled
def plot_r2(results: pd.DataFrame) -> Figure:
    """r2 of ``mat`` and ``id`` for all pairs of layers (paper A, Figures 2 and 3).

    Blue is better than the mean of the target, red is worse; below -1 the red does not deepen.
    """
    title = title_of(results)
    figure = Figure(figsize=(9.4, 4.1))
    axes = figure.subplots(1, 2, sharey=True)
    everywhere = range(int(results["target"].max()) + 1)
    for ax, method in zip(axes, ("mat", "id"), strict=True):
        part = results[(results["metric"] == "r2") & (results["method"] == method)]
        if part.empty:
            raise InputError(f"The table must have r2 of {method}, got none.")
        grid = cells_of(part, "target", "layer", "value")
        image = draw_cells(
            ax,
            grid.reindex(index=everywhere, columns=everywhere),
            origin="lower",
            cmap="RdBu",
            vmin=-1,
            vmax=1,
        )
        ax.set_title(rf"$\mathtt{{{method}}}_{{\ell \to \ell'}}$")
        layer_axis(ax, everywhere[-1], r"source layer $\ell$")
        ax.set_yticks(ax.get_xticks())
    axes[0].set_ylabel(r"target layer $\ell'$")
    bar = figure.colorbar(image, ax=axes, extend="min", shrink=0.9)
    bar.set_label(r"$r^2$, averaged over coordinates")
    figure.suptitle(title)
    return figure


@styled
def plot_trajectory(table: pd.DataFrame, *, color: str = "probability", title: str | None = None) -> Figure:
    """A cell for each token of a prompt and each layer, with the token predicted there.

    ``table`` is that of `Trajectory.to_dataframe`, or some of its rows. ``color`` is ``"probability"``,
    ``"kl"``, ``"rank"`` or ``"entropy"``; dark is confident.
    """
    check_choice(color, _COLORS, "color")
    grid = cells_of(table, "layer", "position", color)
    predicted = table.pivot(index="layer", columns="position", values="predicted").reindex_like(grid)
    if grid.shape[1] > _MOST_TOKENS:
        raise InputError(
            f"The table must have at most {_MOST_TOKENS} tokens, got {grid.shape[1]}. Select rows, "
            "such as table[table['position'] >= 40]."
        )
    tokens = table.drop_duplicates("position").set_index("position")["token"].reindex(grid.columns)
    layers, n = list(grid.index), grid.shape[1]
    figure = Figure(figsize=(max(3.2, 0.62 * n + 1.9), 0.19 * len(layers) + 1.5))
    ax = figure.subplots()
    colors, words = _COLORS[color]
    norm = _cell_norm(color, grid.to_numpy(dtype=float))
    image = draw_cells(ax, grid, origin="lower", aspect="auto", cmap=colors, norm=norm)
    write_cells(ax, image, predicted.fillna("").map(_short_token), fontsize=6)
    ax.set_xticks(range(n), map(_short_token, tokens), rotation=45, ha="right")
    ticks = [tick for tick in layer_ticks(layers[-1]) if tick in layers]
    ax.set_yticks([layers.index(tick) for tick in ticks], list(map(str, ticks)))
    ax.set_xlabel("token of the prompt")
    ax.set_ylabel(r"layer $\ell$")
    figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02).set_label(words)
    if title is not None:
        figure.suptitle(literal(title))
    return figure


def _cell_norm(color: str, values: np.ndarray) -> Any:
    if color == "probability":
        return Normalize(0, 1)
    if color == "rank":
        return LogNorm(1, max(10.0, float(values.max())))
    return Normalize(0, max(float(values[np.isfinite(values)].max(initial=0)), 1e-9))


def _short_token(token: str) -> str:
    shown = visible(token)
    return literal(shown if len(shown) <= _LONGEST_TOKEN else shown[: _LONGEST_TOKEN - 1] + "…")


@styled
def plot_atlas(results: pd.DataFrame, correlations: pd.DataFrame) -> Figure:
    """Plot the loss increase of each part by layer, and the scores that predict it.

    Above are heatmaps of `matlens.linearity.linearity_atlas`, kinds of parts down and layers across: the
    loss increase with each part replaced at all tokens, at all but sinks, and removed. Below are two scores
    against it, and their `matlens.linearity.rank_correlations`.
    """
    check_one(results, correlations)
    single = results[~results["kind"].str.startswith("together")]
    modes = list(single["tokens"].unique())
    titles = {("map", mode): _WAYS.get(mode, literal(mode)) for mode in modes}
    titles["removed", modes[0]] = "removed"
    increases = single[single["metric"] == "loss increase"]
    figure = Figure(figsize=(11, 6.6))
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.1, 1))
    upper, lower = parts
    above = upper.subplots(1, len(titles), squeeze=False)[0]
    below = lower.subplots(1, 3)
    kinds = [kind for kind in _KINDS if kind in set(increases["kind"])]
    layers = range(int(increases["layer"].max()) + 1)
    norm = SymLogNorm(0.01, vmin=0, vmax=10)
    for ax, ((method, mode), title) in zip(above, titles.items(), strict=True):
        part = increases[(increases["method"] == method) & (increases["tokens"] == mode)]
        cells = cells_of(part, "kind", "layer", "value").reindex(index=kinds, columns=layers)
        image = draw_cells(ax, cells, cmap="cividis", norm=norm, aspect="auto")
        ax.set_yticks(range(len(kinds)), kinds if ax is above[0] else [""] * len(kinds))
        layer_axis(ax, len(layers) - 1, "block, or the first of a jump")
        ax.set_title(title)
    bar = upper.colorbar(image, ax=list(above), extend="both", ticks=[0, 0.01, 0.1, 1, 10])
    bar.set_ticklabels(["0", "0.01", "0.1", "1", "10"])
    bar.set_label("loss increase, nats per token")
    mode = modes[-1]
    of_maps = single[(single["tokens"] == mode) & (single["method"] == "map")]
    points = of_maps.pivot(index=["kind", "layer"], columns="metric", values="value")
    for ax, (score, label) in zip(below[:2], _SCORES, strict=True):
        for kind, look in method_looks(kinds).items():
            increase = points.loc[kind, "loss increase"].clip(lower=_MIN_INCREASE)
            style: dict[str, Any] = {"color": look.color, "label": kind, "mew": 0, "ms": 3.5, "alpha": 0.8}
            ax.plot(points.loc[kind, score], increase, look.marker, **style)
        ax.set_yscale("log")
        ax.set_xlabel(label)
    below[0].set_ylabel("loss increase with the map, nats")
    shown = correlations[(correlations["tokens"] == mode) & (correlations["method"] == "map")]
    shown = shown[shown["kind"] == "all kinds"].iloc[::-1]
    spread = [shown["value"] - shown["low"], shown["high"] - shown["value"]]
    below[2].errorbar(shown["value"], range(len(shown)), xerr=spread, fmt="o", color="black")
    below[2].set_yticks(range(len(shown)), shown["metric"])
    below[2].set_ylim(-0.6, len(shown) - 0.4)
    below[2].set_xlabel("rank correlation of score and loss increase")
    return finish(figure, title_of(increases), below[0].get_legend_handles_labels()[0], columns=len(kinds))
