"""All tables of the events of a trace (paper B, Table 4, Figure 3, Tables 9 and 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
from torch import Tensor

from matlens.errors import checked
from matlens.ffn.events import event_scores, lift_scores, odds_scores, saturation_frequency, update_scores
from matlens.ffn.trace import Trace

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


class EventTables(NamedTuple):
    """Tables of one trace, see `event_tables`."""

    events: pd.DataFrame
    scores: pd.DataFrame
    saturation: pd.DataFrame


@checked
def event_tables(trace: Trace, model: TransformerBridge) -> EventTables:
    """`event_scores` and `update_scores` by every reading of the scores, and `saturation_frequency`.

    The first two have two more columns: ``read``, which is ``score``, the trace's own, ``lift``
    (`lift_scores`) or ``odds`` (`odds_scores`); and ``examples``, which is ``all examples``, and in a trace
    with attention sinks also ``sinks left out``.
    """
    readings = {
        "score": trace.score, "lift": lift_scores(trace, model), "odds": odds_scores(trace, model)
    }  # fmt: skip
    counted: dict[str, Tensor | None] = {"all examples": None}
    if trace.sinks.any():
        counted["sinks left out"] = ~trace.sinks
    events, scores = (
        pd.concat(
            make(trace, scores=reading, rows=rows).assign(examples=examples, read=name)
            for name, reading in readings.items()
            for examples, rows in counted.items()
        )
        for make in (event_scores, update_scores)
    )
    return EventTables(events, scores, saturation_frequency(trace))
