"""Figures about saturation and elimination, from the tables; nothing is computed here."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from matlens.plots.layers import layer_ticks

_SUMMARIES = {"max": "#1f5fa8", "mean": "#555555", "min": "#c8553d"}
_LINES = tuple(
    (method, event) for method in ("dominant", "random") for event in ("saturation", "elimination")
)
_KINDS = {
    "saturation": ("predicted token, where it is made", "#1f5fa8"),
    "stays": ("candidate that stays", "#999999"),
    "falls": ("candidate that falls", "#c8553d"),
}
_READS = {"score": "score", "lift": "score above the vocabulary's mean", "odds": "log-odds against the rival"}
_FEW = 10  # updates; a mean of fewer is not drawn
_BY = {"ffn": "#1f5fa8", "attention": "#e0a458"}


def events_figure(results: pd.DataFrame) -> Figure:
    """Maximal, mean and minimal scores at events, a panel for each reading and choice of examples (Table 4).

    Parameters
    ----------
    results
        Of `event_scores`, with the columns ``read`` and ``examples`` beside.
    """
    examples, reads = list(results["examples"].unique()), list(results["read"].unique())
    figure = Figure(figsize=(3.6 * len(reads) + 1.4, 1.7 * len(examples) + 1), layout="constrained")
    panels = figure.subplots(len(examples), len(reads), squeeze=False, sharey=True)
    for i, chosen in enumerate(examples):
        for j, read in enumerate(reads):
            part = results[(results["examples"] == chosen) & (results["read"] == read)]
            _events(panels[i, j], part)
            panels[i, j].set_title(f"{_READS[read]}, {chosen}", fontsize=8.5)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    _title(figure, results)
    return figure


def _events(ax: Axes, part: pd.DataFrame) -> None:
    by_line = part.set_index(["method", "event"]).sort_index()
    for metric, colour in _SUMMARIES.items():
        own = by_line[by_line["metric"] == metric].loc[list(_LINES)]
        errors = [own["value"] - own["low"], own["high"] - own["value"]]
        places = range(len(own))
        ax.errorbar(own["value"], places, xerr=errors, fmt="o", ms=4, color=colour, label=metric, lw=1)
    ax.set_yticks(range(len(_LINES)), [f"{event}, {method}" for method, event in _LINES], fontsize=8)
    ax.set_ylim(len(_LINES) - 0.5, -0.5)
    ax.set_xscale("symlog", linthresh=1)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.tick_params(axis="x", labelsize=8)
    ax.axvline(0, color="#999999", lw=0.8)
    _plain(ax)


def layers_figure(results: pd.DataFrame) -> Figure:
    """Scores of the top candidate over layers, and the maximum by what an update does (Figure 3).

    A panel for each choice of examples has the mean over the examples with a band from the 5th to the 95th
    percentile. The last panel is of the last choice; a layer with fewer than ten updates of a kind has no
    point there.

    Parameters
    ----------
    results
        Of `update_scores` for one reading, with the column ``examples`` beside.
    """
    examples = list(results["examples"].unique())
    figure = Figure(figsize=(4.2 * (len(examples) + 1), 4.1), layout="constrained")
    *panels, last = figure.subplots(1, len(examples) + 1)
    for ax, chosen in zip(panels, examples, strict=True):
        part = results[(results["examples"] == chosen) & (results["event"] == "update")]
        _summaries(ax, part)
        ax.set_title(f"top candidate, {chosen}, n = {part['n'].iloc[0]:,}", fontsize=9)
    few = results["n"] < _FEW
    # Layers without a point break the line.
    for event, (label, colour) in _KINDS.items():
        part = results[(results["examples"] == examples[-1]) & (results["event"] == event) & ~few]
        line = _line(part, "dominant", "max").set_index("layer").reindex(range(results["layer"].max() + 1))
        last.plot(line.index, line["value"], color=colour, lw=1.5, marker="o", ms=2.6, label=label)
        last.fill_between(line.index, line["low"], line["high"], color=colour, alpha=0.13, lw=0)
    last.set_title(f"max of dominant, {examples[-1]}", fontsize=9)
    last.legend(frameon=False, fontsize=7.5)
    for ax in (*panels, last):
        ax.set_yscale("symlog", linthresh=1)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.axhline(0, color="#999999", lw=0.8)
        ax.set_xlabel("layer")
        ax.set_xticks(layer_ticks(int(results["layer"].max())))
        _plain(ax)
    last.set_ylim(bottom=0)
    panels[0].set_ylabel(_READS[results["read"].iloc[0]])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=5, frameon=False, fontsize=8)
    _title(figure, results)
    return figure


def _summaries(ax: Axes, part: pd.DataFrame) -> None:
    for metric, colour in _SUMMARIES.items():
        line = _line(part, "dominant", metric)
        low, high = (_line(part, "dominant", f"{metric}_{p}")["value"] for p in ("p05", "p95"))
        ax.plot(line["layer"], line["value"], color=colour, lw=1.5, label=f"{metric} of dominant")
        ax.fill_between(line["layer"], low, high, color=colour, alpha=0.13, lw=0)
    for metric in ("max", "min"):
        line, colour = _line(part, "random", metric), _SUMMARIES[metric]
        ax.plot(line["layer"], line["value"], color=colour, lw=1, ls=":", label=f"{metric} of random")


def saturation_figure(results: pd.DataFrame) -> Figure:
    """Where predictions are made, by FFNs and by attention (Tables 9 and 10).

    Parameters
    ----------
    results
        Of `saturation_frequency`.
    """
    figure = Figure(figsize=(6.2, 3.4), layout="constrained")
    ax = figure.subplots()
    below: pd.Series | float = 0.0
    for method, colour in _BY.items():
        line = _line(results, method, "share").set_index("layer")["value"]
        ax.bar(line.index, line, bottom=below, color=colour, label=f"by {method}")
        below = below + line
    ax.set_xlabel("layer")
    ax.set_ylabel("share of predictions made")
    ax.set_xticks(layer_ticks(int(results["layer"].max())))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.legend(frameon=False, fontsize=8, title=f"n = {results['n'].iloc[0]:,}", title_fontsize=8)
    _plain(ax)
    _title(figure, results)
    return figure


def _line(results: pd.DataFrame, method: str, metric: str) -> pd.DataFrame:
    own = results[(results["method"] == method) & (results["metric"] == metric)]
    return own.sort_values("layer")


def _plain(ax: Axes) -> None:
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _title(figure: Figure, results: pd.DataFrame) -> None:
    first = results.iloc[0]
    figure.suptitle(f"{Path(first['model']).name}, {first['corpus']}", fontsize=10)
