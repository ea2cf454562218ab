"""Figures from the tables; nothing is computed here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator, PercentFormatter

from matlens.lens.quality import r2_matrix
from matlens.storage.folders import system_errors

_COLOURS = {"mat": "#1f5fa8", "id": "#c8553d"}
_MARKERS = {"mat": "o", "id": "s"}
_STYLES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 4)))
_CYCLE = ("#1f5fa8", "#c8553d", "#3f8f5f", "#8a5fb0", "#c79a2a", "#4aa3b5", "#7a7a7a")


def r2_heatmaps(results: pd.DataFrame) -> Figure:
    """r2 of ``mat`` and ``id`` for all pairs of layers, on one colour scale (paper A, Figures 2 and 3).

    Blue is better than the mean of the target, red is worse; below -1 the red does not deepen.
    """
    figure = Figure(figsize=(9.4, 4.1), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    image = None
    for ax, method in zip(axes, ("mat", "id"), strict=True):
        grid = r2_matrix(results, method).numpy()
        image = ax.imshow(grid.T, origin="lower", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
        ax.set_title(rf"$\mathtt{{{method}}}_{{\ell \to \ell'}}$")
        ax.set_xlabel(r"source layer $\ell$")
        ticks = layer_ticks(len(grid) - 1)
        ax.set_xticks(ticks)
        ax.set_yticks(ticks)
    axes[0].set_ylabel(r"target layer $\ell'$")
    if image is not None:
        bar = figure.colorbar(image, ax=axes, extend="min", shrink=0.9)
        bar.set_label(r"$r^2$, averaged over coordinates")
    return _titled(figure, results)


def prediction(results: pd.DataFrame) -> Figure:
    """Precision@k and surprisal of every layer for ``mat`` and ``id`` (paper A, Figure 4), with intervals."""
    figure, (left, right) = _axes(2)
    styles = {1: "-", 5: "--", 10: ":"}
    for method, colour in _COLOURS.items():
        own = results[results["method"] == method]
        for k, style in styles.items():
            part = own[(own["metric"] == "precision") & (own["k"] == k)]
            _line(left, part, colour, rf"$\mathtt{{{method}}}$, $k={k}$", style)
        _line(right, own[own["metric"] == "surprisal"], colour, rf"$\mathtt{{{method}}}$")
    _precision_axis(left, "Precision@$k$")
    _surprisal_axis(right)
    for ax in (left, right):
        ax.set_xlabel(r"layer $\ell$")
        ax.set_xticks(layer_ticks(int(results["target"].max())))
        ax.legend(frameon=False, fontsize=8)
    return _titled(figure, results)


def alternation(results: pd.DataFrame) -> Figure:
    """Precision@1 of every scheme against the number of blocks that it runs (paper A, Figure 6)."""
    figure, (ax,) = _axes(1, width=6.2, height=4.2)
    for method, colour, marker in (("WRR, blocks first", "#8fb7a3", "o"), ("WRR, mat first", "#c9b458", "D")):
        part = results[results["method"] == method]
        ax.plot(part["layer"], part["value"], marker, color=colour, ms=3.5, alpha=0.8, label=method)
    for method, colour in (("R2", "#5b3a8c"), ("mat", _COLOURS["mat"]), ("id", _COLOURS["id"])):
        label = method if method == "R2" else rf"$\mathtt{{{method}}}$, fixed exit"
        _line(ax, results[results["method"] == method], colour, label)
    ax.set_xlabel("blocks run")
    _precision_axis(ax)
    ax.legend(frameon=False, fontsize=8)
    return _titled(figure, results)


def relative_depth(results: pd.DataFrame) -> Figure:
    """Precision@1 and surprisal of several models on one axis of relative depth (paper A, Figures 7, 8)."""
    figure, axes = _axes(2)
    shades = dict(zip(results["model"].unique(), itertools.cycle(_STYLES), strict=False))
    for (model, method), own in results.groupby(["model", "method"], sort=False):
        own = own.assign(layer=own["layer"] / own["target"])
        label, style = rf"$\mathtt{{{method}}}$, {Path(str(model)).name}", shades.get(str(model), "-")
        _both(axes, own, _COLOURS[str(method)], label, style)
    _both_axes(axes, r"relative depth $\ell / L$")
    corpora = ", ".join(results["corpus"].unique())
    figure.suptitle(f"{corpora}, n = {results['n'].min():,}", fontsize=10)
    return figure


def across_corpora(results: pd.DataFrame) -> Figure:
    """Precision@1 of maps fitted on each corpus and tested on each (paper A, section 5.2)."""
    tested = list(results["corpus"].unique())
    figure, axes = _axes(len(tested), width=4.7 * len(tested))
    for ax, corpus in zip(axes, tested, strict=True):
        own = results[(results["corpus"] == corpus) & (results["k"] == 1)]
        for (method, part), colour in zip(own.groupby("method", sort=False), _CYCLE, strict=False):
            _line(ax, part, colour, str(method), "-" if method == f"mat of {corpus}" else "--")
        ax.set_title(f"tested on {corpus}", fontsize=9)
        ax.set_xlabel(r"layer $\ell$")
        _precision_axis(ax)
        ax.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{Path(results.iloc[0]['model']).name}, n = {results['n'].min():,}", fontsize=10)
    return figure


def early_exit(results: pd.DataFrame) -> Figure:
    """Precision@1 against the mean number of layers run, by early and by fixed exit (paper A, Figure 9)."""
    figure, (ax,) = _axes(1, width=5.6, height=4)
    for method, colour in _COLOURS.items():
        own = results[results["method"] == method]
        name = rf"$\mathtt{{{method}}}$"
        _line(ax, own[own["lam"].notna()], colour, f"{name}, early exit")
        _line(ax, own[own["lam"].isna()], colour, f"{name}, fixed exit", ":")
    ax.axhline(0.95, color="0.6", lw=0.8, zorder=0)
    ax.set_xlabel("mean number of layers run")
    _precision_axis(ax)
    ax.legend(frameon=False, fontsize=8)
    return _titled(figure, results)


def by_method(results: pd.DataFrame) -> Figure:
    """Precision@1 and surprisal over layers, a line for each method (paper A, Figure 10)."""
    figure, axes = _axes(2, width=10)
    methods = results["method"].unique()
    for i, method in enumerate(methods):
        rounds, turn = divmod(i, len(_CYCLE))
        own = results[results["method"] == method]
        _both(axes, own, _CYCLE[turn], str(method), _STYLES[rounds % len(_STYLES)])
    _both_axes(axes, r"layer $\ell$")
    legend = axes[0].get_legend()
    if legend and len(methods) > len(_CYCLE):  # too many names to lie on the curves
        legend.remove()
        named = axes[0].get_legend_handles_labels()
        figure.legend(*named, loc="outside right center", frameon=False, fontsize=7.5)
        figure.set_figwidth(13)
    return _titled(figure, results)


def token_table(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Top tokens of each prompt, a column for each method and layer (paper A, Table 1)."""
    columns = max(len(table.columns) for table in tables.values())
    rows = sum(len(table) + 3 for table in tables.values())
    figure = Figure(figsize=(1.25 * columns + 0.4, 0.24 * rows), layout="constrained")
    axes = figure.subplots(len(tables), 1, squeeze=False)[:, 0]
    for ax, (prompt, table) in zip(axes, tables.items(), strict=True):
        ax.set_axis_off()
        ax.set_title(f"Input: {literal(prompt, 'italic')}", fontsize=8, loc="left", style="italic", wrap=True)
        cells = [[literal(str(token)) for token in line] for line in table.to_numpy()]
        drawn = ax.table(
            cells, colLabels=list(table.columns), loc="center", cellLoc="left", edges="horizontal"
        )
        drawn.auto_set_font_size(False)
        drawn.set_fontsize(7.5)
        for (line, _), cell in drawn.get_celld().items():
            cell.set_linewidth(0.4 if line == 0 else 0)
            if line == 0:
                cell.set_text_props(weight="bold")
    return figure


def literal(text: str, style: Literal["normal", "italic"] = "normal") -> str:
    """Write text that is no formula; what the font cannot draw is told by its code point."""
    font = get_font(findfont(FontProperties(style=style)))
    drawn = (c if font.get_char_index(ord(c)) or c == "\n" else f"\\u{ord(c):04x}" for c in text)
    return "".join(drawn).replace("$", r"\$")


def _axes(count: int, *, width: float = 9.4, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _both(axes: Sequence[Axes], own: pd.DataFrame, colour: str, label: str, style: Any = "-") -> None:
    """Precision@1 on the left and surprisal on the right."""
    left, right = axes
    _line(left, own[(own["metric"] == "precision") & (own["k"] == 1)], colour, label, style)
    _line(right, own[own["metric"] == "surprisal"], colour, label, style)


def _both_axes(axes: Sequence[Axes], label: str) -> None:
    """Limits once all curves are there: set before, they keep later ones from being seen whole."""
    _precision_axis(axes[0])
    _surprisal_axis(axes[1])
    axes[0].legend(frameon=False, fontsize=8)
    for ax in axes:
        ax.set_xlabel(label)


def _precision_axis(ax: Axes, label: str = "Precision@1") -> None:
    ax.set_ylabel(label)
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def _surprisal_axis(ax: Axes) -> None:
    ax.set_ylabel("Surprisal (nats)")
    ax.set_ylim(bottom=0)


def save(figure: Figure, folder: str | Path, name: str, *, title: str | None = None) -> list[Path]:
    """Write a figure as ``name.png`` and ``name.pdf``; returns both paths."""
    if title is not None:
        figure.suptitle(title)
    paths = [Path(folder) / f"{name}.{suffix}" for suffix in ("png", "pdf")]
    with system_errors(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path in paths:
            partial = path.with_name(f".{path.name}")
            try:
                figure.savefig(partial, format=path.suffix[1:], dpi=200)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
    return paths


def _line(ax: Axes, part: pd.DataFrame, colour: str, label: str, style: Any = "-") -> None:
    part = part.sort_values("layer")
    marker = _MARKERS.get(str(part["method"].iloc[0]), "o") if len(part) else "o"
    ax.plot(
        part["layer"],
        part["value"],
        linestyle=style,
        color=colour,
        label=label,
        lw=1.4,
        marker=marker,
        ms=2.6,
    )
    ax.fill_between(part["layer"], part["low"], part["high"], color=colour, alpha=0.12, lw=0)


def layer_ticks(last: int) -> list[int]:
    """Round layers, and the last one whatever it is."""
    ticks = [int(t) for t in MaxNLocator(nbins=7, integer=True).tick_values(0, last) if 0 <= t <= last]
    gap = np.diff(ticks).min() if len(ticks) > 1 else 1
    return [*(t for t in ticks if last - t >= gap / 2), last]


def _titled(figure: Figure, results: pd.DataFrame) -> Figure:
    first = results.iloc[0]
    figure.suptitle(f"{first['model']}, {first['corpus']}, n = {first['n']:,}", fontsize=10)
    return figure
