"""What layers tell through linear maps: quality of fit, predictions, and top tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from matlens.errors import InputError
from matlens.plots.colours import DARK, ID, MAT, SOLID, STYLES, method_looks
from matlens.plots.lines import LAYER, draw_both, draw_line, precision_axis, surprisal_axis
from matlens.plots.style import (
    add_legend,
    examples_of,
    layer_ticks,
    literal,
    model_title,
    short_name,
    styled,
    title_of,
)
from matlens.signatures import checked

_METHODS = {"mat": MAT, "id": ID}


@checked
@styled
def r2_heatmaps(results: pd.DataFrame) -> Figure:
    """r2 of ``mat`` and ``id`` for all pairs of layers, on one colour scale (paper A, Figures 2 and 3).

    Blue is better than the mean of the target, red is worse; below -1 the red does not deepen.
    """
    figure = Figure(figsize=(9.4, 4.1))
    axes = figure.subplots(1, 2, sharey=True)
    image = None
    for ax, method in zip(axes, _METHODS, strict=True):
        grid = _r2_grid(results, method)
        image = ax.imshow(grid.T, origin="lower", cmap="RdBu", vmin=-1, vmax=1)
        ax.grid(False)
        ax.set_title(rf"$\mathtt{{{method}}}_{{\ell \to \ell'}}$")
        ax.set_xlabel(r"source layer $\ell$")
        ticks = layer_ticks(len(grid) - 1)
        ax.set_xticks(ticks)
        ax.set_yticks(ticks)
    axes[0].set_ylabel(r"target layer $\ell'$")
    if image is not None:
        bar = figure.colorbar(image, ax=axes, extend="min", shrink=0.9)
        bar.set_label(r"$r^2$, averaged over coordinates")
    figure.suptitle(title_of(results))
    return figure


def _r2_grid(results: pd.DataFrame, method: str) -> np.ndarray:
    """r2 by layer and target, NaN where there is no map."""
    part = results[(results["metric"] == "r2") & (results["method"] == method)]
    if part.empty:
        raise InputError(f"The table has no r2 by {method}. Expected a method that it has.")
    everywhere = range(int(results["target"].max()) + 1)
    grid = part.pivot(index="layer", columns="target", values="value")
    return grid.reindex(index=everywhere, columns=everywhere).to_numpy(dtype=float)


@checked
@styled
def prediction(results: pd.DataFrame) -> Figure:
    """Precision@k and surprisal of every layer for ``mat`` and ``id`` (paper A, Figure 4), with intervals."""
    figure = Figure(figsize=(9.4, 3.9))
    left, right = figure.subplots(1, 2)
    styles = dict(zip((1, 5, 10), STYLES, strict=False))
    for method, look in _METHODS.items():
        rows = results[results["method"] == method]
        for k, style in styles.items():
            part = rows[(rows["metric"] == "precision") & (rows["k"] == k)]
            draw_line(left, part, look._replace(line=style), f"{method}, k = {k}")
        draw_line(right, rows[rows["metric"] == "surprisal"], look, method)
    precision_axis(left, "Precision@k")
    surprisal_axis(right)
    for ax in (left, right):
        ax.set_xlabel(LAYER)
        ax.set_xticks(layer_ticks(int(results["target"].max())))
    methods = [
        Line2D([], [], color=look.colour, marker=look.marker, label=method)
        for method, look in _METHODS.items()
    ]
    numbers = [Line2D([], [], color=DARK, ls=style, label=f"k = {k}") for k, style in styles.items()]
    add_legend(figure, [*methods, *numbers], columns=5)
    figure.suptitle(title_of(results))
    return figure


@checked
@styled
def relative_depth(results: pd.DataFrame) -> Figure:
    """Precision@1 and surprisal of several models on one axis of relative depth (paper A, Figures 7, 8)."""
    figure = Figure(figsize=(9.4, 4))
    axes = figure.subplots(1, 2)
    models = list(results["model"].unique())
    for (model, method), part in results.groupby(["model", "method"], sort=False):
        look = _METHODS[str(method)]._replace(line=STYLES[models.index(model) % len(STYLES)])
        part = part.assign(layer=part["layer"] / part["target"])
        draw_both(axes, part, look, literal(f"{method}, {short_name(str(model))}"))
    precision_axis(axes[0])
    surprisal_axis(axes[1])
    for ax in axes:
        ax.set_xlabel(r"relative depth $\ell / L$")
    add_legend(figure, columns=3)
    corpora = ", ".join(short_name(corpus) for corpus in results["corpus"].unique())
    figure.suptitle(model_title(corpora, n=examples_of(results)))
    return figure


@checked
@styled
def across_corpora(results: pd.DataFrame) -> Figure:
    """Precision@1 of maps fitted on each corpus and tested on each (paper A, section 5.2).

    Maps of the corpus that they are tested on are solid, and others dashed.
    """
    corpora = list(results["corpus"].unique())
    figure = Figure(figsize=(4.7 * len(corpora), 3.9))
    looks = method_looks(results["method"])
    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, label=_short_maps(method))
        for method, look in looks.items()
    ]
    for ax, corpus in zip(
        figure.subplots(1, len(corpora), squeeze=False, sharey=True)[0], corpora, strict=True
    ):
        rows = results[(results["corpus"] == corpus) & (results["k"] == 1)]
        for method, part in rows.groupby("method", sort=False):
            style = SOLID if method == f"mat of {corpus}" else STYLES[1]
            draw_line(ax, part, looks[str(method)]._replace(line=style), _short_maps(str(method)))
        ax.set_title(literal(f"tested on {short_name(corpus)}"))
        ax.set_xlabel(LAYER)
        ax.set_xticks(layer_ticks(int(rows["layer"].max())))
        precision_axis(ax)
        ax.label_outer()
    handles += [
        Line2D([], [], color=DARK, ls=style, label=label)
        for style, label in ((SOLID, "tested on their own corpus"), (STYLES[1], "on another"))
    ]
    add_legend(figure, handles)
    figure.suptitle(model_title(results.iloc[0]["model"], n=examples_of(results)))
    return figure


def _short_maps(method: str) -> str:
    return literal(f"mat of {short_name(method.removeprefix('mat of '))}")


@checked
@styled
def token_table(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Top tokens of each prompt, a column for each method and layer (paper A, Table 1)."""
    columns = max(len(table.columns) for table in tables.values())
    rows = sum(len(table) + 2.5 for table in tables.values())
    figure = Figure(figsize=(1.15 * columns + 0.4, 0.22 * rows))
    heights = [len(table) + 1 for table in tables.values()]
    axes = figure.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (prompt, table) in zip(axes, tables.items(), strict=True):
        ax.set_axis_off()
        ax.set_title(f"Input: {literal(prompt, 'italic')}", fontsize=8, loc="left", style="italic", wrap=True)
        cells = [[literal(str(token)) for token in line] for line in table.to_numpy()]
        grid = ax.table(
            cells, colLabels=list(table.columns), bbox=(0, 0, 1, 1), cellLoc="left", colLoc="left",
            edges="horizontal",
        )  # fmt: skip
        grid.auto_set_font_size(False)
        grid.set_fontsize(7.5)
        for (line, _), cell in grid.get_celld().items():
            cell.set_linewidth(0.6 if line == 0 else 0)
            if line == 0:
                cell.set_text_props(weight="bold")
    return figure
