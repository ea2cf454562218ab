"""The atlas: which parts of a model are linear, and the cost of replacing them.

Every norm, attention, FFN, block and jump over 2, 4 and 8 blocks gets its best affine map, fitted on all
tokens and on all except attention sinks. The table has linearity scores, and the loss increase when the map
replaces the part and when the part is removed; rank correlations show which score predicts it. The three
parts of each group with the smallest loss increase are also replaced together.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pandas as pd
from studies import AtlasText, LayerRow, Report, Study, layer_table, run_study

from matlens import plots
from matlens.cli import printing
from matlens.linearity import atlas_seconds, linearity_atlas, rank_correlations
from matlens.metrics import Estimate

NAME = "linearity"


def main(study: Study, report: Report, text: AtlasText) -> None:
    """Fit, score, replace and remove every part; plot the atlas and print correlations."""
    (fitted_on, evaluated_on), folder = text.examples(study.model, study), text.folder(study)
    table = linearity_atlas(study.model, fitted_on, evaluated_on, folder=folder)
    correlations = rank_correlations(table, seed=study.seed)
    origin = study.origin_of_weights | {
        **asdict(text), "n_fitted": len(fitted_on.tokens), "n_evaluated": len(evaluated_on.targets),
        "atlas_seconds": atlas_seconds(folder),
    }  # fmt: skip
    report.write(NAME, table, origin, plots.plot_atlas(table, correlations))
    few = table[table["metric"].isin(["loss increase", "agreement"])]
    few = few[few["kind"].str.startswith("together") | (few["metric"] == "loss increase")]
    report.write("linearity_costs", few, origin)
    report.write("linearity_kinds", atlas_summary(table), origin)
    report.write("linearity_correlations", correlations, origin)
    printing.print_atlas(table, correlations)


def atlas_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Mean scores, and mean and median loss increase, for each kind of part."""
    single = table[~table["kind"].str.startswith("together")]
    keys, rows, parts = ["kind", "tokens", "method", "metric"], list[LayerRow](), list[dict[str, Any]]()
    for (kind, tokens, method, metric), values in single.groupby(keys, sort=False)["value"]:
        statistics = {metric: values.mean()}
        if metric == "loss increase":
            statistics["median loss increase"] = values.median()
        for name, value in statistics.items():
            estimate = Estimate.without_interval(value, len(values))
            rows.append((str(method), None, str(name), None, estimate))
            parts.append({"kind": kind, "tokens": tokens})
    model, corpus = table[["model", "corpus"]].iloc[0]
    return layer_table("linearity_kinds", model, corpus, rows).join(pd.DataFrame(parts))


if __name__ == "__main__":
    run_study(main, train=4000, val=1000)
