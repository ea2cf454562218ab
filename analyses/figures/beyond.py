"""Figures of analyses beyond the papers: lenses, linear parts, pruned models."""

from __future__ import annotations

from math import nan
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from figures.looks import KINDS, LOOKS, PRUNED, READ, error_bars
from matlens.drawing import (
    DARK,
    DOTTED,
    GREEN,
    PURPLE,
    STYLES,
    Look,
    draw_line,
    draw_methods,
    finish,
    layer_axis,
    method_looks,
    percent_ticks,
    precision_axis,
    styled,
    title_of,
)

_SCORE = "fisher"
_FLOOR = 1e-4  # nats: smaller loss increases are drawn there


@styled
def plot_cosines(results: pd.DataFrame) -> Figure:
    """Cosine of two lenses' matrices at each layer, and of two halves of the data."""
    figure = Figure(figsize=(5.6, 4.0))
    ax = figure.subplots()
    draw_methods(ax, results, method_looks(results["method"]))
    ax.set_ylim(min(0.0, float(results["value"].min()) - 0.05), 1.02)
    ax.set_ylabel("cosine of matrices")
    layer_axis(ax, results["target"].max())
    return finish(figure, title_of(results, "model", "corpus"), columns=2)


@styled
def plot_causal(table: pd.DataFrame) -> Figure:
    """Answers that flip by dose, areas under such curves by layer, and what lenses read there."""
    figure = Figure(figsize=(8.0, 6.0))
    panels = figure.subplots(2, 2)
    layers = sorted(table["layer"].dropna().unique())
    middle, last = int(layers[len(layers) // 2]), table["target"].max()
    plain = table[(table[["prompts", "against"]].fillna("") == "").all(axis=1)]
    along, back = (plain[plain["direction"] == kind] for kind in ("transpose", "pseudo-inverse"))
    along = pd.concat([along, plain[plain["method"] == "random"]])
    flipped = along[(along["metric"] == "flipped") & (along["layer"] == middle)]
    contents = (
        (f"answers flipped, layer {middle}", flipped, "k"),
        ("area, transpose", along[along["metric"] == "auc"].dropna(subset="layer"), "layer"),
        ("area, pseudo-inverse", back[back["metric"] == "auc"].dropna(subset="layer"), "layer"),
        ("answer read above the rival", plain[plain["metric"] == "read"], "layer"),
    )
    looks = {"model": Look(GREEN, marker="^"), "random": LOOKS["random"]}
    looks = method_looks(method for method in flipped["method"] if method not in looks) | looks
    for ax, (label, rows, x) in zip(panels.flat, contents, strict=True):
        draw_methods(ax, rows, {name: looks[name] for name in looks if name in set(rows["method"])}, x)
        ax.set_ylabel(label)
        ax.set_ylim(0, 1.02)
        percent_ticks(ax.yaxis)
        if x == "layer":
            layer_axis(ax, last)
    panels[0, 0].set_xscale("log", base=2)
    panels[0, 0].set_xlabel("length of the move, relative to the vector")
    return finish(figure, title_of(plain, "model", "corpus"), panels[0, 0].get_lines(), columns=8)


@styled
def plot_budgets(table: pd.DataFrame) -> Figure:
    """KL and Precision@1 by budget at the layer of the rounds, and the KL of a tuned lens over them."""
    figure = Figure(figsize=(9.6, 3.8))
    panels = figure.subplots(1, 3)
    plain = table[table["against"].fillna("") == ""]
    in_rounds = plain[plain["round"].notna() & (plain["metric"] == "kl")]
    layer = in_rounds["layer"].iloc[0]
    at = plain[(plain["layer"] == layer) & plain["round"].isna()]
    looks = method_looks(dict.fromkeys(at["method"]))
    kl, precision = at[at["metric"] == "kl"], at[(at["metric"] == "precision") & (at["k"] == 1)]
    draw_methods(panels[0], kl, looks, "tokens")
    draw_methods(panels[1], precision, looks, "tokens")
    precision_axis(panels[1])
    handles = panels[0].get_lines()
    for i, (size, rows) in enumerate(in_rounds.groupby("batch")):
        look = looks["tuned"]._replace(line=STYLES[i], hollow=i > 0)
        draw_line(panels[2], rows, look, f"{size:,.0f} per step", "seen")
    for name in ("polished", "scaled", "affine"):
        best = kl[kl["method"] == name].sort_values("tokens")["value"].iloc[-1]
        panels[2].axhline(best, color=looks[name].color, ls=looks[name].line, lw=1)
    panels[2].legend(handles=panels[2].get_legend_handles_labels()[0], loc="upper right")
    for ax in panels:
        ax.set_xscale("log")
        ax.set_xlabel("tokens to fit on" if ax is not panels[2] else "tokens seen by tuned")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 5)))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_yscale("log")
    for ax in (panels[0], panels[2]):
        ax.set_ylabel("KL (nats)")
    return finish(figure, f"{title_of(plain, 'model', 'corpus')}, layer {int(layer)}", handles, columns=7)


@styled
def plot_damage(table: pd.DataFrame, correlations: pd.DataFrame) -> Figure:
    """The loss increase of each part against its score, and the correlations of all scores, by model.

    Of a model with attention sinks, maps are fitted and used at all other tokens.
    """
    modes = {str(model): rows["tokens"].iloc[-1] for model, rows in correlations.groupby("model", sort=False)}
    models = list(modes)
    figure = Figure(figsize=(3.1 * len(models) + 4.4, 4.2))
    *panels, last = figure.subplots(1, len(models) + 1, width_ratios=[*(3.1 for _ in models), 3.3])
    for ax, model in zip(panels, models, strict=True):
        rows = table[(table["model"] == model) & (table["tokens"] == modes[model])]
        rows = rows[(rows["method"] == "map") & ~rows["kind"].str.startswith("together")]
        points = rows.pivot(index=["kind", "layer"], columns="metric", values="value").clip(lower=_FLOOR)
        for kind in [kind for kind in KINDS if kind in points.index]:
            look, of_kind = KINDS[kind], points.loc[kind]
            ax.plot(
                of_kind[_SCORE], of_kind["loss increase"], look.marker, color=look.color, label=kind, mew=0,
                ms=4, alpha=0.8,
            )  # fmt: skip
        ax.axline((_FLOOR, _FLOOR), (1, 1), color=DARK, ls=DOTTED, lw=0.8)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_title(Path(model).name)
        ax.set_xlabel(f"{_SCORE} (nats per token)")
    shown = correlations[
        (correlations["kind"] == "all kinds") & ~correlations["metric"].str.contains(" [-/] ")
    ]
    order = list(dict.fromkeys(shown["metric"]))[::-1]
    for model, look in method_looks(models).items():
        rows = shown[shown["model"] == model]
        rows = rows[rows["tokens"] == modes[model]].set_index("metric").reindex(order)
        y = np.arange(len(order)) + 0.18 * ((len(models) - 1) / 2 - models.index(model))
        last.errorbar(
            rows["value"], y, xerr=error_bars(rows), fmt=look.marker, color=look.color, ms=4,
            label=Path(model).name,
        )  # fmt: skip
    last.set_yticks(range(len(order)), order)
    last.set_xlabel("rank correlation with the loss increase")
    last.axvline(0, color=DARK, lw=0.6)
    panels[0].set_ylabel("loss increase with the map (nats per token)")
    handles, names = max((ax.get_legend_handles_labels() for ax in panels), key=lambda each: len(each[1]))
    if len(models) > 1:
        last.legend(loc="lower left")
    return finish(
        figure, "Predicted and measured damage of each part's affine map", handles, columns=len(names)
    )


@styled
def over_training(table: pd.DataFrame) -> Figure:
    """Loss, r2, loss increase and Precision@1 by update, means over layers."""
    steps = sorted(table["step"].unique())
    figure = Figure(figsize=(8.0, 5.6))
    panels = figure.subplots(2, 2, sharex=True)
    of_parts = table[(table["tokens"] == "all") & (table["method"] == "map")].assign(method=table["kind"])
    read = table[(table["metric"] == "precision") & (table["k"] == 1)]
    parts = {kind: KINDS[kind] for kind in ("attn", "ffn", "block")}
    contents = (
        ("loss (nats per token)", table[table["metric"] == "loss"], {"model": Look(PURPLE)}),
        ("Precision@1", read, READ),
        (r"$r^2$ of the part's map", of_parts[of_parts["metric"] == "r2"], parts),
        ("loss increase with the map (nats)", of_parts[of_parts["metric"] == "loss increase"], parts),
    )
    for ax, (label, rows, looks) in zip(panels.flat, contents, strict=True):
        means = rows.groupby(["method", "step"], as_index=False)[["value", "low", "high"]].mean()
        of_layers = ~means["method"].isin(["model", "constant"])
        means.loc[of_layers, ["low", "high"]] = float("nan")  # a mean of layers has no interval
        for method, look in looks.items():
            draw_line(ax, means[means["method"] == method], look, method, "step")
        ax.set_ylabel(label)
        ax.set_xscale("symlog", linthresh=float(next((step for step in steps if step > 0), 1)))
        ax.set_xticks(labeled := [steps[0], *steps[:0:-2]], [f"{step:,}" for step in labeled], minor=False)
        ax.set_xticks([], minor=True)
    precision_axis(panels[0, 1])
    for ax in panels[1]:
        ax.set_xlabel("updates")
    handles = [line for ax in (panels[0, 0], panels[0, 1], panels[1, 0]) for line in ax.get_lines()]
    return finish(figure, f"{title_of(table, 'model', 'corpus')}, means over layers", handles, columns=7)


@styled
def plot_pruned(table: pd.DataFrame) -> Figure:
    """Perplexity and measures of continuations by number of removed blocks, greedily chosen.

    Bands are paired intervals over windows; those of continuations would overlap.
    """
    figure = Figure(figsize=(8.0, 6.0))
    panels = figure.subplots(2, 2, sharex=True)
    rows = table[(table["against"] == "") & table["choice"].isin(["", "greedy"])]
    text = rows[rows["corpus"] == rows["corpus"].iloc[0]]
    contents = {"perplexity, relative to the original": text[text["metric"] == "ratio"]}
    for label, decoding, metric in (
        ("perplexity of samples by the original", "sampled", "perplexity"),
        ("distinct-2, greedy", "greedy", "distinct-2"),
        ("repeated 4-grams, greedy", "greedy", "repeated 4-grams"),
    ):
        written = rows[(rows["decoding"] == decoding) & (rows["metric"] == metric)]
        contents[label] = written.assign(low=nan, high=nan)
    for ax, (label, of_panel) in zip(panels.flat, contents.items(), strict=True):
        original = of_panel[of_panel["method"] == "original"]["value"]
        ax.axhline(1 if original.empty else original.item(), color=DARK, lw=0.8)
        methods = {name: look for name, look in PRUNED.items() if name in set(of_panel["method"])}
        draw_methods(ax, of_panel, methods, "n_removed")
        ax.set_ylabel(label)
        if label.startswith("perplexity"):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("{x:g}")
        else:
            percent_ticks(ax.yaxis)
    for ax in panels[1]:
        ax.set_xticks(sorted(rows[rows["choice"] == "greedy"]["n_removed"].unique()))
        ax.set_xlabel("blocks removed")
    return finish(figure, f"{title_of(text, 'model', 'corpus')}; gray: original", columns=5)
