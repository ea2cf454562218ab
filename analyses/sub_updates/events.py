"""All tables of the events of a trace (paper B, Table 4, Figure 3, Tables 9 and 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from studies import Model
from torch import Tensor

from matlens import metrics
from matlens.ffn import Events, Trace, event_scores, find_events, find_saturation, relative_scores, trace_row
from matlens.io import result_table

FREQUENCY, UPDATES = "saturation_frequency", "update_scores"  # experiments
TraceScores: TypeAlias = Mapping[tuple[str, str], Tensor]  # as `Trace.score`
QUANTILES = (5, 50, 95)  # per cent


def updates_by_effect(trace: Trace) -> dict[str, Events]:
    """Group updates by their effect on the top candidate, and events (Figure 3).

    ``update`` is every update, ``stays`` those after which the candidate is still on top, ``falls`` the
    others; ``saturation`` and ``elimination`` are those of `find_events`.
    """
    falls = trace.rank > 1
    updates = {}
    for effect, chosen in (("update", torch.ones_like(falls)), ("stays", ~falls), ("falls", falls)):
        example, layer = chosen.nonzero(as_tuple=True)
        updates[effect] = Events(example, layer, "before")
    return updates | find_events(trace)


def update_scores(
    trace: Trace,
    *,
    scores: Mapping[tuple[str, str], Tensor] | None = None,
    rows: Bool[Tensor, " n"] | None = None,
) -> pd.DataFrame:
    """Scores of the reference token by layer and by effect of the update (Figure 3).

    Like `event_scores`, with the groups of `updates_by_effect` in the column ``event``; layers without an
    update in a group have no row. The group ``update`` also has quantiles of ``max``, ``mean`` and ``min``
    over the updates, such as ``max_p95``.
    """
    table = list[dict[str, Any]]()
    kinds = {kind: updates.of_examples(rows) for kind, updates in updates_by_effect(trace).items()}
    for layer in range(trace.n_layers):
        for kind, updates in kinds.items():
            example = updates.example[updates.layer == layer]
            if not len(example):
                continue
            for group in trace.index:
                of_layer = (scores or trace.score)[group, updates.reference][example, layer]
                summaries = {"max": of_layer.amax(1), "mean": of_layer.mean(1), "min": of_layer.amin(1)}
                for metric, values in summaries.items():
                    estimates = {metric: metrics.mean(values)}
                    if kind == "update":
                        estimates |= _quantiles(metric, values)
                    for name, estimate in estimates.items():
                        row = trace_row(trace, UPDATES, group, layer, name, estimate)
                        table.append({"event": kind, **row})
    return pd.DataFrame(table)


def saturation_frequency(trace: Trace) -> pd.DataFrame:
    """Share of the examples whose prediction is made at each layer (Tables 9 and 10).

    The method is the sub-module: ``ffn``, ``attention``, or ``either``, which sums to 1 over the layers.
    """
    made_at, by_ffn = find_saturation(trace)
    rows = []
    for layer in range(trace.n_layers):
        made = made_at == layer
        for method, hits in (("either", made), ("ffn", made & by_ffn), ("attention", made & ~by_ffn)):
            rows.append(trace_row(trace, FREQUENCY, method, layer, "share", metrics.proportion(hits)))
    return result_table(rows)


def _quantiles(metric: str, values: Float[Tensor, " m"]) -> dict[str, metrics.Estimate]:
    quantiles = np.quantile(values.double().numpy(), [percent / 100 for percent in QUANTILES])
    return {
        f"{metric}_p{percent:02}": metrics.Estimate.without_interval(value, len(values))
        for percent, value in zip(QUANTILES, quantiles, strict=True)
    }


class EventTables(NamedTuple):
    """Tables of one trace, see `event_tables`."""

    events: pd.DataFrame
    scores: pd.DataFrame
    saturation: pd.DataFrame


def event_tables(trace: Trace, model: Model) -> EventTables:
    """`event_scores` and `update_scores` by every reading, and `saturation_frequency`.

    The first two have two more columns: ``read``, which is ``score`` (the trace's own), ``lift`` or ``odds``
    (`relative_scores` to the mean and to the rival); and ``examples``, which is ``all examples`` or, if there
    are attention sinks, ``sinks excluded``.
    """
    lift, odds = relative_scores(trace, model, "mean"), relative_scores(trace, model, "rival")
    readings = {"score": trace.score, "lift": lift, "odds": odds}
    counted: dict[str, Tensor | None] = {"all examples": None}
    if trace.sinks.any():
        counted["sinks excluded"] = ~trace.sinks
    events, scores = (
        pd.concat(
            make(trace, scores=reading, rows=rows).assign(examples=examples, read=name)
            for name, reading in readings.items()
            for examples, rows in counted.items()
        )
        for make in (event_scores, update_scores)
    )
    return EventTables(events, scores, saturation_frequency(trace))
