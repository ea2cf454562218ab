"""What a table of the atlas says: which score predicts the damage, and which parts go first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import numpy as np
import pandas as pd
from scipy import stats

from matlens.errors import Between, InputError, PositiveInt, Seed, checked
from matlens.io.tables import check_columns, result_row, result_table
from matlens.linearity.scores import BOUND, SCORES
from matlens.metrics import Estimate

CORRELATIONS, SUMMARY = "linearity_correlations", "linearity_kinds"
Group = Literal["norms", "attn", "ffn", "block", "any"]
Tokens = Literal["all", "no sinks"]
GROUPS: dict[Group, tuple[str, ...]] = {
    "norms": ("ln1", "ln2"), "attn": ("attn",), "ffn": ("ffn",), "block": ("block",),
    "any": ("attn", "ffn", "block"),
}  # fmt: skip
"""Kinds of parts among which the first are looked for; a norm that is replaced saves nothing."""
FIRST = 3
_COLUMNS = ("method", "layer", "target", "metric", "value", "kind", "tokens")
_RESAMPLES = 999
_FEWEST = 6  # parts of which a correlation is told
_EVERY = "all kinds"


def _rises(table: pd.DataFrame, tokens: str) -> pd.DataFrame:
    """By how much the loss rises with the map of a part in its place."""
    _check_atlas(table)
    return table[(table["metric"] == "rise") & (table["method"] == "map") & (table["tokens"] == tokens)]


@checked
def first_parts(
    table: pd.DataFrame, n: PositiveInt = FIRST, *, group: Group = "any", tokens: Tokens = "all"
) -> list[tuple[str, int]]:
    """The parts that cost least when they are replaced, by kind and layer; none that touches another.

    Parameters
    ----------
    table
        The table of `linearity_atlas`.
    n
        How many.
    group
        The kinds of parts, see `GROUPS`.
    tokens
        The tokens at which parts are replaced.
    """
    rows = _rises(table, tokens)
    rows = rows[rows["kind"].isin(GROUPS[group])].sort_values("value", kind="stable")
    chosen: list[tuple[str, int]] = []
    for kind, layer in zip(rows["kind"], rows["layer"].astype(int), strict=True):
        taken = {other for other, of_layer in chosen if of_layer == layer}
        if len(chosen) < n and not taken & {kind, "block"} and not (kind == "block" and taken):
            chosen.append((kind, layer))
    return chosen


@checked
def added_rise(table: pd.DataFrame, parts: str, *, tokens: Tokens = "all") -> float:
    """The sum of the rises of the loss for each of some parts alone.

    ``table`` is that of `linearity_atlas`; ``parts`` are names with a comma between, as in its column.
    """
    alone = _rises(table, tokens)
    alone = alone[alone["layer"].notna()]
    names = alone["kind"] + " " + alone["layer"].astype("Int64").astype(str)
    by_name = dict(zip(names, alone["value"], strict=True))
    return float(sum(by_name[name] for name in parts.split(", ")))


@checked
def atlas_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the layers of every score and rise, and the median of the rise, for each kind of part.

    Parameters
    ----------
    table
        The table of `linearity_atlas`.
    """
    _check_atlas(table, "model", "corpus")
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
                SUMMARY, model=str(table["model"].iloc[0]), corpus=str(table["corpus"].iloc[0]),
                method=str(method), layer=None, target=None, metric=str(name),
                estimate=Estimate.without_interval(value, len(part)), kind=kind, tokens=tokens,
            )
            for name, value in values.items()
        ]  # fmt: skip
    return result_table(rows, "kind", "tokens")


@checked
def rank_correlations(
    table: pd.DataFrame, *, seed: Seed = 0, resamples: Annotated[int, Between(9, 100000)] = _RESAMPLES
) -> pd.DataFrame:
    """Spearman's correlation of every score with what it costs to do without a part.

    Correlations are of the score's predicted damage with the rise, so that 1 is a perfect prediction: scores
    of which more is more linear count from above. Intervals are of SciPy's bootstrap over parts. ``method``
    is what is done, ``metric`` the score; ``kind`` is one kind of part, or all. Parts whose rise or score is
    not finite are left out of a correlation by their rank: they count as the worst.

    Parameters
    ----------
    table
        The table of `linearity_atlas`.
    seed
        Seed of the bootstrap.
    resamples
        How many resamples it takes.

    Raises
    ------
    InputError
        It is no such table.
    """
    _check_atlas(table, "model", "corpus")
    single = table[~table["kind"].str.startswith("together")]
    wide = single.pivot_table(
        index=["kind", "layer", "target", "tokens"], columns=["method", "metric"], values="value", sort=False,
        dropna=False,
    ).dropna(how="all")  # fmt: skip
    if ("map", "rise") not in wide:
        raise InputError("The table has no rise. Expected the table of linearity.linearity_atlas.")
    rows: list[dict[str, Any]] = []
    kinds = [_EVERY, *dict.fromkeys(wide.index.get_level_values("kind"))]
    for tokens in dict.fromkeys(wide.index.get_level_values("tokens")):
        of_tokens = cast(pd.DataFrame, wide.xs(tokens, level="tokens"))
        if ("left out", "rise") in wide:  # at all tokens, whatever the scores are of
            of_tokens = of_tokens.copy()
            of_tokens["left out", "rise"] = wide.xs("all", level="tokens")["left out", "rise"]
        for kind in kinds:
            of_kind = of_tokens.index.get_level_values("kind").isin(kinds if kind == _EVERY else [kind])
            part = of_tokens.loc[of_kind]
            for method in ("map", "left out"):
                for score in SCORES:
                    estimate = _correlation(part, method, score, seed, resamples)
                    if estimate is not None:
                        rows.append(
                            result_row(
                                CORRELATIONS, model=str(table["model"].iloc[0]),
                                corpus=str(table["corpus"].iloc[0]), method=method, layer=None, target=None,
                                metric=score, estimate=estimate, kind=kind, tokens=tokens,
                            )
                        )  # fmt: skip
    return result_table(rows, "kind", "tokens")


def _correlation(wide: pd.DataFrame, method: str, score: str, seed: int, resamples: int) -> Estimate | None:
    if (method, "rise") not in wide or ("map", score) not in wide:
        return None
    both = pd.DataFrame({"score": wide["map", score], "rise": wide[method, "rise"]}).dropna()
    x = both["score"].to_numpy(float) * (1 if score == BOUND else -1)
    y = both["rise"].to_numpy(float)
    if len(both) < _FEWEST or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    value, low, high = spearman(x, y, seed=seed, resamples=resamples)
    return Estimate(value, low, high, len(both))


def spearman(
    x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, *, seed: int, resamples: int
) -> tuple[float, float, float]:
    """Spearman's rank correlation and its 95% interval, by a bootstrap of the pairs."""
    a, b = np.asarray(x, float), np.asarray(y, float)
    value = float(stats.spearmanr(a, b).statistic)

    def statistic(index: np.ndarray, axis: int = -1) -> np.ndarray:
        index = np.moveaxis(index, axis, -1)
        ranks, others = (stats.rankdata(values[index], axis=-1) for values in (a, b))
        ranks, others = (each - each.mean(-1, keepdims=True) for each in (ranks, others))
        with np.errstate(invalid="ignore"):  # a resample may have one part alone
            product = (ranks * others).sum(-1)
            return np.asarray(product / np.sqrt((ranks**2).sum(-1) * (others**2).sum(-1)))

    limits = stats.bootstrap(
        (np.arange(len(a)),), statistic, vectorized=True, n_resamples=resamples, method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    low, high = float(limits.low), float(limits.high)
    return value, low if math.isfinite(low) else math.nan, high if math.isfinite(high) else math.nan


def _check_atlas(table: pd.DataFrame, *more: str) -> None:
    check_columns(table, (*more, *_COLUMNS), what="the table of linearity.linearity_atlas")
