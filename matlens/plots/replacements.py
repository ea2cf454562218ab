"""What is left of predictions where linear maps replace parts of the model, or were fitted elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

from matlens.plots.colours import REPLACED, ink, method_looks
from matlens.plots.lines import draw_both, draw_line, draw_methods, precision_axis, surprisal_axis
from matlens.plots.style import (
    finish,
    layer_axis,
    layer_ticks,
    literal,
    model_title,
    percent_ticks,
    short_name,
    styled,
    title_of,
)

_MANY = 8  # methods; the names of more stand on the right
_SCHEMES = ("R2", "R2, scored without sinks", "R2 without sinks")  # one scheme for each number of blocks
_FITTED = {
    "all": "fitted on all tokens",
    "not-first": "fitted on all but first tokens",
    "not-sink": "fitted on all but sinks",
}
_WHERE = {
    "all": "replaced at all tokens",
    "not-first": "at all but the first",
    "not-sink": "at all but sinks",
    "predicted": "only at the predicted token",
}
_MATRICES = {
    "r2": (r"$r^2$", "Blues"),
    "precision": ("Precision@1", "Blues"),
    "surprisal": ("surprisal (nats)", "Blues_r"),
}

_ATLAS_KINDS = ("ln1", "attn", "ln2", "ffn", "block", "jump 2", "jump 4", "jump 8")
_ATLAS_WAYS = {"all": "replaced at all tokens", "no sinks": "replaced at all but sinks"}
_ATLAS_SCORES = (("r2 of the variance", r"$r^2$ of the whole variance"), ("nbl bound", "NBL's bound"))
_ATLAS_LEAST = 1e-3  # nats; what rises less stands there


@styled
def alternation(results: pd.DataFrame) -> Figure:
    """Precision@1 of every scheme against the number of blocks that it runs (paper A, Figure 6)."""
    figure = Figure(figsize=(6.6, 4.6))
    ax = figure.subplots()
    results = results[(results["metric"] == "precision") & (results["k"] == 1)]
    order = ("WRR, blocks first", "WRR, mat first", *_SCHEMES, "mat", "id")
    there = set(results["method"])
    looks = method_looks(method for method in order if method in there)
    for method, look in looks.items():
        part = results[results["method"] == method]
        if look.line == "none":
            ax.plot(
                part["layer"], part["value"], look.marker, color=look.colour, alpha=0.8, label=method, mew=0,
                ms=4,
            )  # fmt: skip
        else:
            draw_line(ax, part, look, method if method in _SCHEMES else f"{method}, fixed exit")
    layer_axis(ax, results["layer"].max(), "blocks run")
    precision_axis(ax)
    return finish(figure, title_of(results), columns=3)


@styled
def by_method(results: pd.DataFrame) -> Figure:
    """Precision@1 and surprisal over layers, a line for each method (paper A, Figure 10).

    Infinite surprisal is marked above the top edge.
    """
    looks = method_looks(results["method"])
    many = len(looks) > _MANY
    figure = Figure(figsize=(12 if many else 9.4, 4.2))
    axes = figure.subplots(1, 2)
    for method, look in looks.items():
        draw_both(axes, results[results["method"] == method], look, literal(method))
    precision_axis(axes[0])
    surprisal_axis(axes[1])
    for ax in axes:
        layer_axis(ax, results["layer"].max())
    if many:
        return finish(figure, title_of(results), columns=1, place="outside right center")
    return finish(figure, title_of(results), columns=3)


@styled
def attention_heads(results: pd.DataFrame) -> Figure:
    """r2 of every head's stand-in, and Precision@1 with more and more of all heads replaced.

    Parameters
    ----------
    results
        The table of `analyses/attention_heads.py`.
    """
    figure = Figure(figsize=(9.4, 4.1))
    left, right = figure.subplots(1, 2)
    scores = results[results["metric"] == "r2"].pivot(index="head", columns="layer", values="value")
    image = left.imshow(scores.to_numpy(float), origin="lower", cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    left.grid(False)
    layer_axis(left, scores.shape[1] - 1, "block")
    left.set_ylabel("head")
    left.set_yticks(layer_ticks(scores.shape[0] - 1))
    figure.colorbar(image, ax=left, extend="min").set_label(r"$r^2$ of the linear map")
    together = results[results["share"].notna() & (results["metric"] == "precision") & (results["k"] == 1)]
    draw_methods(right, together.assign(layer=together["share"]), method_looks(together["method"]))
    right.set_xlabel("share of all heads that are replaced")
    percent_ticks(right.xaxis)
    precision_axis(right)
    return finish(figure, title_of(results), right.get_legend_handles_labels()[0])


@styled
def by_fitting(results: pd.DataFrame) -> Figure:
    """Precision@1 and surprisal of one kind of stand-in, a column of panels for each way of fitting it.

    In each panel are ``mat`` and a line for each way of replacing.

    Parameters
    ----------
    results
        Rows of ``mat``, and of methods called ``NAME, fit TOKENS, replace TOKENS``.
    """
    ways = results["method"].str.extract(r"^(?P<name>.+), fit (?P<fitted>.+), replace (?P<replaced>.+)$")
    fits, replaced = (list(ways[column].dropna().unique()) for column in ("fitted", "replaced"))
    figure = Figure(figsize=(1.4 + 3 * len(fits), 6))
    panels = figure.subplots(2, len(fits), squeeze=False, sharex=True, sharey="row")
    reference = method_looks(["mat"])["mat"]
    looks = REPLACED | method_looks(name for name in replaced if name not in REPLACED)
    for (precision, surprisal), fitted in zip(panels.T, fits, strict=True):
        axes = (precision, surprisal)
        draw_both(axes, results[results["method"] == "mat"], reference, "mat")
        for where in replaced:
            part = results[(ways["fitted"] == fitted) & (ways["replaced"] == where)]
            draw_both(axes, part, looks[where], _WHERE.get(where, literal(f"replaced at {where}")))
        precision.set_title(_FITTED.get(fitted, literal(f"fitted on {fitted}")))
        precision_axis(precision)
    for surprisal in panels[1]:  # once the limits that they share are settled
        surprisal_axis(surprisal)
        layer_axis(surprisal, results["layer"].max())
    for ax in panels.flat:
        ax.label_outer()
    names = ", ".join(ways["name"].dropna().unique())
    return finish(figure, f"{literal(names)}: {title_of(results)}", columns=1 + len(replaced))


@styled
def linearity_figure(results: pd.DataFrame, correlations: pd.DataFrame) -> Figure:
    """What it costs to replace each part by its map, layer by layer, and which score says so beforehand.

    Above are heatmaps, kinds of parts down and layers across: the rise of the loss with each part replaced at
    all tokens, at all but sinks, and with each left out. Below are two scores against the rise, and rank
    correlations with their intervals.

    Parameters
    ----------
    results
        The table of `matlens.linearity.linearity_atlas`.
    correlations
        That of `matlens.linearity.rank_correlations`.
    """
    single = results[~results["kind"].str.startswith("together")]
    modes = list(dict.fromkeys(single["tokens"]))
    ways = [("map", mode) for mode in modes] + [("left out", modes[0])]
    titles = {("map", mode): _ATLAS_WAYS.get(mode, literal(mode)) for mode in modes}
    rises = single[single["metric"] == "rise"]
    figure = Figure(figsize=(11, 6.6))
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.1, 1))
    upper, lower = parts
    above = upper.subplots(1, len(ways), squeeze=False)[0]
    below = lower.subplots(1, 3)
    kinds = [kind for kind in _ATLAS_KINDS if kind in set(rises["kind"])]
    layers = range(int(rises["layer"].max()) + 1)
    norm = SymLogNorm(0.01, vmin=0, vmax=10)
    for ax, (method, mode) in zip(above, ways, strict=True):
        part = rises[(rises["method"] == method) & (rises["tokens"] == mode)]
        cells = part.pivot(index="kind", columns="layer", values="value").reindex(index=kinds, columns=layers)
        image = ax.imshow(cells.to_numpy(float), cmap="cividis", norm=norm, aspect="auto")
        ax.grid(False)
        ax.set_yticks(range(len(kinds)), kinds)
        layer_axis(ax, len(layers) - 1, "block, or the first of a jump")
        ax.set_title(titles.get((method, mode), "left out"))
    for ax in above[1:]:
        ax.set_yticklabels([])
    bar = upper.colorbar(image, ax=list(above), extend="both", ticks=[0, 0.01, 0.1, 1, 10])
    bar.set_ticklabels(["0", "0.01", "0.1", "1", "10"])
    bar.set_label("rise of the loss, nats a token")
    mode = modes[-1]
    wide = single[single["tokens"] == mode].pivot_table(
        index=["kind", "layer"], columns=["method", "metric"], values="value"
    )
    looks = method_looks(kinds)
    for ax, (score, label) in zip(below[:2], _ATLAS_SCORES, strict=True):
        for kind, look in looks.items():
            if kind in wide.index.get_level_values("kind"):
                of_kind = wide.xs(kind, level="kind")
                ax.plot(
                    of_kind["map", score], of_kind["map", "rise"].clip(lower=_ATLAS_LEAST), look.marker,
                    color=look.colour, label=kind, mew=0, ms=3.5, alpha=0.8,
                )  # fmt: skip
        ax.set_yscale("log")
        ax.set_xlabel(label)
    below[0].set_ylabel("rise of the loss with the map, nats")
    shown = correlations[(correlations["tokens"] == mode) & (correlations["method"] == "map")]
    shown = shown[shown["kind"] == "all kinds"].iloc[::-1]
    spread = [shown["value"] - shown["low"], shown["high"] - shown["value"]]
    below[2].errorbar(shown["value"], range(len(shown)), xerr=spread, fmt="o", color="black")
    below[2].set_yticks(range(len(shown)), shown["metric"])
    below[2].set_ylim(-0.6, len(shown) - 0.4)
    below[2].set_xlabel("rank correlation of score and rise")
    return finish(figure, title_of(rises), below[0].get_legend_handles_labels()[0], columns=len(kinds))


@styled
def transfer_heatmaps(means: pd.DataFrame) -> Figure:
    """How well the maps of each corpus do on each, as matrices: r2, Precision@1 and surprisal.

    Parameters
    ----------
    means
        The table of `matlens.linearity.transfer_means`.
    """
    corpora = list(means["corpus"].unique())
    names = [literal(short_name(corpus)) for corpus in corpora]
    figure = Figure(figsize=(2.2 + 1.35 * len(corpora), 1.9 + 0.36 * len(corpora)))
    for ax, (metric, (label, colours)) in zip(
        figure.subplots(1, 3, sharey=True), _MATRICES.items(), strict=True
    ):
        part = means[(means["metric"] == metric) & (means["k"].isna() | (means["k"] == 1))]
        grid = part.pivot(index="method", columns="corpus", values="value").astype(float)
        grid = grid.loc[[f"mat of {corpus}" for corpus in corpora], corpora]
        low = max(float(grid.to_numpy().min()), -1.0)
        image = ax.imshow(grid, cmap=colours, vmin=low, vmax=float(grid.to_numpy().max()), aspect="auto")
        ax.grid(False)
        for (row, column), value in np.ndenumerate(grid.to_numpy()):
            weight = "bold" if row == column else "normal"
            ax.text(
                column, row, f"{value:.2f}", ha="center", va="center", fontsize=6.5,
                color=ink(image, value), weight=weight,
            )  # fmt: skip
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
        ax.set_yticks(range(len(names)), names)
        ax.set_xlabel("judged on")
        ax.set_title(label)
        ax.label_outer()
    figure.axes[0].set_ylabel("maps fitted on")
    figure.suptitle(model_title(means.iloc[0]["model"], "means over layers"))
    return figure
