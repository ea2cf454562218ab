"""One drawn position a sentence against all positions, for the same forward passes.

The paper takes one position of each sentence. The passes that give it give every other position too, so
maps can be fitted on some thirty times as many samples, which are streamed and never held. Expect them to
generalise better, most of all from early layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from matlens import InputError, MapSet, Readout, collect, load, load_corpus, make_examples
from matlens.activations import stream
from matlens.cli import options, run_script
from matlens.corpora import is_masked
from matlens.lens import fit_quality, prediction_quality
from matlens.linear import fit_samples, fit_stream
from matlens.models import Provenance
from matlens.storage import write_results
from matlens.study import workflow

NAME = "all_positions"


def main(
    model: options.Model = "smollm2-135m",
    corpus: options.CorpusName = "wikipedia-sample",
    train: options.Train = 4000,
    val: options.Val = 1000,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Fit the maps to the last layer both ways from one pass, and print both in one table."""
    loaded = load(model, device=device)
    if is_masked(loaded):
        raise InputError(
            f"{model} is a masked-LM model: only the drawn token of each sentence is masked, and the others "
            "are no predictions. Expected a decoder."
        )
    parts = load_corpus(corpus).split(n_train=train, n_validation=val, seed=seed)
    fitted_on, tested_on = (make_examples(loaded, part, seed=seed) for part in parts)
    validation = collect(loaded, tested_on)
    sites, last = list(validation), loaded.cfg.n_layers
    pairs = [(layer, last) for layer in range(last)]
    drawn_row = fitted_on.offsets[:-1] + fitted_on.positions
    row_of = {int(row): sentence for sentence, row in enumerate(drawn_row)}
    drawn = {site: torch.empty(train, loaded.cfg.d_model) for site in sites}

    def passing() -> Iterator[dict[str, torch.Tensor]]:
        for rows in stream(loaded, fitted_on, sites, positions="all"):
            own = [(i, row_of[int(row)]) for i, row in enumerate(rows.index) if int(row) in row_of]
            here, there = map(list, zip(*own, strict=True))
            for site, vectors in rows.vectors.items():
                drawn[site][there] = vectors[here]
            yield rows.vectors

    origin = Provenance(validation.provenance.model, fitted_on.provenance)
    every = MapSet(fit_stream(passing(), pairs, provenance=replace(origin, positions="all")))
    one = MapSet(fit_samples(drawn, pairs, provenance=replace(origin, positions="drawn")))
    readout, tables = Readout(loaded), []
    for name, maps in (("drawn", one), ("all", every)):
        table = pd.concat([fit_quality(maps, validation), prediction_quality(readout, maps, validation)])
        tables.append(table[table["method"] == "mat"].assign(method=f"mat, {name}"))
    table = pd.concat(tables, ignore_index=True)
    write_results(out, NAME, table, workflow.origin_of(every, validation))
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
    run_script(main)
