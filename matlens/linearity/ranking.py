"""Rank correlations of scores with the damage, and the cheapest parts of an atlas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import numpy as np
import pandas as pd
from scipy import stats

from matlens.errors import Between, Seed, checked
from matlens.io.tables import check_one, result_row, result_table
from matlens.linearity.scores import LINEAR
from matlens.metrics import Estimate

CORRELATIONS = "linearity_correlations"
Tokens = Literal["all", "no sinks"]
GROUPS = {
    "norms": ("ln1", "ln2"), "attn": ("attn",), "ffn": ("ffn",), "block": ("block",),
    "any": ("attn", "ffn", "block"),
}  # fmt: skip
"""Kinds of parts that are replaced together (replacing a norm saves nothing)."""
COSTS = LOSS_INCREASE, AGREEMENT = "loss increase", "agreement"
FIRST = 3
_RESAMPLES = 999
_FEWEST = 6  # min parts for a correlation
_EVERY = "all kinds"


def loss_increases(table: pd.DataFrame, tokens: str) -> pd.DataFrame:
    """Rows of the loss increase with the map in place of a part."""
    return table[
        (table["metric"] == "loss increase") & (table["method"] == "map") & (table["tokens"] == tokens)
    ]


def first_parts(table: pd.DataFrame, *, group: str, tokens: str = "all") -> list[tuple[str, int]]:
    """The three cheapest parts of a group, by kind and layer, without overlaps."""
    rows = loss_increases(table, tokens)
    rows = rows[rows["kind"].isin(GROUPS[group])].sort_values("value", kind="stable")
    chosen: list[tuple[str, int]] = []
    for kind, layer in zip(rows["kind"], rows["layer"].astype(int), strict=True):
        taken = {other for other, of_layer in chosen if of_layer == layer}
        if len(chosen) < FIRST and not taken & {kind, "block"} and not (kind == "block" and taken):
            chosen.append((kind, layer))
    return chosen


@checked
def rank_correlations(
    table: pd.DataFrame, *, seed: Seed = 0, resamples: Annotated[int, Between(9, 100000)] = _RESAMPLES
) -> pd.DataFrame:
    """Spearman's correlation of every score with the loss increase.

    Signed such that 1 is a perfect prediction: higher r2, Procrustes and rotation mean less damage, all other
    scores more. Intervals are from SciPy's bootstrap over parts. ``method`` is ``map`` or ``removed``,
    ``metric`` the score; ``kind`` is one kind of part, or all. Loss increases and scores that are not finite
    rank as the worst. Rows of other scores can be added to the table of `linearity_atlas`, with the method
    ``map``.
    """
    check_one(table)
    single = table[~table["kind"].str.startswith("together")]
    wide = single.pivot_table(
        index=["kind", "layer", "target", "tokens"], columns=["method", "metric"], values="value", sort=False,
        dropna=False,
    ).dropna(how="all")  # fmt: skip
    kinds = list(dict.fromkeys(wide.index.get_level_values("kind")))
    scores = [str(score) for score in single["metric"].unique() if score not in COSTS]
    rows: list[dict[str, Any]] = []
    for tokens in dict.fromkeys(wide.index.get_level_values("tokens")):
        of_tokens = cast(pd.DataFrame, wide.xs(tokens, level="tokens")).copy()
        if ("removed", "loss increase") in wide:  # at all tokens, also for scores without sinks
            of_tokens["removed", "loss increase"] = wide.xs("all", level="tokens")["removed", "loss increase"]
        by_kind = {kind: of_tokens[of_tokens.index.get_level_values("kind") == kind] for kind in kinds}
        by_kind = {_EVERY: of_tokens, **by_kind}
        for kind, method, score in itertools.product(by_kind, ("map", "removed"), scores):
            estimate = _correlation(by_kind[kind], method, score, seed, resamples)
            if estimate is not None:
                rows.append(
                    result_row(
                        CORRELATIONS, model=str(table["model"].iloc[0]), corpus=str(table["corpus"].iloc[0]),
                        method=method, layer=None, target=None, metric=score, estimate=estimate, kind=kind,
                        tokens=tokens,
                    )
                )  # fmt: skip
    return result_table(rows, "kind", "tokens")


def _correlation(wide: pd.DataFrame, method: str, score: str, seed: int, resamples: int) -> Estimate | None:
    if (method, "loss increase") not in wide or ("map", score) not in wide:
        return None
    both = pd.DataFrame(
        {"score": wide["map", score], "loss increase": wide[method, "loss increase"]}
    ).dropna()
    x = both["score"].to_numpy(float) * (-1 if score in LINEAR else 1)
    y = both["loss increase"].to_numpy(float)
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
