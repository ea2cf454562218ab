"""Attention sinks in the stream, and how much of r2 is theirs: a supplement to Figure 2 of paper A.

How long sinks and first tokens are at each layer, and how much of the variance of the stream lies in one
coordinate, with them and without; r2 of the maps of ``paper_a_fig2_r2.py`` over the validation sentences
whose position is no first token, and no sink; and which training samples are sinks though they are no first
tokens. Expect, in a model with sinks, one coordinate to hold nearly all variance where they are, and r2 to
fall on both sides of where they are written.
"""

from __future__ import annotations

from paper_a import fit_quality_without_sinks, later_sinks, sink_norms
from studies import Report, Study, run_study

from matlens import plots
from matlens.activations import sink_counts, sink_rows

NAME, FIT, LATER = "sinks", "sinks_r2", "sinks_later"


def main(study: Study, report: Report) -> None:
    """Measure sinks at all layers, leave them out of r2, and list those that are no first tokens."""
    train, validation = study.stream
    sinks = sink_rows(train)
    origin = study.origin | {"sinks": sink_counts(sinks, train.places)}
    report.write(NAME, sink_norms(train, sinks), origin)
    report.write(LATER, later_sinks(train, sinks, study.model.tokenizer), origin)
    sinks = sink_rows(validation)
    table = fit_quality_without_sinks(study.maps, validation, sinks)
    figure = plots.plot_r2(table[table["examples"] == "not sinks"])
    report.write(FIT, table, origin | {"sinks": sink_counts(sinks, validation.places)}, figure)


if __name__ == "__main__":
    run_study(main)
