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

from matlens.errors import InputError
from matlens.ffn.clusters import Clusters
from matlens.ffn.projection import TOP, Projection
from matlens.ffn.trace import Trace
from matlens.ffn.values import Values
from matlens.ffn.words import token_texts
from matlens.tokens import shown

SHARE = 0.01  # of the dominant sub-updates that count as extreme where no threshold is given
_HALF = 0.5


class Extremes(NamedTuple):
    """Sub-updates whose score for the top candidate passes the threshold either way.

    Attributes
    ----------
    row
        Which value vector, as in `Values.at`.
    layer
        Of it.
    coefficient, score
        ``m_i``, and ``e_w . m_i v_i`` of the top candidate before the update.
    threshold
        Which was passed.
    n
        How many dominant sub-updates were looked at.
    """

    row: Int[Tensor, " m"]
    layer: Int[Tensor, " m"]
    coefficient: Float[Tensor, " m"]
    score: Float[Tensor, " m"]
    threshold: float
    n: int


def extremes(trace: Trace, values: Values, *, threshold: float | None = None) -> Extremes:
    """Find the dominant sub-updates that move the top candidate most.

    Parameters
    ----------
    trace, values
        Of one model.
    threshold
        What the size of a score has to pass; by default one in a hundred does.

    Raises
    ------
    InputError
        The threshold is not positive, or no score passes it.
    """
    score = trace.score["dominant", "before"]
    if threshold is None:
        threshold = float(np.quantile(score.abs().numpy(), 1 - SHARE))
    if not 0 < threshold < float("inf"):
        raise InputError(f"The threshold is {threshold}. Expected a positive number.")
    at = (score.abs() > threshold).nonzero(as_tuple=True)
    if not len(at[0]):
        raise InputError(
            f"No score passes {threshold:g} either way: the largest is {float(score.abs().max()):g}. "
            "Expected a threshold below that."
        )
    row = at[1] * values.d_mlp + trace.index["dominant"][at]
    return Extremes(row, at[1], trace.coefficient["dominant"][at], score[at], threshold, score.numel())


class Commonness:
    """How common tokens are in a text.

    Parameters
    ----------
    tokens
        The running text.
    d_vocab
        How many tokens there are.
    """

    def __init__(self, tokens: Int[np.ndarray, " n"], d_vocab: int) -> None:
        self.counts = np.bincount(tokens, minlength=d_vocab)
        order = np.argsort(-self.counts, kind="stable")
        running = np.cumsum(self.counts[order])
        self.common = np.zeros(d_vocab, dtype=bool)
        self.common[order[: int(np.searchsorted(running, _HALF * running[-1])) + 1]] = True

    def of(self, ids: Int[Tensor, " k"]) -> tuple[float, float]:
        """Shares of tokens that are common, and that do not occur.

        Common are the fewest tokens that make half of the running text.
        """
        own = ids.numpy()
        return float(self.common[own].mean()), float((self.counts[own] == 0).mean())


def extreme_clusters(
    found: Extremes, clusters: Clusters, values: Values, projection: Projection, commonness: Commonness
) -> pd.DataFrame:
    """The clusters of extreme sub-updates, those with most first.

    Columns are ``cluster, sign, size, extremes, share, raised, layer, first_layer, last_layer, common,
    unseen, tokens``: the sign of the coefficients; the cluster's vectors; how many extreme sub-updates are of
    it, and what share that is of all; how many of them raised the candidate; the mean, first and last layer
    of these; the shares of the ``30`` tokens it promotes with such coefficients that are common, and that do
    not occur in the text; and the first ten of them, as people see them.
    """
    table = pd.DataFrame(
        {
            "cluster": clusters.labels[found.row.numpy()], "layer": found.layer.numpy(),
            "sign": torch.sign(found.coefficient).int().numpy(), "up": (found.score > 0).numpy(),
        }
    )  # fmt: skip
    rows = []
    pairs = table[["cluster", "sign"]].drop_duplicates().to_numpy().tolist()
    for cluster, sign in pairs:
        own = table[(table["cluster"] == cluster) & (table["sign"] == sign)]
        ids = projection.top(sign * clusters.directions(values, [cluster]), TOP).ids[0]
        layers = own["layer"]
        texts = ", ".join(map(shown, token_texts(projection.tokenizer, ids[:10].tolist())))
        told = (len(own), len(own) / len(table), int(own["up"].sum()))
        where = (float(layers.mean()), int(layers.min()), int(layers.max()))
        rows.append((cluster, sign, int(clusters.sizes[cluster]), *told, *where, *commonness.of(ids), texts))
    columns = [
        "cluster", "sign", "size", "extremes", "share", "raised", "layer", "first_layer", "last_layer",
        "common", "unseen", "tokens",
    ]  # fmt: skip
    order = ["extremes", "cluster", "sign"]
    return pd.DataFrame(rows, columns=columns).sort_values(
        order, ascending=[False, True, True], ignore_index=True
    )
