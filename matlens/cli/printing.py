"""What commands print: tables, paths, and one line for an error that the user can mend."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from matlens import parallel
from matlens.errors import InputError, InputWarning, printable
from matlens.io.files import system_errors
from matlens.io.numbers import number_text

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.ffn.projection import Projection

_BAD_INPUT, INTERRUPTED, _PIPE_CLOSED = 2, 130, 141
_WIDTH_OF_TEXT = 24  # characters that the last column of a table has at least, however narrow the terminal
_METRICS = {"r2": "r2", "precision": "P@1", "surprisal": "surprisal"}  # and what their columns are called
_SIDE = 1024  # of the square matrices whose product is timed
_SHARE = 0.6  # of the speed of such products that whole models reach, as measured on SmolLM2-135M
_WORTH_SAYING = 30  # seconds
_LONGEST_ECHO = 400  # characters of a message about an option; what was typed can be of any length


def report_errors(work: Callable[[], Any]) -> None:
    """Do some work; print what the user can mend in a line, and exit with code 2.

    An exit code that the work gives back is the process's. An interruption is a line as well, and a reader
    of the output who has gone, as ``head`` does, ends the process without a word.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character is shown its number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    refusal: Exception | None = None
    message = ""
    try:
        with system_errors("the output folder"), _warnings_as_lines():
            code = work()
            sys.stdout and sys.stdout.flush()
        if not isinstance(code, int) or not code:
            return
    except InputError as error:
        code, message = _BAD_INPUT, str(error)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SystemExit as stop:
        if stop.code != INTERRUPTED:
            raise
        code = INTERRUPTED
    except BrokenPipeError:
        code = _PIPE_CLOSED
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's word on options that it cannot read
            raise
        code, refusal = _BAD_INPUT, error
    # Printed only here: while the exception lives, a bar that it came through is open, on an unfinished line.
    if message:
        Console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {message}"), soft_wrap=True)
    elif refusal is not None:
        _print_refusal(refusal)
    elif code == INTERRUPTED:
        Console(stderr=True).print("Interrupted. Run the same command again, and it goes on from here.")
    sys.exit(code)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print each `InputWarning` as one line, without the place in the code that Python puts before it."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def print_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, InputWarning):
                tqdm.write(f"warning: {message}", file=sys.stderr)  # above the bars
            else:
                show(message, category, *where, **more)

        warnings.showwarning = print_warning
        yield


def _print_refusal(refusal: Any) -> None:
    """Print typer's word on options; what was typed is echoed no longer than a message can be."""
    from typer.rich_utils import rich_format_error

    refusal.message = printable(refusal.message, most=_LONGEST_ECHO, keep="\n")
    rich_format_error(refusal)


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
        The tables of `matlens.lens.report_table` and of `matlens.lens.exit_sweep`.
    """
    from matlens.lens.early_exit import savings
    from matlens.lens.evaluation import report_by_member

    wide = report_by_member(report).join(savings(exits).set_index("method")["saved"])
    digits = {
        "P@1": 3, "P@10": 3, "surprisal": 2, "kl": 2, "r2": 3, "saved": 2, "seconds": 2, "numbers": 0
    }  # fmt: skip
    wide = wide.reindex(columns=list(digits)).astype(float)  # no lens may have r2
    wide["lens"] = wide.index
    title = "Means over the layers; layers saved at 95%; seconds of a processor and numbers for one layer"
    print_frame(title, wide, {name: name for name in ("lens", *digits)}, digits=digits)


def print_atlas(table: Any, correlations: Any) -> None:
    """Print which score tells what replacing a part costs, and what the first parts cost together.

    Parameters
    ----------
    table, correlations
        The tables of `matlens.linearity.linearity_atlas` and of `matlens.linearity.rank_correlations`.
    """
    print_frame(
        "Rank correlation of scores with the rise of the loss, over all parts",
        correlations[correlations["kind"] == "all kinds"],
        {
            "metric": "score", "method": "part is", "tokens": "tokens", "value": "correlation", "low": "from",
            "high": "to",
        },
    )  # fmt: skip
    together = table[table["kind"].str.startswith("together") & (table["metric"] == "rise")]
    print_frame(
        "Parts replaced together",
        together.assign(kind=together["kind"].str.partition(": ")[2]),
        {"kind": "of", "tokens": "tokens", "value": "rise, nats", "parts": "parts"},
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


def print_expected(model: TransformerBridge, operations: float, thorough: str = "") -> None:
    """Print on stderr about how long so many floating-point operations take where the model is.

    ``thorough`` is what less or more of it is asked for by.
    """
    seconds = operations / (_SHARE * _operations_per_second(model))
    if parallel.is_main() and seconds > _WORTH_SAYING:
        more = f" ({thorough})" if thorough else ""
        print(f"This takes about {duration(seconds)} on this machine{more}.", file=sys.stderr)


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
