"""Figures about control, from the tables; nothing is computed here."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, ScalarFormatter

_MANY = ("#333333", "#1f5fa8", "#3f8f5f", "#4aa3b5", "#8a5fb0", "#c8553d", "#c79a2a")


def toxicity_against_perplexity(results: pd.DataFrame) -> Figure:
    """Share of toxic continuations against perplexity (paper B, Table 5).

    Control is a line over its coefficients, a baseline a point, and a method without perplexity a level.

    Parameters
    ----------
    results
        Rows of one attribute with the metrics ``toxic`` and ``perplexity``, and a column ``coefficient``,
        which is empty for what is no control.
    """
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    ax = figure.subplots()
    keys = ["method", "coefficient"]
    wide = (
        results.set_index([*keys, "metric"])["value"]
        .unstack("metric")
        .reindex(columns=["toxic", "perplexity"])
    )
    bounds = results[results["metric"] == "toxic"].set_index(keys)[["low", "high"]]
    points = wide.join(bounds).reset_index()
    for (method, part), colour in zip(_in_order(points, results), _MANY, strict=False):
        if part["perplexity"].isna().all():
            ax.axhline(part["toxic"].iloc[0], color=colour, ls="--", lw=1.2, label=method)
            continue
        part = part.sort_values("coefficient")
        bars = [part["toxic"] - part["low"], part["high"] - part["toxic"]]
        ax.errorbar(
            part["perplexity"], part["toxic"], yerr=bars, fmt="o-", label=method, color=colour, lw=1.2, ms=5,
            capsize=2, elinewidth=0.7,
        )  # fmt: skip
        for point in part[part["coefficient"].notna()].itertuples():
            ax.annotate(
                f"{point.coefficient:g}", (point.perplexity, point.toxic), textcoords="offset points",
                xytext=(4, 4), fontsize=7, color=colour,
            )  # fmt: skip
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("perplexity")
    ax.set_ylabel("toxic continuations")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    names = [str(name) for name in results["method"].unique()]
    ax.legend([handles[name] for name in names], names, frameon=False, fontsize=8)
    first = results[results["metric"] == "toxic"].iloc[0]
    figure.suptitle(f"{Path(first['model']).name}, {first['corpus']}, {first['n']:,} prompts", fontsize=10)
    return figure


def _in_order(points: pd.DataFrame, results: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(name), points[points["method"] == name]) for name in results["method"].unique()]
