"""The figure of early exit, from its table; nothing is computed here."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

_MARKS = "os^Dv*<P>X"


def exits_figure(table: pd.DataFrame) -> Figure:
    """Accuracy against the layers saved, one mark a method, with deviations over the seeds (Table 6).

    A hollow mark below is the accuracy of the same layers dealt out at random.

    Parameters
    ----------
    table
        Of `exits.summary`, with the columns ``model``, ``corpus`` and ``n`` beside.
    """
    figure = Figure(figsize=(7.6, 4), layout="constrained")
    ax = figure.subplots()
    lines = table.to_dict("records")
    for i, row in enumerate(lines):
        colour, mark = f"C{i}", _MARKS[i % len(_MARKS)]
        ax.plot([row["saved"]] * 2, [row["accuracy"], row["chance"]], ":", color=colour, lw=0.9, zorder=1)
        ax.plot(row["saved"], row["chance"], mark, color=colour, ms=4, mfc="white", zorder=2)
        ax.errorbar(
            row["saved"], row["accuracy"], xerr=row["saved_sd"], yerr=row["accuracy_sd"], fmt=mark,
            color=colour, ms=5.5, elinewidth=0.9, capsize=2, label=row["method"], zorder=3,
        )  # fmt: skip
    ax.plot([], [], "o", color="0.4", ms=4, mfc="white", label="its layers dealt out at random")
    ax.set_xlabel("layers saved, of examples that are right")
    ax.set_ylabel("accuracy")
    lowest = min((table["accuracy"] - table["accuracy_sd"].fillna(0)).min(), table["chance"].min())
    ax.set_ylim(max(0.0, float(lowest) - 0.05), 1.04)
    ax.set_xlim(left=min(-0.1, float((table["saved"] - table["saved_sd"].fillna(0)).min()) - 0.1))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    first = lines[0]
    title = f"{Path(str(first['model'])).name}, {first['corpus']}, n = {first['n']:,}"
    figure.suptitle(f"{title}, {first['seeds']} splits", fontsize=10)
    return figure
