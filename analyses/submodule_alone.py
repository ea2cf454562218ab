"""FFNs replaced in one block at a time: which of them are linear, and what sinks do to the fit.

Fitted and replaced at all tokens, and at all that are no attention sinks. Expect most blocks to lose little
alone, and those whose fit few sinks decide to lose less once sinks are out of it.
"""

from __future__ import annotations

from figures.paper_a import by_method
from paper_a import submodule_alone
from studies import Patched, Report, Study, run_study

NAME = "submodule_alone"


def main(study: Study, report: Report, patched: Patched = 300) -> None:
    """Replace the FFN of each block alone, and draw what is left of the prediction."""
    stand_ins, some = study.stand_ins("all", "not-sink"), study.validation.head(patched)
    table = submodule_alone(
        study.readout, study.model, stand_ins, some, folder=study.folder / f"{NAME}-{some.n_rows}"
    )
    report.write(NAME, table, study.origin, by_method(table))


if __name__ == "__main__":
    run_study(main)
