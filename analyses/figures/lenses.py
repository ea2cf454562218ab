"""Figures of the lens report next to those that matlens draws."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from figures.looks import LOOKS
from matlens.drawing import (
    GREEN,
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
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_yscale("log")
    for ax in (panels[0], panels[2]):
        ax.set_ylabel("KL (nats)")
    return finish(figure, f"{title_of(plain, 'model', 'corpus')}, layer {int(layer)}", handles, columns=7)
