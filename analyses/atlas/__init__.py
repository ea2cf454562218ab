"""Sums of the atlas of linearity, for its page."""

from __future__ import annotations

import pandas as pd

from matlens.io.tables import result_row, result_table
from matlens.linearity.ranking import rises
from matlens.metrics import Estimate


def added_rise(table: pd.DataFrame, parts: str, *, tokens: str = "all") -> float:
    """The sum of the rises of the loss for each of some parts alone.

    ``table`` is that of `linearity_atlas`; ``parts`` are names with a comma between, as in its column.
    """
    alone = rises(table, tokens)
    alone = alone[alone["layer"].notna()]
    names = alone["kind"] + " " + alone["layer"].astype("Int64").astype(str)
    by_name = dict(zip(names, alone["value"], strict=True))
    return float(sum(by_name[name] for name in parts.split(", ")))


def atlas_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the layers of every score and rise, and the median of the rise, for each kind of part."""
    single = table[~table["kind"].str.startswith("together")]
    rows = []
    for (kind, tokens, method, metric), part in single.groupby(
        ["kind", "tokens", "method", "metric"], sort=False
    ):
        values = {metric: part["value"].mean()}
        if metric == "rise":
            values["median rise"] = part["value"].median()
        rows += [
            result_row(
                "linearity_kinds", model=str(table["model"].iloc[0]), corpus=str(table["corpus"].iloc[0]),
                method=str(method), layer=None, target=None, metric=str(name),
                estimate=Estimate.without_interval(value, len(part)), kind=kind, tokens=tokens,
            )
            for name, value in values.items()
        ]  # fmt: skip
    return result_table(rows, "kind", "tokens")
