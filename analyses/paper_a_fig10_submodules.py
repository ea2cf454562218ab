"""Paper A, Figure 10: blocks with one kind of sub-module replaced by a linear map.

``mat_attn``, ``mat_ffn`` and ``mat_ln1_ln2`` from every layer to the last, compared with ``mat``. Expect
attention to suffer least. In the paper (``--model gpt2-medium``) all three beat ``mat`` from about layer 7 of
24 on. FFNs and norms are fitted and replaced at all tokens, as in the paper, and at all tokens but attention
sinks, which is closer to the paper's picture in models that have them.
"""

from __future__ import annotations

from typing import Annotated

import typer
from figures.paper_a import by_method
from paper_a import submodule_layers
from studies import Patched, Report, Study, run_study

NAME = "paper_a_fig10_submodules"


def main(
    study: Study,
    report: Report,
    patched: Patched = 3000,
    every: Annotated[int, typer.Option(min=1, help="Start from every so many layers.")] = 1,
) -> None:
    """Fit all sub-modules, replace each kind from every layer on, and draw what is left of the prediction."""
    stand_ins = study.stand_ins("all", "not-sink")
    n_patched = min(patched, study.validation.n_rows)
    table = submodule_layers(
        study.readout, study.model, study.maps, stand_ins, study.validation,
        every=every, patched=patched, folder=study.folder / f"{NAME}-{every}-{n_patched}",
    )  # fmt: skip
    report.write(NAME, table, study.origin, by_method(table))


if __name__ == "__main__":
    run_study(main)
