"""One sampled position per sentence against all positions, for the same forward passes.

The paper samples one position of each sentence. The same forward passes give all other positions too,
some thirty times as many samples, which are streamed. Expect these maps to generalize better, most of all
from early layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pandas as pd
import torch
from studies import Model, Report, Study, run_study, show

from matlens import InputError, MapSet, Readout, collect, make_examples
from matlens.activations import Activations, stream
from matlens.data import Examples
from matlens.lens import fit_quality, prediction_quality
from matlens.linear import fit_stream
from matlens.models import ModelIdentity, ModelLayout, Provenance
from matlens.study import origin_of

NAME = "all_positions"


def main(study: Study, report: Report) -> None:
    """Fit maps to the last layer on both, and compare them."""
    model = study.model
    maps = fit_sampled_and_all(model, make_examples(model, study.parts[0], seed=study.seed))
    validation = collect(model, study.validation_examples)
    table = compare_fits(study.readout, maps, validation)
    report.write(NAME, table, origin_of(maps["all"], validation))
    chosen = table[(table["metric"] == "r2") | (table["k"] == 1)]
    show("r2 and Precision@1", chosen.pivot(index="layer", columns=["metric", "method"], values="value"))


def fit_sampled_and_all(model: Model, examples: Examples) -> dict[str, MapSet]:
    """Maps to the last layer from one pass, fitted on ``sampled`` and on ``all`` positions.

    Sampled vectors are in memory, the others are streamed.
    """
    if model.cfg.attention_dir == "bidirectional":
        raise InputError(
            f"model must be a decoder, got {model.cfg.model_name}, which predicts masked tokens."
        )
    sites = list(map(str, ModelLayout.from_model(model).stream))
    last = len(sites) - 1
    pairs = [(layer, last) for layer in range(last)]
    starts = examples.offsets[examples.sentences]
    number_of = {int(row): i for i, row in enumerate(starts + examples.positions)}
    sampled = {site: torch.empty(examples.n_positions, model.cfg.d_model) for site in sites}

    def all_vectors() -> Iterator[dict[str, torch.Tensor]]:
        for rows in stream(model, examples, sites, positions="all"):
            matched = [(i, number_of[int(row)]) for i, row in enumerate(rows.index) if int(row) in number_of]
            here, there = map(list, zip(*matched, strict=True))
            for site, vectors in rows.vectors.items():
                sampled[site][there] = vectors[here]
            yield rows.vectors

    origin = Provenance(ModelIdentity.from_model(model), examples.provenance)
    of_all = MapSet(fit_stream(all_vectors(), pairs, provenance=replace(origin, positions="all")))
    of_sampled = MapSet(fit_stream([sampled], pairs, provenance=replace(origin, positions="sampled")))
    return {"sampled": of_sampled, "all": of_all}


def compare_fits(readout: Readout, maps: Mapping[str, MapSet], validation: Activations) -> pd.DataFrame:
    """r2 and prediction quality of ``mat`` of each fit; the methods are called ``mat, <fit>``."""
    tables = []
    for name, fits in maps.items():
        table = pd.concat([fit_quality(fits, validation), prediction_quality(readout, fits, validation)])
        tables.append(table[table["method"] == "mat"].assign(method=f"mat, {name}"))
    return pd.concat(tables, ignore_index=True)


if __name__ == "__main__":
    run_study(main, train=4000, val=1000)
