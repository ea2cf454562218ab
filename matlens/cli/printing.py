"""What commands print: tables, paths, and how long they will take."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from matlens import parallel
from matlens.errors import printable
from matlens.io.files import system_errors
from matlens.io.numbers import number_text

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.ffn.projection import Projection

_WIDTH_OF_TEXT = 24  # characters that the last column of a table has at least, however narrow the terminal
_METRICS = {"r2": "r2", "precision": "P@1", "surprisal": "surprisal"}  # and what their columns are called
_SIDE = 1024  # of the square matrices whose product is timed
_SHARE = 0.6  # of the speed of such products that whole models reach, as measured on SmolLM2-135M
_WORTH_SAYING = 30  # seconds


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, so wide that no column but the last is wrapped: a number cut would lose its exponent."""
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


def print_frame(
    title: str, table: Any, headings: Mapping[str, str], *, digits: Mapping[str, int] | None = None
) -> None:
    """Print columns of a data frame under headings, numbers to three digits or to ``digits``."""

    def cell(value: Any, of: int) -> Any:
        if isinstance(value, Integral) or not isinstance(value, Real):
            return value
        return number_text(float(value), of) if value == value else "–"

    columns = [[cell(value, (digits or {}).get(name, 3)) for value in table[name]] for name in headings]
    print_table(title, list(headings.values()), zip(*columns, strict=True))


def foreign(text: object) -> Text:
    """What others wrote, such as tokens, for a table: shown as it is, neither obeyed nor taken for markup."""
    return Text(printable(str(text)))


def print_line(*parts: object) -> None:
    """Print a line in which there may be what others wrote, such as names of files."""
    print(printable(" ".join(map(str, parts))))


def print_results(folder: Path) -> None:
    """Print the table of results in a folder, and what one must know to read it."""
    # Read as plain text: a run that is finished is answered before pandas could be imported.
    path = folder / "results.csv"
    with system_errors(path), path.open(encoding="utf-8", newline="") as file:
        print_layers(csv.DictReader(file))
    note = json.loads((folder / "results.json").read_text()).get("note")
    if note:
        Console().print(Text(printable(note, keep="\n")), soft_wrap=True)


def print_layers(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print how well maps onto the last layer fit and predict, a line for each layer.

    Parameters
    ----------
    rows
        Rows of the table of results, as text.
    """
    named = [row for row in rows if row["k"] in ("", "1")]
    last = max(int(row["target"]) for row in named)
    cells = {
        (int(row["layer"]), row["metric"], row["method"]): row["value"]
        for row in named
        if int(row["target"]) == last
    }
    columns = [(metric, method) for metric in _METRICS for method in ("mat", "id")]
    shown = [column for column in columns if any(cell[1:] == column for cell in cells)]
    heads = [f"{_METRICS[metric]} {method}" for metric, method in shown]
    lines = []
    for layer in sorted({layer for layer, _, _ in cells}):
        values = (cells.get((layer, *column)) for column in shown)
        lines.append(
            (layer, *("–" if value is None else number_text(float(value or "nan")) for value in values))
        )
    print_table(f"Onto layer {last}, on the validation sentences", ("layer", *heads), lines)


def print_members(report: Any, exits: Any) -> None:
    """Print a line for each lens of a report: measures in the mean over layers, layers saved, and costs.

    Parameters
    ----------
    report, exits
        The tables of `matlens.lens.evaluate_lenses` and of `matlens.lens.exit_sweep`.
    """
    from matlens.lens.comparison import summarise

    digits = {
        "P@1": 3, "P@10": 3, "surprisal": 2, "kl": 2, "r2": 3, "saved": 2, "seconds": 2, "parameters": 0
    }  # fmt: skip
    wide = summarise(report, exits).reindex(columns=list(digits)).astype(float)  # no lens may have r2
    wide["lens"] = wide.index
    title = "Means over the layers; layers saved at 95%; CPU seconds and parameters per layer"
    print_frame(title, wide, {name: name for name in ("lens", *digits)}, digits=digits)


def print_atlas(table: Any, correlations: Any) -> None:
    """Print which score tells what replacing a part costs, and what the first parts cost together.

    Parameters
    ----------
    table, correlations
        The tables of `matlens.linearity.linearity_atlas` and of `matlens.linearity.rank_correlations`.
    """
    print_frame(
        "Rank correlation of scores with the loss increase, over all parts",
        correlations[correlations["kind"] == "all kinds"],
        {
            "metric": "score", "method": "part is", "tokens": "tokens", "value": "correlation", "low": "from",
            "high": "to",
        },
    )  # fmt: skip
    together = table[table["kind"].str.startswith("together") & (table["metric"] == "loss increase")]
    print_frame(
        "Parts replaced together",
        together.assign(kind=together["kind"].str.partition(": ")[2]),
        {"kind": "of", "tokens": "tokens", "value": "loss increase, nats", "parts": "parts"},
    )


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


def print_expected(model: TransformerBridge, n_tokens: float, more: float, thorough: str) -> None:
    """Print on stderr about how long a model takes for so many tokens, and for ``more`` operations.

    ``thorough`` names the options that less or more is asked for by.
    """
    operations = 2 * sum(weight.numel() for weight in model.parameters()) * n_tokens + more
    seconds = operations / (_SHARE * _operations_per_second(model))
    if parallel.is_main() and seconds > _WORTH_SAYING:
        print(f"This takes about {duration(seconds)} on this machine ({thorough}).", file=sys.stderr)


def duration(seconds: float) -> str:
    """A time in words, to one digit or two."""
    for unit, length in (("hour", 3600), ("minute", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}s"
    return "a minute" if seconds > 45 else f"{seconds:.0f} seconds"


def _operations_per_second(model: TransformerBridge) -> float:
    """The best of ten products of matrices in the precision of the model."""
    import torch

    weight = next(model.parameters())
    side = torch.rand(_SIDE, _SIDE, device=weight.device, dtype=weight.dtype)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        float((side @ side)[0, 0])  # which waits for a GPU
        best = min(best, time.perf_counter() - began)
    return float(2 * _SIDE**3 / best)
