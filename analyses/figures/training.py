"""The figure of linearity over training."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from matlens.drawing import (
    BLACK,
    DARK,
    DOTTED,
    GREEN,
    ID,
    MAT,
    ORANGE,
    PURPLE,
    Look,
    draw_line,
    finish,
    precision_axis,
    styled,
    title_of,
)

PARTS = {"attn": Look(GREEN, marker="^"), "ffn": Look(ORANGE, marker="D"), "block": Look(BLACK, marker="v")}
READ = {"mat": MAT, "id": ID, "constant": Look(DARK, DOTTED, "x")}


@styled
def over_training(table: pd.DataFrame) -> Figure:
    """Loss, r2, loss increase and Precision@1 by update, means over layers."""
    steps = sorted(table["step"].unique())
    figure = Figure(figsize=(8.0, 5.6))
    panels = figure.subplots(2, 2, sharex=True)
    of_parts = table[(table["tokens"] == "all") & (table["method"] == "map")].assign(method=table["kind"])
    read = table[(table["metric"] == "precision") & (table["k"] == 1)]
    contents = (
        ("loss (nats per token)", table[table["metric"] == "loss"], {"model": Look(PURPLE)}),
        ("Precision@1", read, READ),
        (r"$r^2$ of the part's map", of_parts[of_parts["metric"] == "r2"], PARTS),
        ("loss increase with the map (nats)", of_parts[of_parts["metric"] == "loss increase"], PARTS),
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
