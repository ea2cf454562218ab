"""Ablation by head: the attention of single heads replaced by linear maps.

Paper A replaces the attention of whole blocks (Figure 10); here each head is replaced by its own map,
linear in the attention input at the same token and fitted without sinks. First r2 of every map; then
heads replaced one at a time, and increasing shares of them at once, compared with heads that output their
mean or zero. The gain over the mean is what the head does without reading other tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from figures.paper_a import attention_heads
from jaxtyping import Bool
from studies import Model, Patched, Report, Study, head_pairs, run_study
from torch import Tensor

from matlens import LinearMap, MapSet, Readout, metrics
from matlens.activations import Activations, find_sinks, sink_counts, sink_rows
from matlens.errors import PositiveInt
from matlens.io import result_table
from matlens.lens import evaluate, evaluation, prediction_rows
from matlens.models import ModelLayout
from matlens.patching import Replacement, Variant, run_variants
from matlens.study import origin_of

NAME = "attention_heads"
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
Head = tuple[int, int]  # block and head


def main(study: Study, report: Report, patched: Patched = 3000, every: PositiveInt = 1) -> None:
    """Fit a map for every head, replace heads alone and together, and plot the precision.

    Parameters
    ----------
    every
        Replace single heads in every n-th block.
    """
    stream, _ = study.stream
    train, validation = study.head_samples
    rows, validation_rows = ~sink_rows(stream), ~sink_rows(study.validation)
    maps = MapSet.fit(train, pairs=head_pairs(ModelLayout.from_model(study.model)), rows=rows)
    n_patched = min(patched, validation.n_rows)
    table = head_ablation(
        study.readout, study.model, maps, train, validation, rows=rows, validation_rows=validation_rows,
        every=every, patched=n_patched, seed=study.seed, folder=study.folder / f"{NAME}-{n_patched}-{every}",
    )  # fmt: skip
    origin = origin_of(maps, validation) | {"sinks": sink_counts(~rows, stream.places)}
    report.write(NAME, table, origin, attention_heads(table))


def head_r2(
    layout: ModelLayout, maps: MapSet, validation: Activations, rows: Bool[Tensor, " n"]
) -> dict[Head, float]:
    """r2 of every head's map by block and head, averaged over the head's dimensions, for some examples."""
    scores = dict[Head, float]()
    for layer, (source, target) in enumerate(head_pairs(layout)):
        n_heads, _ = layout.hooks[layout.hook(target)].shape
        prediction, truth = maps[source, target](validation[source][rows]), validation[target][rows]
        parts = zip(prediction.chunk(n_heads, 1), truth.chunk(n_heads, 1), strict=True)
        scores |= {(layer, head): metrics.r2(*part) for head, part in enumerate(parts)}
    return scores


def head_ablation(
    readout: Readout,
    model: Model,
    maps: MapSet,
    train: Activations,
    validation: Activations,
    *,
    rows: Bool[Tensor, " n"],
    validation_rows: Bool[Tensor, " n_validation"],
    every: int,
    patched: int,
    seed: int,
    folder: Path,
) -> pd.DataFrame:
    """Replace heads one at a time, and increasing shares of them at once.

    A table with two more columns, ``head`` and ``share``. Rows of the metric ``r2`` are of every head's
    map. Rows with a head are of that head alone, in every n-th block and the last; rows with a share are
    of that share of all heads at once, those with the highest r2 first (``linear``, ``mean`` and
    ``nothing``), or in random order (``linear, random order``). The metrics are those of
    `prediction_rows` and ``kl``, the mean of ``KL(delta(h^L) || delta(h'))``. Heads are replaced at all
    tokens but sinks.
    """
    for samples, theirs in ((train, "the training vectors"), (validation, "the validation vectors")):
        readout.check_same(samples.provenance, theirs=theirs)
    layout = ModelLayout.from_model(model)
    last, scores = layout.n_layers, head_r2(layout, maps, validation, validation_rows)
    pairs, device = head_pairs(layout), model.cfg.device

    def constant(vector: Callable[[str], Tensor]) -> MapSet:
        """Maps whose output is a vector of their target's width."""
        return MapSet(
            LinearMap(torch.zeros_like(linear.weight), vector(linear.target), *pair, linear.provenance)
            for pair, linear in maps.items()
        ).in_memory(device=device)

    replacements = {
        "linear": maps.in_memory(pairs, device=device),
        "mean": constant(lambda target: train[target][rows].mean(0)),
        "nothing": constant(lambda target: torch.zeros(train[target].shape[1])),
    }
    data = validation.head(patched)
    where = ~find_sinks(model, data.examples)
    best = sorted(scores, key=lambda head: -scores[head])
    shuffled = [best[i] for i in np.random.default_rng(seed).permutation(len(best))]
    cases: dict[tuple[str, int | None, int | None, float | None], Variant] = {}

    def case(heads: Sequence[Head], method: str) -> Variant:
        of_heads = [
            Replacement.from_map(
                replacements[method][pairs[layer]], where=where, heads=[head for _, head in of_block]
            )
            for layer, of_block in itertools.groupby(sorted(heads), key=lambda head: head[0])
        ]
        return Variant(min(layer for layer, _ in heads), of_heads)

    for layer, head in scores:
        if layer % every == 0 or layer == last - 1:
            for method in replacements:
                cases[method, layer, head, None] = case([(layer, head)], method)
    for share in SHARES:
        n = max(1, round(share * len(best)))
        for method in replacements:
            cases[method, None, None, share] = case(best[:n], method)
        if share < 1:
            cases["linear, random order", None, None, share] = case(shuffled[:n], "linear")
    names = {key: "-".join("all" if part is None else str(part) for part in key) for key in cases}
    variants = {names[key]: case for key, case in cases.items()}
    vectors = run_variants(model, data.examples, variants, folder=folder)
    evaluated = evaluate(readout, data[last], {name: vectors[name] for name in variants}, kl=True)
    table = []
    for (layer, head), score in scores.items():
        estimate = metrics.Estimate.without_interval(score, int(validation_rows.sum()))
        row = evaluation.validation_row(NAME, validation, "linear", layer, layer, "r2", None, estimate)
        table.append(row | {"head": head, "share": None})
    for key, name in names.items():
        method, of_block, of_head, of_share = key
        rows_of_case = prediction_rows(NAME, data, method, 0, evaluated[name])
        table += [row | {"layer": of_block, "head": of_head, "share": of_share} for row in rows_of_case]
    return result_table(table, "head", "share").astype({"head": "Int64"})


if __name__ == "__main__":
    run_study(main)
