"""How much of what ReplaceMe adds to the perplexity is gone another way, and how sure that is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from matlens.errors import InputError, checked
from matlens.ffn.perplexity import TextLosses
from matlens.io.tables import check_columns
from matlens.metrics import Estimate
from matlens.pruning.choices import Choice, Method

GONE = "gone"
PUBLISHED = (Method.replaceme, Choice.angle)
_RESAMPLES = 2000
_OF_A_ROW = ["corpus", "n_left_out", "choice", "method"]


def recovered_fraction(perplexity: Any, whole: Any, published: Any) -> Any:
    """``1 - (perplexity - whole) / (published - whole)``."""
    return 1 - (perplexity - whole) / (published - whole)


def gone_estimate(losses: TextLosses, whole: TextLosses, published: TextLosses, *, seed: int = 0) -> Estimate:
    """The share that is gone, with its 95% interval by a bootstrap of the texts.

    All models have read the same; the ends are percentiles of what is drawn. There is no interval
    around what one text says, or where some resamples have no such share.

    Parameters
    ----------
    losses, whole, published
        Of the model in question, of the whole model, and of the model that was pruned the published way.
    seed
        Seed of the resamples.
    """
    n = len(losses.total)

    def share(index: np.ndarray) -> Any:
        with np.errstate(all="ignore"):
            return recovered_fraction(
                *(
                    np.exp(each.total[index].sum(-1) / each.n_tokens[index].sum(-1))
                    for each in (losses, whole, published)
                )
            )

    value = float(share(np.arange(n)))
    drawn = share(np.random.default_rng(seed).integers(n, size=(_RESAMPLES, n)))
    if n < 2 or not np.isfinite(drawn).all():
        return Estimate.without_interval(value, n)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(value, float(low), float(high), n)


@checked
def added_perplexity(table: pd.DataFrame) -> pd.DataFrame:
    """How much of the perplexity that ReplaceMe adds is gone, for each size, choice, method and text.

    ``gone`` is ``1 - (perplexity - whole) / (replaceme - whole)``, where ``replaceme`` is the published
    method on the span that it chooses itself, by the angle; ``low`` and ``high`` bound its 95% interval where
    the table has one.

    Parameters
    ----------
    table
        The table of `pruning_table`, with the method ``replaceme`` and the choice ``angle``.
    """
    check_columns(table, (*_OF_A_ROW, "metric", "value", "low", "high"), what="the table")
    perplexity = table[table["metric"] == "perplexity"]
    whole = perplexity[perplexity["method"] == "whole"].set_index("corpus")["value"]
    rest = perplexity[perplexity["method"] != "whole"]
    method, choice = PUBLISHED
    published = rest[(rest["method"] == method) & (rest["choice"] == choice)]
    if published.empty:
        raise InputError(
            "The table has no replaceme on a span chosen by angle. Expected what to compare with."
        )
    beside = published.set_index(["corpus", "n_left_out"])["value"]
    keys = pd.MultiIndex.from_frame(rest[["corpus", "n_left_out"]])
    gone = recovered_fraction(rest["value"], rest["corpus"].map(whole), beside.reindex(keys).to_numpy())
    limits = table[table["metric"] == GONE].set_index(_OF_A_ROW)[["low", "high"]]
    of_rest = limits.reindex(pd.MultiIndex.from_frame(rest[_OF_A_ROW]))
    return (
        rest[["corpus", "n_left_out", "choice", "method", "blocks", "value"]]
        .rename(columns={"value": "perplexity"})
        .assign(gone=gone, low=of_rest["low"].to_numpy(), high=of_rest["high"].to_numpy())
    )
