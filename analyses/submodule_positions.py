"""Which tokens FFNs and norms are fitted on, and at which they are replaced: what decides over Figure 10.

``mat_ffn`` and ``mat_ln1_ln2`` from some layers to the last, fitted on all drawn tokens, on all but first
tokens, or on all but attention sinks; replaced at all tokens, all but the first, all but sinks, or only at
the predicted token. Expect a model with sinks to lose its prediction where sinks are fitted or replaced.
"""

from __future__ import annotations

import itertools
from typing import Annotated

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.table import Table

from matlens import mat_ffn, mat_ln1_ln2
from matlens.activations import find_sinks
from matlens.cli import Patched, Report, run_study
from matlens.corpora import Examples
from matlens.lens import as_substitute, judge_predictions, prediction_quality, prediction_rows
from matlens.patching import Variant, Where, run_variants
from matlens.plots import by_fitting
from matlens.study import Fitted, Study

NAME = "submodule_positions"
CONTEXTUAL = {"mat_ffn": mat_ffn, "mat_ln1_ln2": mat_ln1_ln2}
FITTED: tuple[Fitted, ...] = ("all", "not-first", "not-sink")


def main(
    study: Study,
    report: Report,
    patched: Patched = 300,
    every: Annotated[int, typer.Option(min=1, help="Start from every so many layers.")] = 8,
) -> None:
    """Run every combination, and print Precision@1 by layer."""
    maps = {fitted: study.submodule_maps(fitted) for fitted in FITTED}
    last, some = study.n_layers, study.validation.head(patched)
    layers = sorted({*range(0, last, every), last - 3, last - 1} & {*range(last)})
    variants, names = {}, {}
    ways = itertools.product(CONTEXTUAL, FITTED, places(study, some.examples), layers)
    for name, fitted, (replaced, where), layer in ways:
        key = f"{name} {fitted} {replaced}.{layer}"
        names[key] = f"{name}, fit {fitted}, replace {replaced}", layer
        variants[key] = Variant(layer, CONTEXTUAL[name](maps[fitted], layer, last, where=where))
    outputs = run_variants(
        study.model, some.examples, variants,
        folder=study.folder / f"{NAME}-{every}-{some.n_rows}", origin=maps["all"].provenance.to_json(),
    )  # fmt: skip
    judged = judge_predictions(
        study.readout, some[last], {key: as_substitute(outputs[key]) for key in variants}
    )
    rows = [
        row
        for key, predictions in judged.items()
        for row in prediction_rows(NAME, some, *names[key], predictions)
    ]
    blocks = prediction_quality(study.readout, study.maps, some, methods=["mat"])
    blocks = blocks[blocks["layer"].isin(layers)].assign(experiment=NAME)
    table = pd.concat([blocks, pd.DataFrame(rows)], ignore_index=True)
    report.write(NAME, table, study.origin)
    show(table)
    for name in CONTEXTUAL:
        part = table[table["method"].str.startswith(name) | (table["method"] == "mat")]
        report.write_figure(f"{NAME}_{name}", by_fitting(part))


def places(study: Study, examples: Examples) -> list[tuple[str, Where]]:
    """At which tokens to replace, by name."""
    drawn = torch.from_numpy(examples.positions)
    sinks = find_sinks(study.model, examples)
    return [("all", "all"), ("not-first", "not-first"), ("not-sink", ~sinks), ("predicted", drawn)]


def show(table: pd.DataFrame) -> None:
    """Print Precision@1, a row for each combination."""
    wide = table[table["k"] == 1].pivot_table(index="method", columns="layer", values="value", sort=False)
    printed = Table("Precision@1 from layer", *map(str, wide.columns))
    for method, line in wide.iterrows():
        printed.add_row(str(method), *(f"{value:.3f}" for value in line))
    Console().print(printed)


if __name__ == "__main__":
    run_study(main)
