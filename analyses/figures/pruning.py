"""The figure of pruned models: their perplexity, and what they write."""

from __future__ import annotations

from math import nan

import pandas as pd
from matplotlib.figure import Figure

from matlens.drawing import (
    BLACK,
    BLUE,
    DARK,
    DOTTED,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Look,
    draw_methods,
    finish,
    percent_ticks,
    styled,
    title_of,
)

LOOKS = {
    "out": Look(DARK, DOTTED, "x"), "linearpatch": Look(SKY, DOTTED, "v"),
    "linearpatch, rotated": Look(SKY, marker="^"),
    "replaceme": Look(VERMILLION, marker="s"), "jump": Look(BLUE), "refit": Look(ORANGE, marker="D"),
    "chain": Look(BLACK, marker="v"), "jump, chain": Look(PURPLE, marker="<"),
    "chain from jump": Look(GREEN, DOTTED, ">"),
}  # fmt: skip


@styled
def plot_pruned(table: pd.DataFrame) -> Figure:
    """Perplexity and measures of continuations by number of removed blocks, greedily chosen.

    Bands are paired intervals over windows; those of continuations would overlap.
    """
    figure = Figure(figsize=(8.0, 6.0))
    panels = figure.subplots(2, 2, sharex=True)
    rows = table[(table["against"] == "") & table["choice"].isin(["", "greedy"])]
    text = rows[rows["corpus"] == rows["corpus"].iloc[0]]
    contents = {
        "perplexity, relative to the original": text[text["metric"] == "ratio"],
        **{
            label: rows[(rows["decoding"] == decoding) & (rows["metric"] == metric)].assign(low=nan, high=nan)
            for label, decoding, metric in (
                ("perplexity of samples by the original", "sampled", "perplexity"),
                ("distinct-2, greedy", "greedy", "distinct-2"),
                ("repeated 4-grams, greedy", "greedy", "repeated 4-grams"),
            )
        },
    }
    for ax, (label, of_panel) in zip(panels.flat, contents.items(), strict=True):
        original = of_panel[of_panel["method"] == "original"]["value"]
        ax.axhline(1 if original.empty else original.item(), color=DARK, lw=0.8)
        methods = {name: look for name, look in LOOKS.items() if name in set(of_panel["method"])}
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
