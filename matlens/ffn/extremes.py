"""Extreme sub-updates: those that move the top candidate most, and the clusters that they are of (5.2).

A few clusters of value vectors make most of the extreme scores. The paper finds two kinds: vectors of the
upper layers that promote unlikely tokens, and vectors of all layers that promote common ones. So each
cluster is told with how common the tokens are that it promotes. Where coefficients have both signs, as in
gated FFNs, a cluster promotes one set of tokens with positive and another with negative coefficients, and the
two are kept apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens.corpora.frequency import TokenFrequency, frequency_kinds
from matlens.errors import InputError
from matlens.ffn.clusters import Clusters
from matlens.ffn.projection import TOP, Projection
from matlens.ffn.scores import TraceScores
from matlens.ffn.trace import Trace
from matlens.ffn.values import ValueVectors
from matlens.models.vocabulary import token_texts, visible

SHARE = 0.01  # of the dominant sub-updates that count as extreme where no threshold is given
COLUMNS = (
    "cluster", "sign", "kind", "size", "cosine", "extremes", "share", "raised", "at_sinks", "examples",
    "layer", "first_layer", "last_layer", "common", "unseen", "members", "tokens",
)  # fmt: skip


class SubUpdates(NamedTuple):
    """Chosen dominant sub-updates of a trace, in the order of its examples and layers.

    Attributes
    ----------
    example, layer
        Of which update.
    row
        Which value vector, as in `Values.at`.
    coefficient, score
        ``m_i``, and the score of the top candidate before the update.
    """

    example: Int[Tensor, " m"]
    layer: Int[Tensor, " m"]
    row: Int[Tensor, " m"]
    coefficient: Float[Tensor, " m"]
    score: Float[Tensor, " m"]


def usual_threshold(scores: TraceScores) -> float:
    """What the size of a score has to pass so that one in a hundred dominant sub-updates does."""
    return float(np.quantile(scores["dominant", "before"].abs().numpy(), 1 - SHARE))


def extreme_sub_updates(
    trace: Trace, values: ValueVectors, *, scores: TraceScores | None = None, threshold: float | None = None
) -> SubUpdates:
    """Find the dominant sub-updates whose score for the top candidate passes a threshold either way.

    Parameters
    ----------
    trace, values
        Of one model.
    scores
        Other scores than the trace's own, such as `scores.lift` gives.
    threshold
        What the size of a score has to pass, see `usual_threshold`.

    Raises
    ------
    InputError
        The trace is of another model, the threshold is not positive, or no score passes it.
    """
    read = trace.score if scores is None else scores
    least, size = usual_threshold(read) if threshold is None else threshold, read["dominant", "before"].abs()
    if not 0 < least < float("inf"):
        raise InputError(f"The threshold is {least}. Expected a positive number.")
    if not bool((size > least).any()):
        raise InputError(
            f"No score passes {least:g} either way: the largest is {float(size.max()):g}. Expected a "
            "threshold below that."
        )
    return _at((size > least).nonzero(), trace, values, read)


def drawn_sub_updates(
    trace: Trace, values: ValueVectors, n: int, *, scores: TraceScores | None = None, seed: int = 0
) -> SubUpdates:
    """Draw ``n`` dominant sub-updates, or all if there are fewer, to set beside the extreme ones.

    Raises
    ------
    InputError
        The trace is of another model.
    """
    read = trace.score if scores is None else scores
    shape = read["dominant", "before"].shape
    chosen = np.random.default_rng(seed).permutation(int(np.prod(shape)))[:n]
    places = np.stack(np.unravel_index(np.sort(chosen), shape), axis=1)
    return _at(torch.from_numpy(places), trace, values, read)


def _at(places: Int[Tensor, "m 3"], trace: Trace, values: ValueVectors, scores: TraceScores) -> SubUpdates:
    trace.provenance.require_same(values.identity, ours="the trace")
    at = example, layer, _ = places.unbind(1)
    row = layer * values.d_mlp + trace.index["dominant"][at]
    return SubUpdates(
        example, layer, row, trace.coefficient["dominant"][at], scores["dominant", "before"][at]
    )


def by_cluster(found: SubUpdates, clusters: Clusters) -> pd.DataFrame:
    """Each sub-update with its ``cluster`` and the ``sign`` of its coefficient, 1 or -1, one row each.

    Further columns are ``example, layer, raised``.
    """
    return pd.DataFrame(
        {
            "cluster": clusters.labels[found.row.numpy()],
            "sign": np.where(found.coefficient.numpy() < 0, -1, 1),
            "example": found.example.numpy(),
            "layer": found.layer.numpy(),
            "raised": (found.score > 0).numpy(),
        }
    )


def cluster_activity(
    found: SubUpdates,
    clusters: Clusters,
    trace: Trace,
    values: ValueVectors,
    projection: Projection,
    commonness: TokenFrequency,
) -> pd.DataFrame:
    """The clusters of sub-updates, those with most first, one row for each sign of the coefficients.

    Columns are `COLUMNS`: the cluster and the sign; the kind, see `commonness.kinds`; how many value vectors
    the cluster has, and the mean cosine between two of them; how many of the sub-updates are of it, and what
    share of all that is; the share of these that raise the candidate, and that are at attention sinks; the
    share of the trace's examples in which there is one; their mean, first and last layer; the shares of the
    30 tokens promoted with such coefficients that are common and that do not occur; the names of the value
    vectors; and the first ten of the tokens, as people see them.

    Raises
    ------
    InputError
        The clusters are those of another model.
    """
    each = by_cluster(found, clusters).assign(sink=trace.sinks[found.example].numpy())
    grouped = each.groupby(["cluster", "sign"])
    table = grouped.agg(
        extremes=("layer", "size"), raised=("raised", "mean"), at_sinks=("sink", "mean"),
        examples=("example", "nunique"), layer=("layer", "mean"), first_layer=("layer", "min"),
        last_layer=("layer", "max"),
    ).reset_index()  # fmt: skip
    chosen = table["cluster"].tolist()
    directions = clusters.directions(values, chosen)
    signs = directions.new_tensor(table["sign"].tolist())
    ids = projection.top(signs[:, None] * directions, TOP).ids.numpy()
    common, unseen = commonness.shares(ids)
    texts = [", ".join(map(visible, token_texts(projection.tokenizer, own[:10]))) for own in ids.tolist()]
    table = table.assign(
        kind=frequency_kinds(common, unseen), size=clusters.sizes[chosen],
        cosine=clusters.cosines(directions, chosen),
        share=table["extremes"] / len(each), examples=table["examples"] / len(trace), common=common,
        unseen=unseen, members=[_names(values, clusters, cluster) for cluster in chosen], tokens=texts,
    )  # fmt: skip
    order = ["extremes", "cluster", "sign"]
    return table[list(COLUMNS)].sort_values(order, ascending=[False, True, True], ignore_index=True)


def _names(values: ValueVectors, clusters: Clusters, cluster: int) -> str:
    return " ".join(str(values.at(row)) for row in clusters.members(cluster).tolist())
