"""What layers tell through linear maps: quality of fit, predictions, top tokens, trajectories of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from matlens.errors import InputError, check_choice
from matlens.models.tokens import visible
from matlens.plots.colours import ID, MAT, SOLID, STYLES, Look, ink, method_looks
from matlens.plots.lines import (
    draw_both,
    draw_line,
    draw_methods,
    line_key,
    mark_infinite,
    precision_axis,
    surprisal_axis,
)
from matlens.plots.style import (
    examples_of,
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

_METHODS = {"mat": MAT, "id": ID}
_MOST_TOKENS = 60  # tokens side by side; more cannot be read
_LONGEST_TOKEN = 9  # characters of a token in a cell


class _Cells(NamedTuple):
    """How a quantity is shown: the map of colours, dark where it is sure, and its words."""

    colours: str
    words: str


_COLOURS = {
    "probability": _Cells("Blues", "probability of the token"),
    "kl": _Cells("Blues_r", "KL from the model's own distribution (nats)"),
    "rank": _Cells("Blues_r", "rank of the model's own prediction"),
    "entropy": _Cells("Blues_r", "entropy (nats)"),
}


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
        layer_axis(ax, len(grid) - 1, r"source layer $\ell$")
        ax.set_yticks(ax.get_xticks())
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
        layer_axis(ax, results["target"].max())
    keys = [line_key(method, look.colour, marker=look.marker) for method, look in _METHODS.items()]
    keys += [line_key(f"k = {k}", ls=style) for k, style in styles.items()]
    return finish(figure, title_of(results), keys, columns=5)


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
    corpora = ", ".join(short_name(corpus) for corpus in results["corpus"].unique())
    return finish(figure, model_title(corpora, n=examples_of(results)), columns=3)


@styled
def across_corpora(results: pd.DataFrame) -> Figure:
    """Precision@1 of maps fitted on each corpus and tested on each (paper A, section 5.2).

    Maps of the corpus that they are tested on are solid, and others dashed.
    """
    corpora = list(results["corpus"].unique())
    figure = Figure(figsize=(4.7 * len(corpora), 3.9))
    looks = method_looks(results["method"])
    panels = figure.subplots(1, len(corpora), squeeze=False, sharey=True)[0]
    for ax, corpus in zip(panels, corpora, strict=True):
        rows = results[(results["corpus"] == corpus) & (results["k"] == 1)]
        for method, part in rows.groupby("method", sort=False):
            style = SOLID if method == f"mat of {corpus}" else STYLES[1]
            draw_line(ax, part, looks[str(method)]._replace(line=style), _short_maps(str(method)))
        ax.set_title(literal(f"tested on {short_name(corpus)}"))
        layer_axis(ax, rows["layer"].max())
        precision_axis(ax)
        ax.label_outer()
    keys = [line_key(_short_maps(name), look.colour, marker=look.marker) for name, look in looks.items()]
    keys += [line_key("tested on their own corpus"), line_key("on another", ls=STYLES[1])]
    return finish(figure, model_title(results.iloc[0]["model"], n=examples_of(results)), keys)


def _short_maps(method: str) -> str:
    return literal(f"mat of {short_name(method.removeprefix('mat of '))}")


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


_MEASURES = {
    ("precision", 1): "Precision@1",
    ("precision", 10): "Precision@10",
    ("surprisal", None): "surprisal (nats)",
    ("kl", None): "KL from the model (nats)",
}


@styled
def lens_measures(results: pd.DataFrame) -> Figure:
    """Four measures of each lens over layers, with 95% intervals, and the time that its fit takes.

    Surprisal and KL have a logarithmic axis where the worst lens would press the others together.

    Parameters
    ----------
    results
        The table of `matlens.lens.report_table`.
    """
    plain = results[results["against"].fillna("") == ""].astype({"low": float, "high": float})
    looks = method_looks(plain["method"])
    figure = Figure(figsize=(10.4, 7.0))
    panels = figure.subplot_mosaic([[0, 1, "cost"], [2, 3, "cost"]], width_ratios=[1, 1, 0.6])
    for number, ((metric, k), label) in enumerate(_MEASURES.items()):
        ax = panels[number]
        rows = plain[(plain["metric"] == metric) & (plain["k"].isna() if k is None else plain["k"] == k)]
        draw_methods(ax, rows, looks)
        ax.set_ylabel(label)
        layer_axis(ax, results["target"].max())
        if metric == "precision":
            percent_ticks(ax.yaxis)
        else:
            _spread_axis(ax, rows["value"].to_numpy(dtype=float))
            mark_infinite(ax)
    _draw_costs(panels["cost"], plain[plain["metric"] == "seconds"].set_index("method")["value"], looks)
    return finish(figure, title_of(plain[plain["metric"] == "kl"]), columns=5)


def _spread_axis(ax: Axes, values: np.ndarray) -> None:
    """Make an axis logarithmic if values differ by a factor of five, and label 1, 2, 5, 10 and so on."""
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() >= 5 * finite.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())


def _draw_costs(ax: Axes, seconds: pd.Series, looks: Mapping[str, Look]) -> None:
    """A bar for each lens, with its seconds at the end."""
    names = list(looks)
    values = seconds[names].astype(float)
    bars = ax.barh(range(len(names)), values, color=[looks[name].colour for name in names])
    ax.bar_label(bars, [f"{v:,.0f}" if v >= 10 else f"{v:.2g}" for v in values], padding=3, fontsize=7)
    ax.margins(x=0.2, y=0.02)
    ax.grid(False)
    ax.set_yticks(range(len(names)), [literal(name) for name in names])
    ax.invert_yaxis()
    ax.set_xlabel("CPU seconds per layer")


@styled
def lens_cosines(results: pd.DataFrame) -> Figure:
    """Cosine of two lenses' matrices at each layer, and of two halves of the data (definitions, section 9).

    Parameters
    ----------
    results
        The table of `matlens.lens.cosine_table`.
    """
    figure = Figure(figsize=(5.6, 4.0))
    ax = figure.subplots()
    draw_methods(ax, results.astype({"low": float, "high": float}), method_looks(results["method"]))
    ax.set_ylim(min(0.0, float(results["value"].min()) - 0.05), 1.02)
    ax.set_ylabel("cosine of matrices")
    layer_axis(ax, results["target"].max())
    return finish(figure, model_title(results.iloc[0]["model"], results.iloc[0]["corpus"]), columns=2)


@styled
def trajectory_figure(
    table: pd.DataFrame, *, colour: str = "probability", title: str | None = None
) -> Figure:
    """A cell for each token of a prompt and each layer, with the token predicted there.

    Dark is sure: probable, near to the model's own distribution, of low rank or entropy.

    Parameters
    ----------
    table
        What `Trajectory.to_dataframe` gives, or rows of some positions or layers of it.
    colour
        What colours the cells: ``"probability"``, ``"kl"``, ``"rank"`` or ``"entropy"``.
    title
        Title of the figure.

    Raises
    ------
    InputError
        It is no such table, or has more tokens than can be read side by side.
    """
    check_choice(colour, _COLOURS, "colour")
    grid = table.pivot(index="layer", columns="position", values=colour)
    words = table.pivot(index="layer", columns="position", values="predicted").reindex_like(grid)
    if grid.shape[1] > _MOST_TOKENS:
        raise InputError(
            f"The prompt has {grid.shape[1]} tokens, more than the {_MOST_TOKENS} that can be read side "
            "by side. Expected rows of fewer, such as table[table['position'] >= 40]."
        )
    tokens = table.drop_duplicates("position").set_index("position")["token"].reindex(grid.columns)
    layers, n = list(grid.index), grid.shape[1]
    figure = Figure(figsize=(max(3.2, 0.62 * n + 1.9), 0.19 * len(layers) + 1.5))
    ax = figure.subplots()
    values = grid.to_numpy(dtype=float)
    norm = _cell_norm(colour, values)
    image = ax.imshow(values, origin="lower", aspect="auto", cmap=_COLOURS[colour].colours, norm=norm)
    ax.grid(False)
    for row, column in np.ndindex(values.shape):
        text = literal(_short_token(str(words.iat[row, column])))
        colour_of_text = ink(image, float(values[row, column]))
        ax.text(column, row, text, ha="center", va="center", fontsize=6, color=colour_of_text)
    ax.set_xticks(range(n), [literal(_short_token(str(token))) for token in tokens], rotation=45, ha="right")
    ticks = [tick for tick in layer_ticks(layers[-1]) if tick in layers]
    ax.set_yticks([layers.index(tick) for tick in ticks], list(map(str, ticks)))
    ax.set_xlabel("token of the prompt")
    ax.set_ylabel(r"layer $\ell$")
    figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02).set_label(_COLOURS[colour].words)
    if title is not None:
        figure.suptitle(literal(title))
    return figure


def _cell_norm(colour: str, values: np.ndarray) -> Any:
    if colour == "probability":
        return Normalize(0, 1)
    if colour == "rank":
        return LogNorm(1, max(10.0, float(values.max())))
    return Normalize(0, max(float(values[np.isfinite(values)].max(initial=0)), 1e-9))


def _short_token(token: str) -> str:
    shown = visible(token)
    return shown if len(shown) <= _LONGEST_TOKEN else shown[: _LONGEST_TOKEN - 1] + "…"
