"""Paper B, section 6.2 and Table 6: early exit by dominant sub-updates.

The first table, ``paper_b_table6_early_exit``: accuracy and layers saved over several random splits, of the
rule that compares clusters of dominant sub-updates, as sets (the paper's text) and by equal places (the
authors' notebook); of classifiers on the residual stream before the FFN (x), on the FFN output (o) and on
their sum; of the confidence exit of paper A and of a fixed layer, as accurate as the rule on calibration
examples; and of exiting where the prediction is made, which is the ceiling. The paper's are WikiLM, 10,000
sentences: 94.1% and 3.2 of 16 layers by the rule, 92.9% to 94.4% and 3.0 to 3.1 by classifiers.

The second, ``paper_b_sec6_readings``: the rule under every reading of its definition, by
cross-validation, compared with the same exits shuffled over examples. ``--also-clusters 10000`` adds
readings with the number of clusters of section 5.2.

Expect the rule to be on par with the classifiers. These take nearly all of the time, lasso far more than
ridge alone (``--ridge-only``). ``--sentences 10000`` is the paper's size. The trace, clusters and
activations are stored in the output folder; an interrupted run resumes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from exits.classifiers import FEWEST_EVENTS, FOLDS, LASSO, PENALTY_STRENGTHS, RIDGE
from exits.comparison import EXIT_CLUSTERS, classifier_sites, compare_exits, compare_readings
from exits.outcomes import summarize_exits
from figures.paper_b import exits_figure
from studies import Clustering, Report, Study, TwoOrMore, run_study, show

from matlens.errors import Between, PositiveInt

NAME, READINGS = "paper_b_table6_early_exit", "paper_b_sec6_readings"


def main(
    study: Study,
    report: Report,
    clustering: Clustering,
    dominant: PositiveInt = 10,
    clusters: PositiveInt = EXIT_CLUSTERS,
    also_clusters: Annotated[list[int] | None, Between(1)] = None,
    splits: PositiveInt = 5,
    folds: TwoOrMore = FOLDS,
    fewest: TwoOrMore = FEWEST_EVENTS,
    strength: Annotated[list[float] | None, Between(1e-9)] = None,
    lasso: Annotated[bool, typer.Option("--lasso/--ridge-only")] = True,
) -> None:
    """Compare early-exit methods by accuracy and layers saved.

    Parameters
    ----------
    clusters
        Clusters that the rule compares.
    also_clusters
        Another number of clusters for the readings (repeatable).
    splits
        Random splits to average over.
    folds
        Folds of the cross-validation of classifiers.
    fewest
        Min events of a layer in training and calibration; else it never exits.
    strength
        Inverse penalty strength to try (repeatable).
    lasso
        Try lasso as well as ridge?
    """
    trace = study.trace(dominant)
    fitted, *more = (study.clusters(n, **asdict(clustering)) for n in (clusters, *(also_clusters or ())))
    readings = compare_readings(trace, [fitted, *more], seed=study.seed)
    studied = {"model": study.values.identity.name, "corpus": trace.provenance.corpus}
    origin = trace.provenance.to_json("model", "data", "seed", "k") | {
        "clusters": fitted.provenance.to_json()
    }
    report.write(READINGS, readings.assign(**studied), origin)
    activations = study.collect_validation(classifier_sites(study.model))
    comparison = compare_exits(
        study.model, trace, fitted, activations, seeds=splits, folds=folds, fewest=fewest,
        strengths=strength or PENALTY_STRENGTHS, kinds=(RIDGE, LASSO) if lasso else (RIDGE,),
    )  # fmt: skip
    table = summarize_exits(comparison.evaluated, trace.n_layers)
    show(f"Early exit from {trace.n_layers} layers", table)
    table = table.assign(**studied, n=len(trace))
    evaluated = comparison.evaluated
    origin |= {
        "splits": splits, "folds": folds, "fewest": fewest, "penalties": comparison.penalties,
        "accuracy": {method: [exits.accuracy for exits in each] for method, each in evaluated.items()},
        "chance": {method: [exits.chance for exits in each] for method, each in evaluated.items()},
    }  # fmt: skip
    report.write(NAME, table, origin, exits_figure(table))


if __name__ == "__main__":
    run_study(main, sentences=2000)
