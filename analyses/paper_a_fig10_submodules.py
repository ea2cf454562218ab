"""Paper A, Figure 10: blocks with one kind of sub-module replaced by a linear map.

``mat_attn``, ``mat_ffn`` and ``mat_ln1_ln2`` from every layer to the last, compared with ``mat``. Expect
attention to suffer least. In the paper (``--model gpt2-medium``) all three beat ``mat`` from about layer 7 of
24 on. FFNs and norms are fitted and replaced at all tokens, as in the paper, and at all tokens but attention
sinks, which is closer to the paper's picture in models that have them.
"""

from __future__ import annotations

import itertools

from figures.paper_a import by_method
from paper_a.submodules import CONTEXTUAL, SubmoduleCase, attend_nowhere, rows_of_cases, with_mat
from studies import Patched, Report, Study, run_study

from matlens.errors import PositiveInt
from matlens.lens import evaluate, prediction_rows
from matlens.parallel import Bar

NAME = "paper_a_fig10_submodules"


def main(study: Study, report: Report, patched: Patched = 3000, every: PositiveInt = 1) -> None:
    """Fit all sub-modules, replace each kind from every layer on, and plot the accuracy.

    Parameters
    ----------
    every
        Start from every n-th layer.
    """
    fits, validation, last = study.submodule_maps("all", "not-sink"), study.validation, study.n_layers
    layers = sorted({*range(0, last, every), last - 1})
    bar = Bar(layers, desc="mat_attn", unit="layer")
    # Without attention tokens are independent, so single vectors suffice.
    vectors = {
        layer: attend_nowhere(study.model, fits["all"], validation[layer], layer, last) for layer in bar
    }
    evaluated = evaluate(study.readout, validation[last], vectors)
    rows = [
        row
        for layer in layers
        for row in prediction_rows(NAME, validation, "mat_attn", layer, evaluated[layer])
    ]
    cases = {}
    for replaced, layer in itertools.product(CONTEXTUAL, layers):
        cases[SubmoduleCase(replaced, "all", "all", layer)] = replaced
        cases[SubmoduleCase(replaced, "not-sink", "not-sink", layer)] = f"{replaced} without sinks"
    some = validation.head(min(patched, validation.n_rows))
    folder = study.folder / f"{NAME}-{every}-{some.n_rows}"
    rows += rows_of_cases(study, fits, some, cases, NAME, folder)
    table = with_mat(study, validation, rows, NAME, list(range(last)))
    report.write(NAME, table, study.origin, by_method(table))


if __name__ == "__main__":
    run_study(main)
