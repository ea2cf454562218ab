"""Ablation by head: the attention of single heads replaced by linear maps.

Paper A replaces the attention of whole blocks (Figure 10); here each head is replaced by a map of its own,
linear in what enters attention at the same token and fitted on all tokens but sinks. First r2 of every map;
then heads replaced one at a time, and more and more of them at once, compared with heads that give their mean
or nothing. What a replacement recovers over the mean is what the head does without looking at other tokens.
"""

from __future__ import annotations

from typing import Annotated

import typer
from figures.paper_a import attention_heads
from paper_a import head_ablation
from studies import Patched, Report, Study, run_study
from studies.heads import head_pairs

from matlens import MapSet
from matlens.activations import sink_counts, sink_rows
from matlens.models import ModelLayout
from matlens.study import origin_of

NAME = "attention_heads"


def main(
    study: Study,
    report: Report,
    patched: Patched = 3000,
    every: Annotated[
        int, typer.Option(min=1, help="Heads of every so many blocks are replaced one at a time.")
    ] = 1,
) -> None:
    """Fit a replacement for every head, replace heads one at a time and together, and draw what is left."""
    stream, _ = study.stream
    train, validation = study.head_samples
    rows, validation_rows = ~sink_rows(stream), ~sink_rows(study.validation)
    maps = MapSet.fit(train, pairs=head_pairs(ModelLayout.from_model(study.model)), rows=rows)
    n_patched = min(patched, validation.n_rows)
    table = head_ablation(
        study.readout, study.model, maps, train, validation, rows=rows, validation_rows=validation_rows,
        every=every, patched=patched, seed=study.seed, folder=study.folder / f"{NAME}-{n_patched}-{every}",
    )  # fmt: skip
    origin = origin_of(maps, validation) | {"sinks": sink_counts(~rows, stream.places)}
    report.write(NAME, table, origin, attention_heads(table))


if __name__ == "__main__":
    run_study(main)
