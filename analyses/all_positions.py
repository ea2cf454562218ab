"""One drawn position a sentence against all positions, for the same forward passes.

The paper takes one position of each sentence. The passes that give it give every other position too, so
maps can be fitted on some thirty times as many samples, which are streamed and never held. Expect them to
generalise better, most of all from early layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from matlens import InputError, MapSet, collect, make_examples
from matlens.activations import stream
from matlens.cli import Report, run_study
from matlens.corpora import is_masked
from matlens.lens import fit_quality, prediction_quality
from matlens.linear import fit_samples, fit_stream
from matlens.models import Provenance
from matlens.study import Study, origin_of

NAME = "all_positions"


def main(study: Study, report: Report) -> None:
    """Fit the maps to the last layer both ways from one pass, and print both in one table."""
    model = study.model
    if is_masked(model):
        raise InputError(
            f"{model.cfg.model_name} is a masked-LM model: only the drawn token of each sentence is masked, "
            "and the others are no predictions. Expected a decoder."
        )
    fitted_on = make_examples(model, study.parts[0], seed=study.seed)
    validation = collect(model, study.validation_examples)
    sites, last = list(validation), study.n_layers
    pairs = [(layer, last) for layer in range(last)]
    drawn_row = fitted_on.offsets[:-1] + fitted_on.positions
    sentence_of = {int(row): sentence for sentence, row in enumerate(drawn_row)}
    drawn = {site: torch.empty(study.n_train, model.cfg.d_model) for site in sites}

    def all_vectors() -> Iterator[dict[str, torch.Tensor]]:
        for rows in stream(model, fitted_on, sites, positions="all"):
            kept = [(i, sentence_of[int(row)]) for i, row in enumerate(rows.index) if int(row) in sentence_of]
            here, there = map(list, zip(*kept, strict=True))
            for site, vectors in rows.vectors.items():
                drawn[site][there] = vectors[here]
            yield rows.vectors

    origin = Provenance(validation.provenance.model, fitted_on.provenance)
    of_all = MapSet(fit_stream(all_vectors(), pairs, provenance=replace(origin, positions="all")))
    of_drawn = MapSet(fit_samples(drawn, pairs, provenance=replace(origin, positions="drawn")))
    tables = []
    for name, maps in (("drawn", of_drawn), ("all", of_all)):
        parts = [fit_quality(maps, validation), prediction_quality(study.readout, maps, validation)]
        table = pd.concat(parts)
        tables.append(table[table["method"] == "mat"].assign(method=f"mat, {name}"))
    table = pd.concat(tables, ignore_index=True)
    report.write(NAME, table, origin_of(of_all, validation))
    show(table)


def show(table: pd.DataFrame) -> None:
    """Print r2 onto the last layer and Precision@1 of both fits side by side."""
    chosen = table[(table["metric"] == "r2") | (table["k"] == 1)]
    wide = chosen.pivot_table(index="layer", columns=["metric", "method"], values="value")
    wide.columns = [" ".join(column).replace("precision", "P@1") for column in wide.columns.to_list()]
    printed = Table("layer", *wide.columns)
    for layer, row in wide.iterrows():
        printed.add_row(str(layer), *("" if pd.isna(value) else f"{value:.3f}" for value in row))
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, train=4000, val=1000, figures=False)
