"""Which tokens FFNs and norms are fitted on, and at which they are replaced: what decides over Figure 10.

``mat_ffn`` and ``mat_ln1_ln2`` from some layers to the last, fitted on all drawn tokens, on all but first
tokens, or on all but attention sinks; replaced at all tokens, all but the first, all but sinks, or only at
the predicted token. Expect a model with sinks to lose its prediction where sinks are fitted or replaced.
"""

from __future__ import annotations

from typing import Annotated

import pandas as pd
import typer
from figures.paper_a import by_fitting
from paper_a import CONTEXTUAL, precision_by_layer, rows_of_replacement, submodule_positions
from rich.console import Console
from rich.table import Table
from studies import Patched, Report, Study, run_study

NAME = "submodule_positions"


def main(
    study: Study,
    report: Report,
    patched: Patched = 300,
    every: Annotated[int, typer.Option(min=1, help="Start from every so many layers.")] = 8,
) -> None:
    """Run every combination, and print Precision@1 by layer."""
    stand_ins, some = study.stand_ins("all", "not-first", "not-sink"), study.validation.head(patched)
    table = submodule_positions(
        study.readout, study.model, study.maps, stand_ins, some,
        every=every, folder=study.folder / f"{NAME}-{every}-{some.n_rows}",
    )  # fmt: skip
    report.write(NAME, table, study.origin)
    show(table)
    for replaced in CONTEXTUAL:
        report.write_figure(f"{NAME}_{replaced}", by_fitting(rows_of_replacement(table, replaced)))


def show(table: pd.DataFrame) -> None:
    """Print Precision@1, a row for each combination."""
    wide = precision_by_layer(table)
    printed = Table("Precision@1 from layer", *map(str, wide.columns))
    for method, line in wide.iterrows():
        printed.add_row(str(method), *(f"{value:.3f}" for value in line))
    Console().print(printed)


if __name__ == "__main__":
    run_study(main)
