"""Memory against layers saved: what maps cost in bytes and multiplications compared with what they save.

Fixed exit at every layer: one map in the place of all blocks behind it. Early exit at a Precision@1 of 80% to
99%: a map for every layer is stored in addition to all blocks, and each layer that is run costs a map and a
read-out of the whole vocabulary, which paper A does not count. ``id`` has no maps, and the same
read-outs.
"""

from __future__ import annotations

from figures.paper_a import costs_figure
from paper_a import exit_costs
from studies import Report, Study, run_study

NAME = "memory_and_layers"


def main(study: Study, report: Report) -> None:
    """Count what fixed and early exit keep, compute and save, and draw both."""
    table = exit_costs(study.readout, study.model, study.maps, study.validation)
    report.write(NAME, table, study.origin, costs_figure(table))


if __name__ == "__main__":
    run_study(main)
