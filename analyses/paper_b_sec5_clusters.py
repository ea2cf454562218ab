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

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from matlens import load_corpus
from matlens.cli import options, report, run_script
from matlens.corpora import TokenFrequency
from matlens.ffn import (
    MEMORY_GIB,
    N_CLUSTERS,
    Projection,
    ValueVectors,
    cluster_activity,
    default_threshold,
    draw_sub_updates,
    extreme_sub_updates,
    group_table,
    lift_scores,
    place_table,
    prediction_confidence,
)
from matlens.plots import extremes_figure, model_title
from matlens.study import clustered, traced

NAME, GROUPS, PLACES = "paper_b_sec5_clusters", "paper_b_sec5_groups", "paper_b_sec5_places"


def main(
    model: options.Model = "smollm2-135m",
    corpus: options.CorpusName = "wikipedia-sample",
    sentences: Annotated[int, typer.Option(min=2, help="How many sentences to run.")] = 2000,
    clusters: Annotated[int, typer.Option(min=1, help="How many clusters.")] = N_CLUSTERS,
    memory: options.Memory = MEMORY_GIB,
    threshold: Annotated[
        float | None, typer.Option(help="What the size of a score has to pass; by default one in 100 does.")
    ] = None,
    beside: Annotated[int, typer.Option(min=1, help="Drawn sub-updates to set beside the extreme.")] = 2000,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: options.Out = Path("out"),
) -> None:
    """Find the clusters of extreme sub-updates, what they promote, and when they are active."""
    loaded, trace = traced(model, corpus, out, sentences=sentences, seed=seed, device=device)
    values, projection = ValueVectors(loaded), Projection.from_model(loaded)
    of_model = clustered(values, out, clusters, memory=memory)
    commonness = TokenFrequency.from_corpus(
        load_corpus(corpus), loaded.tokenizer, len(projection.unembedding)
    )
    confident = prediction_confidence(loaded, trace.examples)
    tables, groups, places, thresholds = [], [], [], {}
    for read, scores in (("score", trace.score), ("lift", lift_scores(trace, loaded))):
        thresholds[read] = default_threshold(scores) if threshold is None else threshold
        found = extreme_sub_updates(trace, values, scores=scores, threshold=thresholds[read])
        others = draw_sub_updates(trace, values, beside, scores=scores, seed=seed)
        both = {"extreme": found, "drawn": others}
        own = [
            cluster_activity(each, of_model, trace, values, projection, commonness).assign(sub_updates=name)
            for name, each in both.items()
        ]
        tables += [table.assign(read=read) for table in own]
        kind_of = pd.concat(own)
        told = group_table(found, others, kind_of, of_model, values, trace, confident)
        groups.append(told.assign(read=read))
        places.append(place_table(found, kind_of, of_model, trace).assign(read=read))
    table = pd.concat(tables, ignore_index=True)
    origin = trace.provenance.to_json("model", "data", "seed", "k") | {
        "n_clusters": clusters, "method": of_model.method, "thresholds": thresholds,
        "n_sinks": int(trace.sinks.sum()), "n_unseen": int((commonness.counts == 0).sum()),
        "n_common": int(commonness.common.sum()),
    }  # fmt: skip
    title = model_title(origin["model"]["base_model_name_or_path"], corpus, len(trace))
    report(out, NAME, table, origin, extremes_figure(table, title))
    report(out, GROUPS, pd.concat(groups, ignore_index=True), origin)
    report(out, PLACES, pd.concat(places, ignore_index=True), origin)


if __name__ == "__main__":
    run_script(main)
