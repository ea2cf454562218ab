"""Paper A, Figure 6: running some blocks and jumping over the others.

All weighted round-robin schemes (WRR) and, for each number of blocks, the one whose jumps have the greatest
product of r2 (R2), compared with the fixed exits of ``mat`` and ``id``. Expect some schemes above ``mat``
with the same number of blocks, and R2 good in the first half. The paper's figure is ``--model gpt2-medium``.

Attention sinks have most of what r2 sees in many models, so R2 is there twice more: with schemes that are
chosen by r2 on all other tokens, and with maps that are fitted on these as well and jump at these alone.
"""

from __future__ import annotations

from figures.paper_a import alternation
from paper_a import scheme_quality
from studies import Patched, Report, Study, run_study

NAME = "paper_a_fig6_alternation"


def main(study: Study, report: Report, patched: Patched = 3000) -> None:
    """Run every scheme over the validation sentences and draw Precision@1 against the blocks run."""
    n_patched = min(patched, study.validation.n_rows)
    table = scheme_quality(
        study.readout, study.model, study.maps, study.validation,
        without_sinks=study.maps_without_sinks, patched=patched, folder=study.folder / f"{NAME}-{n_patched}",
    )  # fmt: skip
    report.write(NAME, table, study.origin, alternation(table))


if __name__ == "__main__":
    run_study(main)
