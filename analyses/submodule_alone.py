"""FFNs replaced one block at a time: which are linear, and the effect of sinks.

Maps are fitted and applied at all tokens, and at all except attention sinks. Expect most blocks to lose
little alone, and blocks whose fit is dominated by sinks to lose less without them.
"""

from __future__ import annotations

from figures.paper_a import by_method
from paper_a.submodules import SubmoduleCase, rows_of_cases
from studies import Patched, Report, Study, run_study

from matlens.io import result_table

NAME = "submodule_alone"
METHODS = {"all": "mat_ffn", "not-sink": "mat_ffn without sinks"}


def main(study: Study, report: Report, patched: Patched = 300) -> None:
    """Replace the FFN of one block at a time, and plot the prediction quality."""
    fits, some = study.submodule_maps(*METHODS), study.validation.head(patched)
    cases = {
        SubmoduleCase("mat_ffn", fitted, fitted, block, block + 1): method
        for fitted, method in METHODS.items()
        for block in range(study.n_layers)
    }
    folder = study.folder / f"{NAME}-{some.n_rows}"
    table = result_table(rows_of_cases(study, fits, some, cases, NAME, folder))
    report.write(NAME, table, study.origin, by_method(table))


if __name__ == "__main__":
    run_study(main)
