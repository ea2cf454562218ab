"""How many sentences least squares needs: r2 onto the last layer by the number that maps are fitted on.

Maps as in Figure 2 of paper A, fitted on all training sentences and on the first half, quarter and eighth of
them, tested on the same validation sentences. Expect r2 far below zero where there are fewer than twice as
many sentences as ``d_model``: without a penalty least squares follows the noise of its samples.
"""

from __future__ import annotations

import pandas as pd
from paper_a import fit_quality_by_size
from rich.console import Console
from rich.table import Table
from studies import Report, Study, run_study

NAME = "sample_sizes"


def main(study: Study, report: Report) -> None:
    """Fit on fewer and fewer sentences, and print r2 onto the last layer by layer."""
    table = fit_quality_by_size(*study.stream)
    report.write(NAME, table, study.origin)
    show(table)


def show(table: pd.DataFrame) -> None:
    """Print r2, a row for each layer and a column for each number of sentences."""
    wide = table.pivot(index="layer", columns="n_fitted", values="value")
    printed = Table("layer", *(f"{n:,}" for n in wide.columns))
    for layer, row in wide.iterrows():
        printed.add_row(str(layer), *(f"{value:.3f}" for value in row))
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, figures=False)
