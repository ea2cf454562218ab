"""How many sentences least squares needs: r2 to the last layer by training size.

Maps as in Figure 2 of paper A, fitted on all training sentences and on the first half, quarter and eighth of
them, tested on the same validation sentences. Expect r2 far below zero where there are fewer than twice as
many sentences as ``d_model``: without a penalty least squares follows the noise of its samples.
"""

from __future__ import annotations

import pandas as pd
from studies import Report, Study, run_study, show

from matlens import MapSet
from matlens.activations import Activations
from matlens.lens import fit_quality

NAME = "sample_sizes"


def main(study: Study, report: Report) -> None:
    """Fit on fewer and fewer sentences, and print r2 onto the last layer by layer."""
    table = fit_quality_by_size(*study.stream)
    report.write(NAME, table, study.origin)
    show("r2 by number of sentences", table.pivot(index="layer", columns="n_fitted", values="value"))


def fit_quality_by_size(train: Activations, validation: Activations, *, halvings: int = 3) -> pd.DataFrame:
    """r2 to the last layer of maps fitted on all training sentences, half of them, and so on."""
    tables = []
    for i in range(halvings + 1):
        size = len(train.examples) >> i
        table = fit_quality(MapSet.fit(train.head(size), pairs="last"), validation)
        tables.append(table[table["method"] == "mat"].assign(n_fitted=size))
    return pd.concat(tables, ignore_index=True)


if __name__ == "__main__":
    run_study(main)
