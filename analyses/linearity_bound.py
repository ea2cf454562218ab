"""What NBL's bound says of the damage: three definitions, with and without sinks, over and within kinds.

The bound of an attention or FFN is of its input with the sum of input and output (``nbl bound``, as in the
atlas), of its input with its output alone (``nbl bound, output``), or, as NBL's scripts have it, of the
residual stream before the norm with the stream after the sub-module (``nbl bound, stream``). Blocks have one
bound. Loss increases are read from ``linearity_costs.csv`` of ``analyses/linearity.py`` in the folder of
``--out``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from studies import AtlasText, Report, Study, run_study

from matlens.data import Examples
from matlens.errors import PositiveInt
from matlens.io import read_table, result_row, result_table
from matlens.linearity import model_parts, rank_correlations, sum_parts
from matlens.metrics import Estimate
from matlens.models import ModelIdentity, ModelLayout, Provenance

NAME, COSTS = "linearity_bound", "linearity_costs"
BOUND, OUTPUT, STREAM = "nbl bound", "nbl bound, output", "nbl bound, stream"
KINDS = ("attn", "ffn", "block")
ALL_KINDS = "all kinds"
_VARIANCE = 1.06  # of Fisher's z of a rank correlation, times n - 3 (Fieller, Hartley and Pearson 1957)


def main(study: Study, report: Report, text: AtlasText, every: PositiveInt = 1) -> None:
    """Score attention, FFN and blocks by each bound, and correlate the bounds with loss increases.

    Parameters
    ----------
    every
        Use the parts of every n-th block; 1 for all.
    """
    fitted, _ = text.examples(study.model, study)
    costs = list(read_costs(report.path(COSTS), every))
    named: dict[str, Any] = {"model": study.model.cfg.model_name, "corpus": str(fitted.provenance["corpus"])}
    rows = [
        result_row(
            NAME, **named, method="map", layer=layer, target=layer + 1, metric=metric, estimate=estimate,
            kind=kind, tokens=tokens,
        )
        for kind, layer, tokens, metric, estimate in [*bounds(study.model, fitted, every), *costs]
    ]  # fmt: skip
    table = result_table(rows, "kind", "tokens")
    origin = study.origin_of_weights | {**asdict(text), "every": every, "n_fitted": len(fitted.tokens)}
    report.write(f"{NAME}_parts", table, origin)
    report.write(NAME, rank_correlations(table, seed=study.seed).assign(experiment=NAME), origin)


Row = tuple[str, int, str, str, Estimate]  # kind, layer, tokens, metric and value


def bounds(model: Any, fitted: Examples, every: int) -> Iterator[Row]:
    """The bounds of all parts, with and without sinks."""
    layout = ModelLayout.from_model(model)
    provenance = Provenance(ModelIdentity.from_model(model), fitted.provenance, fitted.fingerprint)
    parts = [part for part in model_parts(layout) if part.kind in KINDS and part.layer % every == 0]
    variants = {(part, metric): part for part in parts for metric in (BOUND, OUTPUT, STREAM)}
    for part in parts:
        layer, kind = part.layer, part.kind
        if part.writes:  # of another kind, so that the input is not added to the output
            ends = (f"h.{layer}", f"mid.{layer}") if kind == "attn" else (f"mid.{layer}", f"h.{layer + 1}")
            variants[part, OUTPUT] = replace(part, kind=f"{kind}, output")
            variants[part, STREAM] = replace(part, kind=f"{kind}, stream", source=ends[0], target=ends[1])
    sums = sum_parts(model, fitted, list(dict.fromkeys(variants.values())))
    found = {
        (variant, with_sinks): Estimate.without_interval(scores[BOUND], len(fitted.tokens))
        for variant, with_sinks, _, scores in sums.solve(provenance)
    }
    for tokens, with_sinks in (("all", True), ("no sinks", False)):
        for (part, metric), variant in variants.items():
            yield part.kind, part.layer, tokens, metric, found[variant, with_sinks]


def read_costs(path: Path, every: int) -> Iterator[Row]:
    """Loss increases with the map in place of each part."""
    columns = dict.fromkeys(("kind", "tokens", "method", "metric"), "str")
    table = read_table(
        path, columns, what="a table of costs", made_by="analyses/linearity.py makes it.", na_values=[""]
    )
    table = table[(table["metric"] == "loss increase") & (table["method"] == "map")]
    table = table[table["kind"].isin(KINDS) & (table["layer"] % every == 0)]
    for row in table.to_dict("records"):
        estimate = Estimate(row["value"], row["low"], row["high"], row["n"])
        yield row["kind"], int(row["layer"]), row["tokens"], row["metric"], estimate


def within_kinds(correlations: pd.DataFrame) -> Estimate:
    """One score's rank correlation within kinds: the mean of the kinds', weighted by ``n - 1``.

    The 95% interval is that of Fisher's z with all parts but three of each kind; it takes parts as
    independent.
    """
    kinds = correlations[correlations["kind"] != ALL_KINDS]
    values, n = kinds["value"].to_numpy(float), kinds["n"].to_numpy(int)
    value = float(np.average(values, weights=n - 1))
    half = stats.norm.ppf(0.975) * np.sqrt(_VARIANCE / (n - 3).sum())
    low, high = np.tanh(np.arctanh(value) + np.array([-half, half])).tolist()
    return Estimate(value, low, high, int(n.sum()))


if __name__ == "__main__":
    run_study(main, train=4000, val=1000)
