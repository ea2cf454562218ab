"""Figures of the lens report next to those that matlens draws."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from figures.looks import LOOKS
from matlens.drawing import (
    GREEN,
    Look,
    draw_methods,
    finish,
    layer_axis,
    method_looks,
    percent_ticks,
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
