"""Extreme sub-updates: those that move the top candidate most, and the clusters that they are of (5.2).

A few clusters of value vectors make most of the extreme scores. The paper finds two kinds: vectors of the
upper layers that promote unlikely tokens, and vectors of all layers that promote common ones. So each
cluster is told with how common the tokens are that it promotes. Where coefficients have both signs, as in
gated FFNs, a cluster promotes one set of tokens with positive and another with negative coefficients, and the
two are kept apart.

The paper says of these groups that they are mostly active where little has been read or where the prediction
is easy, and that those which promote unlikely tokens leave the top candidate as it is. Whether that is so is
told by setting the updates that have an extreme sub-update beside the updates of the same layers that have
none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens import metrics
from matlens.activations.collecting import collect
from matlens.corpora.frequency import KINDS, TokenFrequency, frequency_kinds
from matlens.errors import InputError
from matlens.ffn.clusters import Clusters
from matlens.ffn.events import TraceScores
from matlens.ffn.projection import TOP, Projection
from matlens.ffn.trace import Trace
from matlens.ffn.values import ValueVectors
from matlens.models.readout import Readout
from matlens.models.vocabulary import token_texts, visible
from matlens.storage.tables import result_row, result_table

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.corpora.examples import Examples

SHARE = 0.01  # of the dominant sub-updates that count as extreme where no threshold is given
EXTREME_GROUPS = "extreme_groups"  # the experiment's name in tables
ACTIVITY_COLUMNS = (
    "cluster", "sign", "kind", "size", "cosine", "extremes", "share", "raised", "at_sinks", "examples",
    "layer", "first_layer", "last_layer", "common", "unseen", "members", "tokens",
)  # fmt: skip
_READ = 256  # rows that are read out at once
_PLACES = (1, 2, 3, 4, 6, 11, 21, 41)  # where a range of places begins


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


def default_threshold(scores: TraceScores) -> float:
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
        Other scores than the trace's own, such as `lift_scores` gives.
    threshold
        What the size of a score has to pass, see `default_threshold`.

    Raises
    ------
    InputError
        The trace is of another model, the threshold is not positive, or no score passes it.
    """
    read = trace.score if scores is None else scores
    least, size = (
        default_threshold(read) if threshold is None else threshold,
        read["dominant", "before"].abs(),
    )
    if not 0 < least < float("inf"):
        raise InputError(f"The threshold is {least}. Expected a positive number.")
    if not bool((size > least).any()):
        raise InputError(
            f"No score passes {least:g} either way: the largest is {float(size.max()):g}. Expected a "
            "threshold below that."
        )
    return _at((size > least).nonzero(), trace, values, read)


def draw_sub_updates(
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
    if trace.provenance["model"]["fingerprint"] != values.fingerprint:
        raise InputError(
            f"The trace is of another model than {values.model_name}. Expected the model that was traced."
        )
    at = example, layer, _ = places.unbind(1)
    row = layer * values.d_mlp + trace.index["dominant"][at]
    return SubUpdates(
        example, layer, row, trace.coefficient["dominant"][at], scores["dominant", "before"][at]
    )


def sub_updates_by_cluster(found: SubUpdates, clusters: Clusters) -> pd.DataFrame:
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

    Columns are `ACTIVITY_COLUMNS`: the cluster and the sign; the kind, see `frequency_kinds`; how many value
    vectors the cluster has, and the mean cosine between two of them; how many of the sub-updates are of it,
    and what share of all that is; the share of these that raise the candidate, and that are at attention
    sinks; the share of the trace's examples in which there is one; their mean, first and last layer; the
    shares of the 30 tokens promoted with such coefficients that are common and that do not occur; the names
    of the value vectors; and the first ten of the tokens, as people see them.

    Raises
    ------
    InputError
        The clusters are those of another model.
    """
    each = sub_updates_by_cluster(found, clusters).assign(sink=trace.sinks[found.example].numpy())
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
    return table[list(ACTIVITY_COLUMNS)].sort_values(order, ascending=[False, True, True], ignore_index=True)


def _names(values: ValueVectors, clusters: Clusters, cluster: int) -> str:
    return " ".join(str(values.at(row)) for row in clusters.members(cluster).tolist())


@torch.inference_mode()
def prediction_confidence(
    model: TransformerBridge, examples: Examples, *, progress: bool = True
) -> Float[Tensor, " n"]:
    """The probability that the model gives to its prediction for each example."""
    last = collect(model, examples, ["h.-1"], progress=progress)[-1]
    readout = Readout(model)
    return torch.cat([readout.logits(rows).softmax(-1).amax(-1).cpu() for rows in last.split(_READ)])


def group_table(
    found: SubUpdates,
    beside: SubUpdates,
    kind_of: pd.DataFrame,
    clusters: Clusters,
    values: ValueVectors,
    trace: Trace,
    confident: Float[Tensor, " n"],
) -> pd.DataFrame:
    """What the extreme sub-updates of each kind have in common, a tidy table.

    The methods are the kinds, and ``all``; ``layer`` is the mean layer of the extreme sub-updates. Metrics:

    - ``share`` of the extreme sub-updates that are of the kind, and ``share_drawn``, the same for others;
    - ``clusters`` that they are of, the share of the model's value ``vectors`` that these clusters hold, the
      share that is ``active``, of which there are extreme sub-updates, and ``cosine``, the median over the
      clusters of the mean cosine between two of their vectors;
    - ``raised`` and ``at_sinks``, shares of the extreme sub-updates that raise the candidate and that are
      at attention sinks;
    - ``place`` of the token in its sentence, from 1, ``confidence``, the probability of the prediction, and
      ``stays``, whether the top candidate stays on top: means over the updates that have such a sub-update,
      sinks left out; ``place_else`` and so on, over the other updates of the same layers, weighed alike.

    Sub-updates of one example are not independent of each other, so there are no intervals.

    Parameters
    ----------
    found, beside
        The extreme sub-updates, and drawn ones, of the trace.
    kind_of
        The kind of each ``cluster`` and ``sign``, such as `extremes.cluster_activity` tells for both.
    clusters, values, trace
        That they are of.
    confident
        See `prediction_confidence`.
    """
    kinds = kind_of[["cluster", "sign", "kind"]].drop_duplicates()
    own, other = (sub_updates_by_cluster(each, clusters).merge(kinds, "left") for each in (found, beside))
    own = own.assign(sink=trace.sinks[found.example].numpy(), row=found.row.numpy())
    shape = trace.rank.shape
    quantities = {
        "place": np.broadcast_to(trace.examples.positions[:, None] + 1.0, shape),
        "confidence": np.broadcast_to(confident.double().numpy()[:, None], shape),
        "stays": (trace.rank == 0).double().numpy(),
    }
    counted = np.broadcast_to(~trace.sinks.numpy()[:, None], shape)
    rows = []
    for kind in ("all", *KINDS):
        part = own if kind == "all" else own[own["kind"] == kind]
        if part.empty:
            continue
        chosen = part["cluster"].unique()
        cosines = clusters.cosines(clusters.directions(values, chosen.tolist()), chosen.tolist())
        cosines = cosines[np.isfinite(cosines)]
        drawn = 1.0 if kind == "all" else float((other["kind"] == kind).mean())
        told: dict[str, tuple[float, int]] = {
            "share": (len(part) / len(own), len(own)),
            "share_drawn": (drawn, len(other)),
            "clusters": (len(chosen), len(chosen)),
            "vectors": (clusters.sizes[chosen].sum() / len(values), len(chosen)),
            "active": (part["row"].nunique() / len(values), len(part)),
            "cosine": (float(np.median(cosines)) if len(cosines) else math.nan, len(cosines)),
            "raised": (part["raised"].mean(), len(part)),
            "at_sinks": (part["sink"].mean(), len(part)),
        }
        active = np.zeros(shape, dtype=bool)
        active[part["example"], part["layer"]] = True
        for name, quantity in quantities.items():
            told |= _beside(name, quantity, active & counted, ~active & counted)
        for metric, (value, n) in told.items():
            rows.append(_row(trace, kind, float(part["layer"].mean()), metric, float(value), n))
    return result_table(rows)


def place_table(found: SubUpdates, kind_of: pd.DataFrame, clusters: Clusters, trace: Trace) -> pd.DataFrame:
    """How many extreme sub-updates an example has, by the place of its token in the sentence.

    The columns are ``kind, first_place, last_place, per_example, examples``, places from 1; of decoders that
    is how many tokens the model has read. Sinks count as what they are, which is first tokens mostly.

    Parameters
    ----------
    found, kind_of, clusters, trace
        As in `group_table`.
    """
    kinds = kind_of[["cluster", "sign", "kind"]].drop_duplicates()
    own, place = sub_updates_by_cluster(found, clusters).merge(kinds, "left"), trace.examples.positions + 1
    rows = []
    for first, last in zip(_PLACES, (*(start - 1 for start in _PLACES[1:]), int(place.max())), strict=True):
        chosen = (place >= first) & (place <= last)
        for kind in KINDS if chosen.any() else ():
            n = int(chosen[own.loc[own["kind"] == kind, "example"]].sum())
            rows.append((kind, first, last, n / int(chosen.sum()), int(chosen.sum())))
    return pd.DataFrame(rows, columns=["kind", "first_place", "last_place", "per_example", "examples"])


def _beside(
    name: str,
    quantity: Float[np.ndarray, "n l"],
    active: Bool[np.ndarray, "n l"],
    idle: Bool[np.ndarray, "n l"],
) -> dict[str, tuple[float, int]]:
    """Means over active updates, and over idle ones with the layers weighed as they are among the active."""
    layers = active.any(0) & idle.any(0)
    times, n_idle = active.sum(0)[layers], int(idle[:, layers].sum())
    if not times.sum():
        return {}
    means = [
        (np.where(chosen, quantity, 0).sum(0)[layers] / chosen.sum(0)[layers]) @ times / times.sum()
        for chosen in (active, idle)
    ]
    return {name: (means[0], int(times.sum())), f"{name}_else": (means[1], n_idle)}


def _row(trace: Trace, kind: str, layer: float, metric: str, value: float, n: int) -> dict[str, Any]:
    return result_row(
        EXTREME_GROUPS, model=trace.provenance["model"]["base_model_name_or_path"],
        corpus=trace.provenance["data"].get("corpus", "unnamed"), method=kind, layer=layer, target=layer,
        metric=metric, k=trace.k, estimate=metrics.Estimate(value, math.nan, math.nan, n),
    )  # fmt: skip
