"""What updates of FFNs do to predictions: events, scores layer by layer, and where predictions are made."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from matlens.plots.colours import DOTTED, GREY, SUMMARIES, UPDATES, method_looks
from matlens.plots.lines import draw_line, draw_methods
from matlens.plots.style import finish, layer_axis, literal, model_title, percent_ticks, styled, title_of

_EVENTS = tuple(
    (method, event) for method in ("dominant", "random") for event in ("saturation", "elimination")
)
_UPDATES = {
    "saturation": "predicted token, where it is made",
    "stays": "candidate that stays",
    "falls": "candidate that falls",
}
_READS = {"score": "score", "lift": "score above the vocabulary's mean", "odds": "log-odds against the rival"}
_FEW = 10  # updates; a mean of fewer is not drawn
_APART = 0.18  # between the points of two summaries of the same sub-updates


@styled
def events_figure(results: pd.DataFrame) -> Figure:
    """Maximal, mean and minimal scores at events, a panel for each reading and choice of examples (Table 4).

    Parameters
    ----------
    results
        What `event_scores` gives, with the columns ``read`` and ``examples`` beside.
    """
    examples, reads = list(results["examples"].unique()), list(results["read"].unique())
    figure = Figure(figsize=(3.6 * len(reads) + 1.4, 1.9 * len(examples) + 1))
    panels = figure.subplots(len(examples), len(reads), squeeze=False, sharey=True)
    for i, chosen in enumerate(examples):
        for j, read in enumerate(reads):
            part = results[(results["examples"] == chosen) & (results["read"] == read)]
            _draw_events(panels[i, j], part)
            panels[i, j].set_title(literal(f"{_READS[read]}, {chosen}"))
    return finish(figure, _title(results))


def _draw_events(ax: Axes, part: pd.DataFrame) -> None:
    by_event = part.set_index(["method", "event"]).sort_index()
    for i, (metric, colour) in enumerate(SUMMARIES.items()):
        rows = by_event[by_event["metric"] == metric].loc[list(_EVENTS)]
        errors = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
        places = [place + (i - 1) * _APART for place in range(len(rows))]
        ax.errorbar(
            rows["value"], places, xerr=errors, fmt="o", ms=4, color=colour, label=metric, lw=1, capsize=0
        )
    ax.set_yticks(range(len(_EVENTS)), [f"{event}, {method}" for method, event in _EVENTS])
    ax.set_ylim(len(_EVENTS) - 0.5, -0.5)
    ax.set_xscale("symlog", linthresh=1)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.axvline(0, color=GREY, lw=0.8)


@styled
def layers_figure(results: pd.DataFrame) -> Figure:
    """Scores of the top candidate over layers, and the maximum by what an update does (Figure 3).

    A panel for each choice of examples has the mean over the examples with a band from the 5th to the 95th
    percentile. The last panel is of the last choice; a layer with fewer than ten updates of a kind has no
    point there.

    Parameters
    ----------
    results
        What `update_scores` gives for one reading, with the column ``examples`` beside.
    """
    examples = list(results["examples"].unique())
    figure = Figure(figsize=(4.2 * (len(examples) + 1), 4.3))
    *panels, last = figure.subplots(1, len(examples) + 1)
    for ax, chosen in zip(panels, examples, strict=True):
        part = results[(results["examples"] == chosen) & (results["event"] == "update")]
        _draw_summaries(ax, part)
        ax.set_title(literal(f"top candidate, {chosen}, n = {part['n'].iloc[0]:,}"))
    few = results["n"] < _FEW
    layers = range(int(results["layer"].max()) + 1)
    for event, look in UPDATES.items():
        part = results[(results["examples"] == examples[-1]) & (results["event"] == event) & ~few]
        curve = _curve(part, "dominant", "max").set_index("layer").reindex(layers)  # gaps break the line
        draw_line(last, curve.reset_index(), look, _UPDATES[event])
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
    return finish(figure, _title(results), keys, columns=3, place="outside lower left")


def _draw_summaries(ax: Axes, part: pd.DataFrame) -> None:
    for metric, colour in SUMMARIES.items():
        curve = _curve(part, "dominant", metric)
        low, high = (_curve(part, "dominant", f"{metric}_{p}")["value"] for p in ("p05", "p95"))
        ax.plot(curve["layer"], curve["value"], color=colour, label=f"{metric} of dominant")
        ax.fill_between(curve["layer"], low, high, color=colour, alpha=0.13, lw=0)
    for metric in ("max", "min"):
        curve = _curve(part, "random", metric)
        ax.plot(
            curve["layer"], curve["value"], color=SUMMARIES[metric], lw=1, ls=DOTTED,
            label=f"{metric} of random",
        )  # fmt: skip


@styled
def saturation_figure(results: pd.DataFrame) -> Figure:
    """Where predictions are made, by FFNs and by attention (Tables 9 and 10).

    Parameters
    ----------
    results
        What `saturation_frequency` gives.
    """
    figure = Figure(figsize=(6.2, 3.6))
    ax = figure.subplots()
    below: pd.Series | float = 0.0
    for method, look in method_looks(("ffn", "attention")).items():
        shares = _curve(results, method, "share").set_index("layer")["value"]
        ax.bar(shares.index, shares, bottom=below, color=look.colour, label=f"by {method}")
        below = below + shares
    layer_axis(ax, results["layer"].max(), "layer")
    ax.set_ylabel("share of predictions made")
    percent_ticks(ax.yaxis)
    ax.grid(False, axis="x")
    return finish(figure, title_of(results.head(1)))


def _curve(results: pd.DataFrame, method: str, metric: str) -> pd.DataFrame:
    rows = results[(results["method"] == method) & (results["metric"] == metric)]
    return rows.sort_values("layer")


def _title(results: pd.DataFrame) -> str:
    first = results.iloc[0]
    return model_title(first["model"], first["corpus"])


@styled
def removal_figure(results: pd.DataFrame) -> Figure:
    """How far readings of value vectors agree with what their removal does, layer by layer.

    Correlations above, shares of common top tokens below; the stream of the layer on the left, the model's
    own logits on the right.

    Parameters
    ----------
    results
        What `removal_table` gives.
    """
    by_layer = results.dropna(subset="layer").astype({"layer": int})
    effects, metrics = list(by_layer["effect"].unique()), ["correlation", "common"]
    figure = Figure(figsize=(4.1 * len(effects) + 0.4, 6))
    panels = figure.subplots(len(metrics), len(effects), squeeze=False, sharey="row", sharex=True)
    looks = method_looks(by_layer["method"])
    for i, metric in enumerate(metrics):
        for j, effect in enumerate(effects):
            chosen = by_layer[(by_layer["metric"] == metric) & (by_layer["effect"] == effect)]
            draw_methods(panels[i, j], chosen, looks)
            panels[i, j].axhline(0, color=GREY, lw=0.8)
            if i == 0:
                panels[i, j].set_title(literal(f"logits {effect}"))
    for j in range(len(effects)):
        layer_axis(panels[-1, j], by_layer["layer"].max(), "layer")
    panels[0, 0].set_ylabel("correlation over the vocabulary")
    panels[1, 0].set_ylabel("share of top tokens in common")
    percent_ticks(panels[1, 0].yaxis)
    return finish(figure, _title(results))
