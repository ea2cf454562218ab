"""Removal against projection: which reading of value vectors is true to a model.

The dominant sub-updates at one drawn position of each sentence are left out, one at a time, and what that
changes in the logits is compared with the scores that their value vectors give to all tokens: as they are
(``E v``, the paper's), with the gains of the norms that they pass on their way to the logits, and through the
final norm. The logits are those of the stream behind the layer, and those of the whole model. A random value
vector of the layer stands next to them. Expect the readings with the gains to agree better than ``E v``, and
all of them to agree less with the whole model the earlier the layer is.
"""

from __future__ import annotations

from typing import Annotated

import typer
from figures.paper_b import removal_figure
from studies import Report, Study, run_study
from sub_updates import removal_table

NAME = "paper_b_removal"


def main(
    study: Study,
    report: Report,
    dominant: Annotated[int, typer.Option(min=1, help="Sub-updates of each layer that are left out.")] = 3,
    every: Annotated[int, typer.Option(min=1, help="Every so many layers, the last among them.")] = 5,
    top: Annotated[int, typer.Option(min=1, help="Tokens of each list.")] = 30,
) -> None:
    """Leave out dominant sub-updates, and compare what changes with readings of their value vectors."""
    examples = study.validation_examples
    layers = range(study.values.n_layers)[::-1][::every]
    table = removal_table(study.model, examples, k=dominant, layers=layers, n_tokens=top, seed=study.seed)
    origin = study.origin_of_weights | {"data": examples.provenance, "dominant": dominant}
    report.write(NAME, table, origin, removal_figure(table))


if __name__ == "__main__":
    run_study(main, sentences=60)
