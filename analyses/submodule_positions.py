"""Tokens used to fit and replace FFNs and norms, and their effect on Figure 10.

``mat_ffn`` and ``mat_ln1_ln2`` from some layers to the last, fitted on all sampled tokens, on all but first
tokens, or on all but attention sinks; replaced at all tokens, all but the first, all but sinks, or only at
the predicted token. Expect a model with sinks to lose its prediction where sinks are fitted or replaced.
"""

from __future__ import annotations

import itertools

from figures.paper_a import by_fitting
from paper_a.submodules import CONTEXTUAL, PLACES, SubmoduleCase, rows_of_cases, with_mat
from studies import Patched, Report, Study, run_study, show

from matlens.errors import PositiveInt

NAME = "submodule_positions"


def main(study: Study, report: Report, patched: Patched = 300, every: PositiveInt = 8) -> None:
    """Run every combination, and print Precision@1 by layer.

    Parameters
    ----------
    every
        Start from every n-th layer.
    """
    fits, some = study.submodule_maps("all", "not-first", "not-sink"), study.validation.head(patched)
    last = study.n_layers
    layers = sorted({*range(0, last, every), last - 3, last - 1} & {*range(last)})
    cases = {
        SubmoduleCase(replaced, fitted, place, layer): f"{replaced}, fit {fitted}, replace {place}"
        for replaced, fitted, place, layer in itertools.product(CONTEXTUAL, fits, PLACES, layers)
    }
    folder = study.folder / f"{NAME}-{every}-{some.n_rows}"
    rows = rows_of_cases(study, fits, some, cases, NAME, folder)
    table = with_mat(study, some, rows, NAME, layers)
    report.write(NAME, table, study.origin)
    best = table[table["k"] == 1]
    wide = best.pivot_table(index="method", columns="layer", values="value", sort=False)
    show("Precision@1 from each layer", wide)
    for replaced in CONTEXTUAL:
        shown = table["method"].str.startswith(f"{replaced}, fit ") | (table["method"] == "mat")
        report.write_figure(f"{NAME}_{replaced}", by_fitting(table[shown]))


if __name__ == "__main__":
    run_study(main)
