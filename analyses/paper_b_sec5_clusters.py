"""Paper B, section 5.2: clusters of value vectors with extreme sub-updates.

All value vectors are clustered by cosine. Dominant sub-updates are extreme if their score for the top
candidate is beyond a threshold in either direction, by default one in a hundred. Expect a small part of the
clusters to have most of them, of two kinds: value vectors of the upper layers that promote unlikely tokens,
and value vectors of all layers that promote common ones. Frequencies are counted in the whole corpus.

All tables but the last and the figure have two readings of scores: the definition's own, ``score``, and
``lift``, relative to the mean over the vocabulary, because a constant added to all tokens changes no
probability. Extreme sub-updates are compared with sampled ones. ``..._groups`` describes the extreme ones of
each kind, and ``..._alone`` the same for single value vectors instead of clusters; ``..._places`` has their
positions in the sentence; ``..._few`` how few clusters account for them; ``..._largest`` the ten largest, by
the sign of the coefficients; and ``..._ways`` the agreement of average linkage, complete linkage and nearest
neighbors on a sample of value vectors.

The paper's models are WikiLM and ``--model gpt2-medium``, 2,000 sentences. Its authors use complete linkage;
the distances of the 98,304 vectors of gpt2-medium take 72 GiB (``--linkage complete --memory 72``).
"""

from __future__ import annotations

from dataclasses import asdict

from figures.paper_b import extremes_figure
from paper_a.predictions import prediction_confidence
from studies import Clustering, Report, Study, run_study
from sub_updates.extremes import TokenFrequency, compare_linkages, concentration, extreme_tables

from matlens.errors import PositiveInt
from matlens.ffn import Clusters, Projection

NAME, SECTION = "paper_b_sec5_clusters", "paper_b_sec5"
N_LARGEST = 10  # clusters listed for each reading


def main(
    study: Study,
    report: Report,
    clustering: Clustering,
    clusters: PositiveInt = 10_000,
) -> None:
    """Find the clusters of extreme sub-updates, the tokens they promote, and where they are active.

    Parameters
    ----------
    clusters
        How many clusters.
    """
    trace, projection = study.trace(), Projection.from_model(study.model)
    fitted = study.clusters(clusters, **asdict(clustering))
    frequency = TokenFrequency.from_corpus(study.corpus, study.model.tokenizer, len(projection.unembedding))
    confidence = prediction_confidence(study.model, trace.examples)
    of_each = Clusters.fit(study.values, len(study.values), progress=False)
    tables, alone = (
        extreme_tables(trace, study.model, each, frequency, confidence, seed=study.seed)
        for each in (fitted, of_each)
    )
    origin = study.trace_origin(trace) | {
        "n_clusters": clusters, "method": fitted.method, "linkage": fitted.linkage,
        "thresholds": tables.thresholds, "n_unseen": int((frequency.counts == 0).sum()),
        "n_common": int(frequency.common.sum()),
    }  # fmt: skip
    studied = {"model": origin["model"]["base_model_name_or_path"], "corpus": study.corpus.name}
    figure = extremes_figure(tables.activity.assign(**studied), len(trace))
    report.write(NAME, tables.activity, origin, figure)
    report.write(f"{SECTION}_groups", tables.groups, origin)
    report.write(f"{SECTION}_places", tables.places, origin)
    alone_origin = origin | {"n_clusters": len(of_each), "method": "each vector alone", "linkage": None}
    report.write(f"{SECTION}_alone", alone.groups, alone_origin)
    report.write(f"{SECTION}_few", concentration(tables.activity, fitted), origin)
    extreme = tables.activity[tables.activity["sub_updates"] == "extreme"]
    largest = extreme.groupby("read", sort=False).head(N_LARGEST).drop(columns=["members", "sub_updates"])
    report.write(f"{SECTION}_largest", largest, origin)
    ways = compare_linkages(study.values, clusters, seed=study.seed)
    report.write(f"{SECTION}_ways", ways, origin)


if __name__ == "__main__":
    run_study(main, sentences=2000)
