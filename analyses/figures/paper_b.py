"""Figures of paper B: value vectors, sub-updates, events, clusters, control and early exit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter, StrMethodFormatter

from figures.looks import CLASSES, LOWERED, OTHER, RAISED, SUMMARIES, UPDATES, error_bars
from matlens.drawing import (
    DOTTED,
    GREY,
    Look,
    draw_line,
    draw_methods,
    finish,
    layer_axis,
    line_key,
    literal,
    method_looks,
    percent_ticks,
    short_name,
    styled,
    title_of,
)

_VECTORS = {"values": "value vectors", "random": "random vectors", "shuffled": "tokens shuffled"}
_EVENTS = tuple(itertools.product(("dominant", "random"), ("saturation", "elimination")))
_UPDATES = {
    "saturation": "predicted token, at saturation",
    "stays": "candidate that stays",
    "falls": "candidate that falls",
}
_READS = {"score": "score", "lift": "score above the vocabulary's mean", "odds": "log-odds against the rival"}
_FEW = 10  # min updates for a mean to be plotted
_APART = 0.18  # between the points of two summaries


# Value vectors


@styled
def shares_by_layer(results: pd.DataFrame, label: str) -> Figure:
    """A share at every layer, a line for each method, with intervals (paper B, Figures 4 and 6)."""
    figure = Figure(figsize=(6.2, 3.8))
    ax = figure.subplots()
    for method, look in method_looks(results["method"]).items():
        part = results[results["method"] == method]
        draw_line(ax, part, look, literal(f"{method}, n = {part['n'].iloc[0]:,}"))
    ax.set_ylabel(label)
    ax.set_ylim(bottom=0)
    layer_axis(ax, results["layer"].max(), "layer")
    percent_ticks(ax.yaxis)
    named = ("model",) if results["corpus"].iloc[0] == "none" else ("model", "corpus")
    return finish(figure, title_of(results, *named))


@styled
def concept_shares(results: pd.DataFrame) -> Figure:
    """Share of top tokens in a concept by layer, stacked by class (paper B, Figure 2)."""
    kinds = list(results["method"].unique())
    figure = Figure(figsize=(7.2, 1.1 + 1.7 * len(kinds)))
    axes = figure.subplots(len(kinds), sharex=True, sharey=True, squeeze=False)[:, 0]
    by_layer = results.dropna(subset="layer").astype({"layer": int})
    for ax, kind in zip(axes, kinds, strict=True):
        part = by_layer[by_layer["method"] == kind].pivot(index="layer", columns="metric", values="value")
        _draw_stacked(ax, part.rename_axis(columns=None), CLASSES, width=0.8)
        overall = results[(results["method"] == kind) & results["layer"].isna()].set_index("metric")
        vectors = overall["n"].iloc[0]
        ax.set_title(f"{kind}, {overall['value']['covered']:.0%} of the tokens, n = {vectors}")
    layer_axis(axes[-1], by_layer["layer"].max(), "layer")
    figure.supylabel("share of top tokens in a concept", fontsize=9)
    return finish(figure, title_of(results, "model"))


def _draw_stacked(ax: Axes, shares: pd.DataFrame, colors: Mapping[str, str], **options: Any) -> None:
    """Stacked bars, one per layer."""
    tops = shares[list(colors)].cumsum(axis=1)
    for name, color in colors.items():
        bottom = tops[name] - shares[name]
        ax.bar(shares.index, shares[name], bottom=bottom, color=color, label=name, **options)
    percent_ticks(ax.yaxis)
    ax.grid(False, axis="x")


@styled
def pattern_sizes(results: pd.DataFrame, size: int) -> Figure:
    """Number of vectors by pattern size, and by layer for patterns of ``size`` words."""
    figure = Figure(figsize=(8.2, 3.7))
    left, right = figure.subplots(1, 2)
    patterns = results[results["metric"] == "pattern"]
    for method, look in method_looks(patterns["method"]).items():
        part = patterns[patterns["method"] == method]
        label = f"{_VECTORS.get(method, method)}, n = {part['n'].max():,}"
        draw_line(left, part[part["layer"].isna() & (part["value"] > 0)], look, label, "k")
        draw_line(right, part[(part["k"] == size) & part["layer"].notna()], look, label)
    if (patterns["value"] > 0).any():  # a log scale needs positive values
        left.set_yscale("log")
    left.set_xlabel("minimum words of the largest pattern")
    left.set_ylabel("share of vectors")
    percent_ticks(left.yaxis)
    right.set_ylabel(f"share with a pattern of {size} words or more")
    right.set_ylim(bottom=0)
    layer_axis(right, patterns["layer"].max(), "layer")
    percent_ticks(right.yaxis)
    return finish(figure, title_of(results, "model", "corpus"))


# Updates and events


@styled
def events_figure(results: pd.DataFrame) -> Figure:
    """Maximal, mean and minimal scores at events, by reading and choice of examples (Table 4)."""
    examples, reads = list(results["examples"].unique()), list(results["read"].unique())
    figure = Figure(figsize=(3.6 * len(reads) + 1.4, 1.9 * len(examples) + 1))
    panels = figure.subplots(len(examples), len(reads), squeeze=False, sharey=True)
    for ax, (chosen, read) in zip(panels.flat, itertools.product(examples, reads), strict=True):
        part = results[(results["examples"] == chosen) & (results["read"] == read)]
        for i, (metric, color) in enumerate(SUMMARIES.items()):
            rows = part[part["metric"] == metric].set_index(["method", "event"]).loc[list(_EVENTS)]
            ax.errorbar(
                rows["value"], np.arange(len(rows)) + (i - 1) * _APART, xerr=error_bars(rows), fmt="o", ms=4,
                color=color, label=metric, lw=1, capsize=0,
            )  # fmt: skip
        ax.set_yticks(range(len(_EVENTS)), [f"{event}, {method}" for method, event in _EVENTS])
        ax.set_ylim(len(_EVENTS) - 0.5, -0.5)
        ax.set_xscale("symlog", linthresh=1)
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.axvline(0, color=GREY, lw=0.8)
        ax.set_title(literal(f"{_READS[read]}, {chosen}"))
    return finish(figure, title_of(results, "model", "corpus"))


@styled
def layers_figure(results: pd.DataFrame) -> Figure:
    """Scores of the top candidate by layer, and the maximum by effect (Figure 3).

    A panel for each choice of examples has the mean over the examples with a band from the 5th to the 95th
    percentile. The last panel is for the last choice, without layers that have fewer than ten updates.
    """
    examples = list(results["examples"].unique())
    figure = Figure(figsize=(4.2 * (len(examples) + 1), 4.3))
    *panels, last = figure.subplots(1, len(examples) + 1)
    curves = results.set_index(["examples", "event", "method", "metric", "layer"]).sort_index()
    for ax, chosen in zip(panels, examples, strict=True):
        of_update = curves.loc[chosen, "update"]
        dominant, random = (of_update["value"][method] for method in ("dominant", "random"))
        for metric, color in SUMMARIES.items():
            ax.plot(dominant[metric], color=color, label=f"{metric} of dominant")
            low, high = (dominant[f"{metric}_{p}"] for p in ("p05", "p95"))
            ax.fill_between(low.index, low, high, color=color, alpha=0.13, lw=0)
        for metric in ("max", "min"):
            ax.plot(random[metric], color=SUMMARIES[metric], lw=1, ls=DOTTED, label=f"{metric} of random")
        ax.set_title(literal(f"top candidate, {chosen}, n = {of_update['n'].iloc[0]:,}"))
    layers = range(int(results["layer"].max()) + 1)
    for event, look in UPDATES.items():
        of_event = (results["examples"] == examples[-1]) & (results["event"] == event)
        of_max = (results["method"] == "dominant") & (results["metric"] == "max")
        curve = results[of_event & of_max & (results["n"] >= _FEW)].set_index("layer")
        curve = curve.reindex(layers)  # gaps break the line
        draw_line(last, curve.rename_axis("layer").reset_index(), look, _UPDATES[event])
    last.set_title(literal(f"max of dominant, {examples[-1]}"))
    for ax in (*panels, last):
        ax.set_yscale("symlog", linthresh=1)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.axhline(0, color=GREY, lw=0.8)
        layer_axis(ax, layers[-1], "layer")
    last.set_ylim(bottom=0)
    panels[0].set_ylabel(_READS[results["read"].iloc[0]])
    named = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    order = [f"{metric} of {method}" for metric in ("max", "min") for method in ("dominant", "random")]
    keys = [named[label] for label in (*order, "mean of dominant")]
    figure.legend(handles=last.get_legend_handles_labels()[0], loc="outside lower right", ncols=2)
    return finish(figure, title_of(results, "model", "corpus"), keys, columns=3, place="outside lower left")


@styled
def saturation_figure(results: pd.DataFrame) -> Figure:
    """Where predictions are made, by FFNs and by attention (Tables 9 and 10)."""
    figure = Figure(figsize=(6.2, 3.6))
    ax = figure.subplots()
    shares = results[results["metric"] == "share"].pivot(index="layer", columns="method", values="value")
    looks = method_looks(("ffn", "attention"))
    _draw_stacked(
        ax, shares.rename(columns="by {}".format), {f"by {m}": look.color for m, look in looks.items()}
    )
    layer_axis(ax, results["layer"].max(), "layer")
    ax.set_ylabel("share of predictions made")
    return finish(figure, title_of(results.head(1)))


@styled
def removal_figure(results: pd.DataFrame) -> Figure:
    """Agreement of readings of value vectors with the effect of their removal, by layer.

    Top: correlations; bottom: shares of common top tokens. Left: logits after the layer; right: final logits.
    """
    by_layer = results.dropna(subset="layer")
    effects, metrics = list(by_layer["effect"].unique()), ["correlation", "common"]
    figure = Figure(figsize=(4.1 * len(effects) + 0.4, 6))
    panels = figure.subplots(len(metrics), len(effects), squeeze=False, sharey="row", sharex=True)
    looks = method_looks(by_layer["method"])
    for ax, (metric, effect) in zip(panels.flat, itertools.product(metrics, effects), strict=True):
        draw_methods(ax, by_layer[(by_layer["metric"] == metric) & (by_layer["effect"] == effect)], looks)
        ax.axhline(0, color=GREY, lw=0.8)
    for above, below, effect in zip(*panels, effects, strict=True):
        above.set_title(literal(f"logits {effect}"))
        layer_axis(below, by_layer["layer"].max(), "layer")
    panels[0, 0].set_ylabel("correlation over the vocabulary")
    panels[1, 0].set_ylabel("share of top tokens in common")
    percent_ticks(panels[1, 0].yaxis)
    return finish(figure, title_of(results, "model", "corpus"))


# Clusters of extreme sub-updates

_AREA = 1400.0  # points squared of a cluster with all extreme sub-updates
_NAMED, _LONGEST = 8, 38  # clusters of each panel that are named, and characters of a name
_EXTREME = {
    RAISED: "extreme, mostly raising the candidate",
    LOWERED: "extreme, mostly lowering it",
    OTHER: "other clusters of dominant sub-updates",
}
_PANELS = {"score": "by score", "lift": "by score above the vocabulary's mean"}


@styled
def extremes_figure(clusters: pd.DataFrame, n: int) -> Figure:
    """Clusters of extreme sub-updates by layer and by frequency of the promoted tokens.

    A panel for each reading of scores. The area of a dot is the cluster's share of the extreme sub-updates;
    blue if most of them raise the top candidate, red if most lower it. Clusters of sampled sub-updates are
    grey. The largest are listed with their number, the sign of the coefficients, and the tokens they promote.
    """
    reads = list(clusters["read"].unique())
    figure = Figure(figsize=(5.9 * len(reads), 4.4))
    panels = figure.subplots(1, len(reads), sharey=True, squeeze=False)[0]
    last = int(clusters["last_layer"].max())
    clusters = clusters.assign(height=clusters["common"] - clusters["unseen"])
    for ax, read in zip(panels, reads, strict=True):
        of_updates = dict(list(clusters[clusters["read"] == read].groupby("sub_updates", sort=False)))
        sampled, extreme = of_updates["sampled"], of_updates["extreme"]
        ax.scatter(sampled["layer"], sampled["height"], s=5, color=OTHER, alpha=0.5, lw=0, rasterized=True)
        colors = np.where(extreme["raised"] >= 0.5, RAISED, LOWERED)
        areas = 4 + _AREA * extreme["share"]
        ax.scatter(extreme["layer"], extreme["height"], s=areas, color=colors, alpha=0.6, lw=0, clip_on=False)
        ax.axhline(0, color=GREY, lw=0.8)
        ax.set_ylim(-1.06, 1.06)
        ax.set_title(_PANELS[read])
        layer_axis(ax, last, "mean layer of the sub-updates")
        ax.set_xlim(-0.04 * last, 1.04 * last)
        _name_largest(ax, extreme)
    panels[0].set_ylabel("share of common minus share of unseen tokens")
    handles = [
        panels[0].scatter([], [], s=30, color=color, alpha=0.6, lw=0, label=label)
        for color, label in _EXTREME.items()
    ]
    return finish(figure, f"{title_of(clusters, 'model', 'corpus')}, n = {n:,}", handles)


def _name_largest(ax: Axes, extreme: pd.DataFrame) -> None:
    """Number the dots of the largest clusters, and name them in a list right of the panel."""
    for number, (x, y, cluster, sign, tokens) in enumerate(
        extreme[["layer", "height", "cluster", "sign", "tokens"]].head(_NAMED).to_numpy(), start=1
    ):
        ax.text(x, y, str(number), fontsize=6, ha="center", va="center")
        name = f"{number}  {cluster}{'+' if sign > 0 else '−'}  {' · '.join(tokens.split(', ')[:3])}"
        place = (1.03, 1.0 - (number - 0.5) / _NAMED)
        ax.text(*place, literal(name[:_LONGEST]), transform=ax.transAxes, fontsize=7, va="center")


# Control and early exit


@styled
def toxicity_against_perplexity(results: pd.DataFrame) -> Figure:
    """Toxic share against perplexity, one panel per list of prompts (Table 5).

    Steering is a line over its coefficients, which label its points; a baseline is a point, and a method
    without perplexity a horizontal line. ``results`` has rows of one attribute with the metrics ``toxic`` and
    ``perplexity``, and a column ``coefficient``, empty for the baselines.
    """
    keys = ["method", "coefficient"]
    toxic = results[results["metric"] == "toxic"].rename(columns={"value": "toxic"})
    perplexity = results[results["metric"] == "perplexity"].rename(columns={"value": "perplexity"})
    points = toxic.merge(perplexity[[*keys, "perplexity"]], on=keys, how="left")
    lists, looks = toxic["corpus"].unique(), method_looks(toxic["method"])
    figure = Figure(figsize=(7.2 if len(lists) == 1 else 4.8 * len(lists), 4.6))
    panels = figure.subplots(1, len(lists), sharex=True, sharey=True, squeeze=False)[0]
    for ax, name in zip(panels, lists, strict=True):
        shown = points[points["corpus"] == name]
        _draw_control(ax, shown, looks)
        if len(lists) > 1:
            ax.set_title(f"{literal(short_name(name))}, {shown['n'].iloc[0]:,} prompts")
    panels[0].set_ylabel("toxic continuations")
    panels[0].set_ylim(bottom=0)
    percent_ticks(panels[0].yaxis)
    handles = [
        line_key(literal(method), look.color, ls=look.line, marker=look.marker, ms=5)
        for method, look in looks.items()
    ]
    title = title_of(toxic, "model")
    if len(lists) == 1:
        title = f"{title_of(toxic, 'model', 'corpus')}, {toxic['n'].iloc[0]:,} prompts"
    return finish(figure, title, handles, columns=3)


def _draw_control(ax: Axes, points: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    for method, look in looks.items():
        part = points[points["method"] == method].sort_values("coefficient")
        if part["perplexity"].isna().all():
            for level in part["toxic"].head(1):
                ax.axhline(level, color=look.color, ls="--", lw=1.2, label=method)
            continue
        ax.errorbar(
            part["perplexity"], part["toxic"], yerr=error_bars(part, "toxic"), fmt=f"{look.marker}-",
            color=look.color, lw=1.2, ms=5, elinewidth=0.7, label=literal(method),
        )  # fmt: skip
        of_control = part.dropna(subset=["coefficient", "perplexity"])
        for coefficient, *point in of_control[["coefficient", "perplexity", "toxic"]].to_numpy():
            ax.annotate(
                f"{coefficient:g}", tuple(point), (5, 4), textcoords="offset points", fontsize=7.5,
                color=look.color,
            )  # fmt: skip
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("perplexity")


@styled
def exits_figure(table: pd.DataFrame) -> Figure:
    """Accuracy against layers saved by method, with standard deviations (Table 6).

    Error bars are clipped to possible values. A hollow marker is the accuracy of the same exit layers,
    assigned at random.
    """
    figure = Figure(figsize=(7.6, 4))
    ax = figure.subplots()
    looks = method_looks(table["method"])
    for row in table.to_dict("records"):
        look = looks[row["method"]]
        ax.plot(
            [row["saved"]] * 2, [row["accuracy"], row["chance"]], DOTTED, color=look.color, lw=0.9, zorder=1
        )
        ax.plot(row["saved"], row["chance"], look.marker, color=look.color, ms=4, mfc="white", zorder=2)
        ax.errorbar(
            row["saved"], row["accuracy"], fmt=look.marker, color=look.color, ms=5.5, elinewidth=0.9,
            xerr=_deviation(row["saved"], row["saved_sd"], float("inf")),
            yerr=_deviation(row["accuracy"], row["accuracy_sd"], 1.0), label=literal(row["method"]), zorder=3,
        )  # fmt: skip
    ax.set_xlabel("layers saved, mean over right examples")
    ax.set_ylabel("accuracy")
    lowest = min((table["accuracy"] - table["accuracy_sd"].fillna(0)).min(), table["chance"].min())
    ax.set_ylim(max(0.0, float(lowest) - 0.05), 1.02)
    ax.set_xlim(left=-0.05 * float(table["saved"].max() or 1))
    percent_ticks(ax.yaxis)
    keys = [
        line_key(literal(method), look.color, marker=look.marker, ls="none", ms=5.5)
        for method, look in looks.items()
    ]
    keys.append(line_key("random assignment", marker="o", ls="none", ms=4, mfc="white"))
    title = f"{title_of(table)}, {table['seeds'].iloc[0]} splits"
    return finish(figure, title, keys, columns=1, place="outside right center")


def _deviation(value: float, deviation: float, upper: float) -> Any:
    """Lengths of the error bar below and above a value, clipped to 0 and ``upper``."""
    return [[min(deviation, value)], [min(deviation, upper - value)]]
