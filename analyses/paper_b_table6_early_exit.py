"""Paper B, Table 6: leaving the model where dominant sub-updates tell that the prediction is made.

Accuracy and layers saved over several splits, of the rule that compares clusters of dominant sub-updates; of
classifiers on the stream before the FFN (x), on what the FFN writes (o) and on both; of the confidence exit
of paper A and of a fixed layer, as accurate as the rule on calibration examples; and of leaving where the
prediction is made, which is the ceiling. Expect the rule level with the classifiers. The paper's are WikiLM,
10,000 sentences: 94.1% and 3.2 of 16 layers by the rule, 92.9% to 94.4% and 3.0 to 3.1 by classifiers
(``--sentences 10000 --folds 8``).

The trace, the clusters and the activations are kept in the output folder; a run that was killed goes on
where it was.
"""

from __future__ import annotations

from typing import Annotated

import pandas as pd
import typer
from rich.console import Console
from rich.table import Column, Table

from matlens.cli import Dominant, Report, run_study
from matlens.ffn import (
    FEWEST_EVENTS,
    LASSO,
    N_CLUSTERS,
    PENALTY_STRENGTHS,
    RIDGE,
    classifier_sites,
    compare_exits,
    summarize_exits,
)
from matlens.plots import exits_figure
from matlens.study import Study

NAME = "paper_b_table6_early_exit"


def main(
    study: Study,
    report: Report,
    dominant: Dominant = 10,
    clusters: Annotated[int, typer.Option(min=1, help="Clusters of the value vectors.")] = N_CLUSTERS,
    splits: Annotated[int, typer.Option(min=1, help="Random splits that all is judged over.")] = 5,
    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation of classifiers.")] = 4,
    fewest: Annotated[
        int,
        typer.Option(min=2, help="Events of a layer to learn from, and to calibrate on; else none leave."),
    ] = FEWEST_EVENTS,
    strength: Annotated[
        list[float] | None,
        typer.Option(min=1e-9, help="Inverse strength of a penalty to try; give it once for each."),
    ] = None,
    lasso: Annotated[bool, typer.Option("--lasso/--ridge-only", help="Try lasso beside ridge?")] = True,
) -> None:
    """Compare ways of leaving early, print what each saves and how often it is right, and draw it."""
    trace, fitted = study.trace(dominant), study.clusters(clusters)
    activations = study.collect_validation(classifier_sites(study.model))
    comparison = compare_exits(
        study.model, trace, fitted, activations, seeds=splits, folds=folds, fewest=fewest,
        strengths=strength or PENALTY_STRENGTHS, kinds=(RIDGE, LASSO) if lasso else (RIDGE,),
    )  # fmt: skip
    table = summarize_exits(comparison.judged, trace.n_layers)
    show(table, trace.n_layers)
    table = table.assign(model=study.values.identity.name, corpus=trace.provenance.corpus, n=len(trace))
    judged = comparison.judged
    origin = trace.provenance.to_json("model", "data", "seed", "k") | {
        "clusters": fitted.provenance.to_json(), "splits": splits, "folds": folds, "fewest": fewest,
        "penalties": comparison.penalties,
        "accuracy": {method: [exits.accuracy for exits in each] for method, each in judged.items()},
        "chance": {method: [exits.chance for exits in each] for method, each in judged.items()},
    }  # fmt: skip
    report.write(NAME, table, origin, exits_figure(table))


def show(table: pd.DataFrame, n_layers: int) -> None:
    """Print the table as people read it."""
    titles = "method", "accuracy, %", f"saved of {n_layers}", "share", "leave", "chance"
    printed = Table(*(Column(title, no_wrap=True) for title in titles))
    for row in table.to_dict("records"):
        printed.add_row(
            row["method"], f"{100 * row['accuracy']:.1f} ± {100 * row['accuracy_sd']:.1f}",
            f"{row['saved']:.2f} ± {row['saved_sd']:.2f}", f"{row['saved_share']:.1%}", f"{row['left']:.1%}",
            f"{row['chance']:.1%}",
        )  # fmt: skip
    Console().print(printed)


if __name__ == "__main__":
    run_study(main, sentences=2000, fewest=10)
