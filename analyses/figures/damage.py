"""The figure of the scores that predict the damage of a map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
    finish,
    method_looks,
    styled,
)

KINDS = {
    "ln1": Look(SKY, marker="o"), "attn": Look(GREEN, marker="^"), "ln2": Look(BLUE, marker="s"),
    "ffn": Look(ORANGE, marker="D"), "block": Look(BLACK, marker="v"), "jump 2": Look(PURPLE, marker="<"),
    "jump 4": Look(VERMILLION, marker=">"), "jump 8": Look(DARK, marker="P"),
}  # fmt: skip
SHOWN = "fisher"
LEAST = 1e-4  # nats; what increases less stands there


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
        points = rows.pivot(index=["kind", "layer"], columns="metric", values="value").clip(lower=LEAST)
        for kind in [kind for kind in KINDS if kind in points.index]:
            look, of_kind = KINDS[kind], points.loc[kind]
            ax.plot(
                of_kind[SHOWN], of_kind["loss increase"], look.marker, color=look.color, label=kind, mew=0,
                ms=4, alpha=0.8,
            )  # fmt: skip
        ax.axline((LEAST, LEAST), (1, 1), color=DARK, ls=DOTTED, lw=0.8)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_title(Path(model).name)
        ax.set_xlabel(f"{SHOWN} (nats per token)")
    shown = correlations[
        (correlations["kind"] == "all kinds") & ~correlations["metric"].str.contains(" [-/] ")
    ]
    order = list(dict.fromkeys(shown["metric"]))[::-1]
    for model, look in method_looks(models).items():
        rows = shown[shown["model"] == model]
        rows = rows[rows["tokens"] == modes[model]].set_index("metric").reindex(order)
        y = np.arange(len(order)) + 0.18 * ((len(models) - 1) / 2 - models.index(model))
        spread = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
        last.errorbar(
            rows["value"], y, xerr=spread, fmt=look.marker, color=look.color, ms=4, label=Path(model).name
        )
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
