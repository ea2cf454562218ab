"""What commands print: tables, paths, and one line for an error that the user can mend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from matlens.errors import InputError
from matlens.storage.files import system_errors

if TYPE_CHECKING:
    import pandas as pd

    from matlens.ffn.projection import Projection

_BAD_INPUT, _INTERRUPTED = 2, 130


def report_errors(work: Callable[[], Any]) -> None:
    """Do some work; print what the user can mend in a line, and exit with code 2."""
    try:
        with system_errors("the output folder"):
            work()
        return
    except InputError as error:
        message = escape(str(error))
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:  # what typer makes of Ctrl-C
            Console(stderr=True).print("Interrupted. Run the same command again, and it goes on from here.")
        raise
    # Printed only here: while the exception lives, a bar that it came through is open, on an unfinished line.
    Console(stderr=True).print(f"[bold red]error:[/] {message}", highlight=False, soft_wrap=True)
    sys.exit(_BAD_INPUT)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table of which all columns but the last keep their width."""
    table = Table(*columns, title=escape(title), title_justify="left")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)


def print_layers(results: pd.DataFrame) -> None:
    """Print how well maps onto the last layer fit and predict, a line for each layer."""
    from matlens.lens.quality import layer_table

    wide = layer_table(results)
    table = Table(
        "layer", *wide.columns, title=f"Onto layer {results['target'].max()}, on the validation sentences"
    )
    for layer, row in wide.iterrows():
        table.add_row(str(layer), *("–" if value != value else f"{value:.3f}" for value in row))
    Console().print(table)


def print_figures(paths: Sequence[Path]) -> None:
    """Print where figures are."""
    print("Figures: " + ", ".join(map(str, paths)))


def top_texts(projection: Projection, vectors: Any, k: int) -> list[str]:
    """The top tokens of vectors, as people see them, a line for each."""
    from matlens.models.vocabulary import token_texts, visible

    return [
        ", ".join(map(visible, token_texts(projection.tokenizer, ids)))
        for ids in projection.top(vectors, k).ids
    ]
