"""The functional groups of extreme sub-updates, and when they are active (section 5.2).

The paper says of them that they are mostly active where little has been read or where the prediction is
easy, and that those which promote unlikely tokens leave the top candidate as it is. Whether that is so is
told by setting the updates that have one beside the updates of the same layers that have none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import metrics
from matlens.activations.collecting import collect
from matlens.corpora.frequency import KINDS
from matlens.ffn.clusters import Clusters
from matlens.ffn.extremes import SubUpdates, by_cluster
from matlens.ffn.trace import Trace
from matlens.ffn.values import ValueVectors
from matlens.models.readout import Readout
from matlens.storage.tables import result_row, result_table

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.corpora.examples import Examples

EXPERIMENT = "extreme_groups"
_READ = 256  # rows that are read out at once
_PLACES = (1, 2, 3, 4, 6, 11, 21, 41)  # where a range of places begins


@torch.inference_mode()
def final_confidence(
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
        See `final_confidence`.
    """
    kinds = kind_of[["cluster", "sign", "kind"]].drop_duplicates()
    own, other = (by_cluster(each, clusters).merge(kinds, "left") for each in (found, beside))
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
    own, place = by_cluster(found, clusters).merge(kinds, "left"), trace.examples.positions + 1
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
        EXPERIMENT, model=trace.provenance["model"]["base_model_name_or_path"],
        corpus=trace.provenance["data"].get("corpus", "unnamed"), method=kind, layer=layer, target=layer,
        metric=metric, k=trace.k, estimate=metrics.Estimate(value, math.nan, math.nan, n),
    )  # fmt: skip
