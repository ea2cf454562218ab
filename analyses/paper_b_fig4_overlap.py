"""Paper B, Figure 4: how far the final norm changes which tokens value vectors promote.

Overlap (IoU) of the 30 top tokens by ``E v`` and by ``E ln_f(v)`` at every layer, of all value vectors and of
random vectors with their mean and standard deviation. Expect a large overlap of the value vectors, so that
reading them without the norm is sound, and a smaller one of the random vectors. The paper's figure is
``--model gpt2``. The table also says how far the value vectors lie above the random ones, with tests. Only
the weights are read, so there is no corpus.
"""

from __future__ import annotations

from typing import Annotated

import typer
from figures.paper_b import shares_by_layer
from studies import Report, Study, run_study
from sub_updates import norm_overlap

NAME = "paper_b_fig4_overlap"


def main(
    study: Study,
    report: Report,
    random: Annotated[int, typer.Option(min=2, help="Random vectors at each layer.")] = 500,
    top: Annotated[int, typer.Option(min=1, help="Tokens of each list.")] = 30,
) -> None:
    """Compare what vectors promote with and without the final norm, and draw the overlap layer by layer."""
    table = norm_overlap(study.model, n_random=random, k=top, seed=study.seed)
    origin = study.origin_of_weights | {"n_random": random}
    shares = table[(table["method"] != "difference") & table["layer"].notna()].astype({"layer": int})
    report.write(NAME, table, origin, shares_by_layer(shares, f"overlap of the {top} top tokens (IoU)"))


if __name__ == "__main__":
    run_study(main, corpus=None)
