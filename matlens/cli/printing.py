"""Printing of tables and paths."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from matlens.errors import printable

if TYPE_CHECKING:
    import pandas as pd

    from matlens.ffn.projection import Projection

_WIDTH_OF_TEXT = 24  # characters that the last column of a table has at least, however narrow the terminal
_METRICS = {"r2": "r2", "precision": "P@1", "surprisal": "surprisal"}  # and their column names


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table without wrapping any column but the last."""
    table = Table(*columns, title=Text(printable(title, keep="\n")), title_justify="left")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*(foreign(cell) for cell in row))
    console = Console()
    widths = [max(cell_len(str(text)) for text in (column.header, *column.cells)) for column in table.columns]
    widths[-1] = min(widths[-1], _WIDTH_OF_TEXT)
    console.width = max(console.width, sum(widths) + 3 * len(widths) + 1)
    console.print(table)


def print_frame(title: str, table: Any, *, digits: Mapping[str, int] | None = None) -> None:
    """Print a data frame, values to three digits or to ``digits``."""

    def cell(value: Any, of: int) -> Any:
        if isinstance(value, Integral) or not isinstance(value, Real):
            return value
        return number_text(float(value), of) if value == value else "–"

    columns = [[cell(value, (digits or {}).get(name, 3)) for value in table[name]] for name in table]
    print_table(title, list(table), zip(*columns, strict=True))


def foreign(text: object) -> Text:
    """Foreign text, such as tokens, for a table: escape sequences and markup are inert."""
    return Text(printable(str(text)))


def print_line(*parts: object) -> None:
    """Print a line that may contain foreign text, such as file names."""
    print(printable(" ".join(map(str, parts))))


def print_results(results: pd.DataFrame, folder: Path) -> None:
    """Print fit and prediction of maps to the last layer, one row per layer."""
    last = results["target"].max()
    rows = results[(results["target"] == last) & (results["k"].isna() | (results["k"] == 1))]
    table = rows.pivot_table(index="layer", columns=["metric", "method"], values="value")
    columns = [column for column in itertools.product(_METRICS, ("mat", "id")) if column in table]
    table = table[columns]
    table.columns = [f"{_METRICS[metric]} {method}" for metric, method in columns]
    print_frame(f"Onto layer {last}, on the validation sentences", table.reset_index())
    note = json.loads((folder / "results.json").read_text()).get("note")
    if note:
        Console().print(Text(printable(note, keep="\n")), soft_wrap=True)


def print_members(report: Any, exits: Any) -> None:
    """Print one line per lens of a report: mean metrics, layers saved, and costs.

    Parameters
    ----------
    report, exits
        The tables of `matlens.lens.evaluate_lenses` and of `matlens.lens.exit_sweep`.
    """
    from matlens.lens.comparison import summarize

    digits = {
        "P@1": 3, "P@10": 3, "surprisal": 2, "kl": 2, "r2": 3, "saved": 2, "seconds": 2, "parameters": 0
    }  # fmt: skip
    wide = summarize(report, exits).reindex(columns=list(digits)).astype(float)  # no lens may have r2
    title = "Means over the layers; layers saved at 95%; CPU seconds and parameters per layer"
    print_frame(title, wide.rename_axis("lens").reset_index(), digits=digits)


def print_atlas(table: Any, correlations: Any) -> None:
    """Print which score predicts the loss increase, and the cheapest parts.

    Parameters
    ----------
    table, correlations
        The tables of `matlens.linearity.linearity_atlas` and of `matlens.linearity.rank_correlations`.
    """
    overall = correlations[correlations["kind"] == "all kinds"].rename(columns={"value": "correlation"})
    print_frame(
        "Rank correlation of scores with the loss increase (positive: less linear parts cost more)",
        overall[["metric", "method", "tokens", "correlation", "low", "high"]],
    )
    together = table[table["kind"].str.startswith("together") & (table["metric"] == "loss increase")]
    kinds = together["kind"].str.partition(": ")[2]
    renamed = together.assign(kind=kinds).rename(columns={"value": "loss increase, nats"})
    print_frame("Parts replaced together", renamed[["kind", "tokens", "loss increase, nats", "parts"]])


def print_figures(paths: Sequence[Path]) -> None:
    """Print where figures are."""
    print_line("Figures: " + ", ".join(map(str, paths)))


def top_texts(projection: Projection, vectors: Any, k: int) -> list[str]:
    """The top tokens of vectors, as people see them, a line for each."""
    from matlens.models.tokens import token_texts, visible

    return [
        ", ".join(map(visible, token_texts(projection.tokenizer, ids)))
        for ids in projection.top(vectors, k).ids
    ]


def number_text(value: float, digits: int = 3) -> str:
    """Format a number, with an exponent if it is very large or small."""
    text = f"{value:.{digits}f}"
    if math.isfinite(value) and (abs(value) >= 1e6 or (value and not float(text))):
        return f"{value:.{digits}e}"
    return text
