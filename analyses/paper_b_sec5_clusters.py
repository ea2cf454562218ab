"""Paper B, section 5.2: which clusters of value vectors account for extreme sub-updates, and when.

All value vectors are clustered by their cosines. Of the dominant sub-updates those count as extreme whose
score for the top candidate passes a threshold either way, by default one in a hundred. Expect a small part of
the clusters to hold most of them, of two kinds: value vectors of the upper layers that promote unlikely
tokens, and value vectors of all layers that promote common ones. How common tokens are is counted in all of
the corpus.

Both tables and the figure have two readings of scores: the definition's own, ``score``, and ``lift``, the
score above the mean over the vocabulary; what is added to all tokens alike moves no probability. Beside the
extreme sub-updates stand drawn ones. The paper's models are WikiLM and ``--model gpt2-medium``, 2,000
sentences.
"""

from __future__ import annotations

from typing import Annotated

import typer

from matlens.activations import sink_counts
from matlens.cli import Memory, Report, run_study
from matlens.corpora import TokenFrequency
from matlens.ffn import MEMORY_GIB, N_CLUSTERS, Projection, extreme_tables
from matlens.lens import prediction_confidence
from matlens.plots import extremes_figure, model_title
from matlens.study import Study

NAME, GROUPS, PLACES = "paper_b_sec5_clusters", "paper_b_sec5_groups", "paper_b_sec5_places"


def main(
    study: Study,
    report: Report,
    clusters: Annotated[int, typer.Option(min=1, help="How many clusters.")] = N_CLUSTERS,
    memory: Memory = MEMORY_GIB,
    threshold: Annotated[
        float | None, typer.Option(help="What the size of a score has to pass; by default one in 100 does.")
    ] = None,
    beside: Annotated[int, typer.Option(min=1, help="Drawn sub-updates to set beside the extreme.")] = 2000,
) -> None:
    """Find the clusters of extreme sub-updates, what they promote, and when they are active."""
    trace, projection = study.trace(), Projection.from_model(study.model)
    fitted = study.clusters(clusters, memory=memory)
    frequency = TokenFrequency.from_corpus(study.corpus, study.model.tokenizer, len(projection.unembedding))
    confidence = prediction_confidence(study.model, trace.examples)
    tables = extreme_tables(
        trace, study.model, fitted, frequency, confidence,
        threshold=threshold, n_drawn=beside, seed=study.seed,
    )  # fmt: skip
    origin = trace.provenance.to_json("model", "data", "seed", "k") | {
        "n_clusters": clusters, "method": fitted.method, "thresholds": tables.thresholds,
        **sink_counts(trace.sinks, trace.examples.positions), "n_unseen": int((frequency.counts == 0).sum()),
        "n_common": int(frequency.common.sum()),
    }  # fmt: skip
    title = model_title(origin["model"]["base_model_name_or_path"], study.corpus.name, len(trace))
    report.write(NAME, tables.activity, origin, extremes_figure(tables.activity, title))
    report.write(GROUPS, tables.groups, origin)
    report.write(PLACES, tables.places, origin)


if __name__ == "__main__":
    run_study(main, sentences=2000)
