"""Paper A, Figure 10: blocks with one kind of sub-module replaced by its linear stand-in.

``mat_attn``, ``mat_ffn`` and ``mat_ln1_ln2`` from every layer to the last, beside ``mat``. Expect attention
to suffer least. In the paper (``--model gpt2-medium``) all three beat ``mat`` from about layer 7 of 24 on.
FFNs and norms are fitted and replaced at all tokens, as in the paper, and at all tokens that are no
attention sinks, which is closer to the paper's picture in models that have them.
"""

from __future__ import annotations

import itertools
from typing import Annotated

import pandas as pd
import typer

from matlens import mat_ffn, mat_ln1_ln2, plots
from matlens.activations import find_sinks
from matlens.cli import Patched, Report, run_study
from matlens.lens import as_substitute, judge_predictions, prediction_quality, prediction_rows
from matlens.patching import Variant, attend_nowhere, run_variants
from matlens.study import Study

NAME = "paper_a_fig10_submodules"
CONTEXTUAL = {"mat_ffn": mat_ffn, "mat_ln1_ln2": mat_ln1_ln2}


def main(
    study: Study,
    report: Report,
    patched: Patched = 3000,
    every: Annotated[int, typer.Option(min=1, help="Start from every so many layers.")] = 1,
) -> None:
    """Fit all sub-modules, replace each kind from every layer on, and draw what is left of the prediction."""
    everywhere, elsewhere = study.submodule_maps("all"), study.submodule_maps("not-sink")
    last, validation = study.n_layers, study.validation
    layers = sorted({*range(0, last, every), last - 1})
    single = {
        ("mat_attn", layer): attend_nowhere(study.model, everywhere, validation[layer], layer, last)
        for layer in layers
    }
    some = validation.head(patched)
    no_sinks = ~find_sinks(study.model, some.examples)
    variants = {}
    for (name, replaced), layer in itertools.product(CONTEXTUAL.items(), layers):
        variants[f"{name}.{layer}"] = Variant(layer, replaced(everywhere, layer, last))
        without = replaced(elsewhere, layer, last, where=no_sinks)
        variants[f"{name} without sinks.{layer}"] = Variant(layer, without)
    outputs = run_variants(
        study.model, some.examples, variants,
        folder=study.folder / f"{NAME}-{every}-{some.n_rows}", origin=everywhere.provenance.to_json(),
    )  # fmt: skip
    rows = []
    for data, vectors in (
        (validation, single),
        (some, {tuple(key.split(".")): outputs[key] for key in variants}),
    ):
        judged = judge_predictions(
            study.readout, data[last], {key: as_substitute(h) for key, h in vectors.items()}
        )
        for (method, layer), predictions in judged.items():
            rows += prediction_rows(NAME, data, str(method), int(layer), predictions)
    blocks = prediction_quality(study.readout, study.maps, validation, methods=["mat"])
    blocks = blocks[blocks["layer"] < last].assign(experiment=NAME)
    table = pd.concat([blocks, pd.DataFrame(rows)], ignore_index=True)
    report.write(NAME, table, study.origin, plots.by_method(table))


if __name__ == "__main__":
    run_study(main)
