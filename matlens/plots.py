"""Figures from the tables; nothing is computed here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from matlens.artifacts import system_errors
from matlens.evaluation import to_tensor

_COLOURS = {"mat": "#1f5fa8", "id": "#c8553d"}
_MARKERS = {"mat": "o", "id": "s"}


def r2_heatmaps(results: pd.DataFrame) -> Figure:
    """r2 of ``mat`` and ``id`` for all pairs of layers, on one colour scale (paper A, Figures 2 and 3).

    Blue is better than the mean of the target, red is worse; below -1 the red does not deepen.
    """
    figure = Figure(figsize=(9.4, 4.1), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    image = None
    for ax, method in zip(axes, ("mat", "id"), strict=True):
        grid = to_tensor(results, method).numpy()
        image = ax.imshow(grid.T, origin="lower", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
        ax.set_title(rf"$\mathtt{{{method}}}_{{\ell \to \ell'}}$")
        ax.set_xlabel(r"source layer $\ell$")
        ticks = _layer_ticks(len(grid) - 1)
        ax.set_xticks(ticks)
        ax.set_yticks(ticks)
    axes[0].set_ylabel(r"target layer $\ell'$")
    if image is not None:
        bar = figure.colorbar(image, ax=axes, extend="min", shrink=0.9)
        bar.set_label(r"$r^2$, averaged over coordinates")
    return _titled(figure, results)


def prediction(results: pd.DataFrame) -> Figure:
    """Precision@k and surprisal of every layer for ``mat`` and ``id`` (paper A, Figure 4), with intervals."""
    figure = Figure(figsize=(9.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = {1: "-", 5: "--", 10: ":"}
    for method in _COLOURS:
        own = results[results["method"] == method]
        for k, style in styles.items():
            part = own[(own["metric"] == "precision") & (own["k"] == k)]
            _line(left, part, method, rf"$\mathtt{{{method}}}$, $k={k}$", style)
        _line(right, own[own["metric"] == "surprisal"], method, rf"$\mathtt{{{method}}}$", "-")
    left.set_ylabel("Precision@$k$")
    left.set_ylim(0, 1.02)
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.set_ylabel("Surprisal (nats)")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        ax.set_xlabel(r"layer $\ell$")
        ax.set_xticks(_layer_ticks(int(results["target"].max())))
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8)
    return _titled(figure, results)


def save(figure: Figure, folder: str | Path, name: str) -> list[Path]:
    """Write a figure as ``name.png`` and ``name.pdf``; returns both paths."""
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


def _line(ax: Axes, part: pd.DataFrame, method: str, label: str, style: str) -> None:
    part = part.sort_values("layer")
    colour = _COLOURS[method]
    ax.plot(
        part["layer"], part["value"], style, color=colour, label=label, lw=1.4,
        marker=_MARKERS[method], ms=2.8,
    )  # fmt: skip
    ax.fill_between(part["layer"], part["low"], part["high"], color=colour, alpha=0.12, lw=0)


def _layer_ticks(last: int) -> list[int]:
    """Round layers, and the last one whatever it is."""
    ticks = [int(t) for t in MaxNLocator(nbins=7, integer=True).tick_values(0, last) if 0 <= t <= last]
    gap = np.diff(ticks).min() if len(ticks) > 1 else 1
    return [*(t for t in ticks if last - t >= gap / 2), last]


def _titled(figure: Figure, results: pd.DataFrame) -> Figure:
    first = results.iloc[0]
    figure.suptitle(f"{first['model']}, {first['corpus']}, n = {first['n']:,}", fontsize=10)
    return figure
