"""One drawn position a sentence against all positions, for the same forward passes.

The paper takes one position of each sentence. The passes that give it give every other position too, so
maps can be fitted on some thirty times as many samples, which are streamed and never held. Expect them to
generalise better, most of all from early layers.
"""

from __future__ import annotations

import pandas as pd
from paper_a import compare_fits, fit_drawn_and_all, fits_side_by_side
from rich.console import Console
from rich.table import Table
from studies import Report, Study, run_study

from matlens import collect, make_examples
from matlens.study import origin_of

NAME = "all_positions"


def main(study: Study, report: Report) -> None:
    """Fit the maps to the last layer both ways from one pass, and print both in one table."""
    model = study.model
    maps = fit_drawn_and_all(model, make_examples(model, study.parts[0], seed=study.seed))
    validation = collect(model, study.validation_examples)
    table = compare_fits(study.readout, maps, validation)
    report.write(NAME, table, origin_of(maps["all"], validation))
    show(fits_side_by_side(table))


def show(wide: pd.DataFrame) -> None:
    """Print r2 onto the last layer and Precision@1 of both fits side by side."""
    printed = Table("layer", *wide.columns)
    for layer, row in wide.iterrows():
        printed.add_row(str(layer), *("" if pd.isna(value) else f"{value:.3f}" for value in row))
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, train=4000, val=1000, figures=False)
