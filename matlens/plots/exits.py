"""Early exit: what is kept of predictions against the layers that are run or saved."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from matlens.plots.colours import DARK, DOTTED, GREY, method_looks
from matlens.plots.lines import draw_line, line_key, precision_axis
from matlens.plots.style import finish, layer_axis, literal, model_title, percent_ticks, styled, title_of

_GOAL = 0.95  # Precision@1 at which the layers saved are compared


@styled
def early_exit(results: pd.DataFrame) -> Figure:
    """Precision@1 against the mean number of layers run, by early and by fixed exit (paper A, Figure 9)."""
    figure = Figure(figsize=(5.6, 4.2))
    ax = figure.subplots()
    for method, look in method_looks(("mat", "id")).items():
        rows = results[results["method"] == method]
        draw_line(ax, rows[rows["lam"].notna()], look, f"{method}, early exit")
        fixed = rows[rows["lam"].isna()]
        draw_line(ax, fixed, look._replace(line=DOTTED), f"{method}, fixed exit")
    ax.axhline(_GOAL, color=GREY, lw=0.8, zorder=0)
    ax.text(
        0.01, _GOAL, f"{_GOAL:.0%}", transform=ax.get_yaxis_transform(), va="bottom", fontsize=7, color=DARK
    )
    layer_axis(ax, results["target"].max(), "mean number of layers run")
    precision_axis(ax)
    return finish(figure, title_of(results), columns=2)


@styled
def exits_figure(table: pd.DataFrame) -> Figure:
    """Accuracy against the layers saved, a mark for each method, with deviations over the seeds (Table 6).

    Bars of deviations end where no accuracy and no number of layers can be. A hollow mark is the accuracy of
    the same layers dealt out at random.

    Parameters
    ----------
    table
        Rows of `summarize_exits`, with the columns ``model``, ``corpus`` and ``n`` beside.
    """
    figure = Figure(figsize=(7.6, 4))
    ax = figure.subplots()
    looks = method_looks(table["method"])
    for row in table.to_dict("records"):
        look = looks[row["method"]]
        ax.plot(
            [row["saved"]] * 2, [row["accuracy"], row["chance"]], DOTTED, color=look.colour, lw=0.9, zorder=1
        )
        ax.plot(row["saved"], row["chance"], look.marker, color=look.colour, ms=4, mfc="white", zorder=2)
        ax.errorbar(
            row["saved"], row["accuracy"], fmt=look.marker, color=look.colour, ms=5.5, elinewidth=0.9,
            xerr=_deviation(row["saved"], row["saved_sd"], float("inf")),
            yerr=_deviation(row["accuracy"], row["accuracy_sd"], 1.0), label=literal(row["method"]), zorder=3,
        )  # fmt: skip
    ax.set_xlabel("layers saved, mean over examples that are right")
    ax.set_ylabel("accuracy")
    lowest = min((table["accuracy"] - table["accuracy_sd"].fillna(0)).min(), table["chance"].min())
    ax.set_ylim(max(0.0, float(lowest) - 0.05), 1.02)
    ax.set_xlim(left=-0.05 * float(table["saved"].max() or 1))
    percent_ticks(ax.yaxis)
    keys = [
        line_key(literal(method), look.colour, marker=look.marker, ls="none", ms=5.5)
        for method, look in looks.items()
    ]
    keys.append(line_key("its layers at random", marker="o", ls="none", ms=4, mfc="white"))
    first = table.iloc[0]
    title = f"{model_title(first['model'], first['corpus'], int(first['n']))}, {first['seeds']} splits"
    return finish(figure, title, keys, columns=1, place="outside right center")


@styled
def costs_figure(results: pd.DataFrame) -> Figure:
    """What is kept in memory for a fixed exit, and what early exit by ``mat`` computes and saves.

    Parameters
    ----------
    results
        The table of `analyses/memory_and_layers.py`.
    """
    figure = Figure(figsize=(9.4, 4.1))
    left, right = figure.subplots(1, 2)
    fixed = results[results["layer"].notna()]
    for method, look in method_looks(("mat", "id")).items():
        rows = fixed[fixed["method"] == method].set_index(["metric", "layer"])
        shares = rows["share of bytes"].astype(float)
        kept = 1 - shares.loc["bytes saved"] + shares.loc["bytes of maps"]
        left.plot(
            kept, rows["value"].loc["precision"], look.line, color=look.colour, marker=look.marker,
            label=f"{method}, fixed exit",
        )  # fmt: skip
    left.set_xlabel("bytes of the blocks that are run, and of the map")
    percent_ticks(left.xaxis)
    precision_axis(left)
    early = results[results["layer"].isna() & (results["method"] == "mat")]
    names = {
        "multiplications saved": "saved: blocks", "map multiplications": "spent: maps",
        "readout multiplications": "spent: read-outs",
    }  # fmt: skip
    for metric, look in method_looks(names).items():
        rows = early[early["metric"] == metric].sort_values("k")
        right.plot(
            rows["k"].astype(float), rows["share of multiplications"].astype(float), look.line,
            color=look.colour, marker=look.marker, label=f"{names[metric]}, early exit",
        )  # fmt: skip
    right.set_xlabel("Precision@1 that is asked for")
    right.set_ylabel("multiplications, as a share of all blocks'")
    right.set_ylim(bottom=0)
    for axis in (right.xaxis, right.yaxis):
        percent_ticks(axis)
    return finish(figure, title_of(results), [*left.get_lines(), *right.get_lines()], columns=3)


def _deviation(value: float, deviation: float, most: float) -> Any:
    """Lengths of the bar below and above a value that lies between 0 and ``most``."""
    return [[min(deviation, value)], [min(deviation, most - value)]]
