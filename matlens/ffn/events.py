"""Saturation and elimination: where a prediction is made and where a candidate falls (section 5.1).

On the way up the top candidate is read before and after every FFN. **Saturation** is where the token that
the model predicts comes to the top and stays there; **elimination** is the update that pushes the top
candidate down furthest. What the dominant sub-updates score for the token in question says whether it was
promoted to the top, and pushed down, or only overtaken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from matlens import metrics
from matlens.errors import InputError
from matlens.evaluation import COLUMNS
from matlens.ffn.trace import GROUPS, Trace

EXPERIMENT, FREQUENCY, TOP_CANDIDATE = "events", "saturation_frequency", "top_candidate"
SUMMARIES = ("max", "mean", "min")
EVENTS = ("saturation", "elimination")


class Saturation(NamedTuple):
    """Where each prediction is made.

    Attributes
    ----------
    layer
        After which the predicted token is the top candidate and stays it.
    by_ffn
        Whether the FFN of that layer has brought it there; otherwise it was there before that FFN, by the
        attention of that layer (or, in layer 0, from the embeddings on).
    """

    layer: Int[Tensor, " n"]
    by_ffn: Tensor


def saturation(trace: Trace) -> Saturation:
    """Find where each prediction is made.

    Candidates are read before and after every FFN. The first of these places from which on all have the
    token that the model predicts is where it is made.
    """
    candidates = torch.stack([trace.before, trace.after], dim=2).flatten(1)
    same = candidates == trace.final[:, None]
    held = same.flip(1).to(torch.uint8).cumprod(1).sum(1)  # the last so many places
    place = candidates.shape[1] - held
    return Saturation(place // 2, place % 2 == 1)


class Events(NamedTuple):
    """Events of one kind: which examples, at which layers, with which reference token."""

    example: Int[Tensor, " m"]
    layer: Int[Tensor, " m"]
    token: Int[Tensor, " m"]


def events(trace: Trace) -> dict[str, Events]:
    """The saturation and elimination events of FFNs, at most one of each in an example.

    Saturation: the FFN that brings the predicted token to the top, for good. Elimination: of all the FFNs
    that take the top candidate from the top, the one that leaves it on the lowest rank, the first of equals.
    """
    made = saturation(trace)
    (saturated,) = made.by_ffn.nonzero(as_tuple=True)
    rank, layer = trace.rank.max(1)
    (eliminated,) = (rank > 0).nonzero(as_tuple=True)
    lowest = layer[eliminated]
    return {
        "saturation": Events(saturated, made.layer[saturated], trace.final[saturated]),
        "elimination": Events(eliminated, lowest, trace.before[eliminated, lowest]),
    }


def event_scores(trace: Trace) -> pd.DataFrame:
    """Maximal, mean and minimal score of the reference token at events, means over the events (Table 4).

    A tidy table with one more column, ``event``. The methods are ``dominant`` and ``random`` sub-updates, the
    metrics ``max``, ``mean`` and ``min`` over the ``k`` of an update; ``layer`` is the mean layer of the
    events, ``n`` how many there are.

    Raises
    ------
    InputError
        There is no event of one kind.
    """
    rows = []
    for (event, found), reference in zip(events(trace).items(), ("final", "before"), strict=True):
        if not len(found.example):
            raise InputError(
                f"There is no {event} event among {len(trace)} examples: no FFN "
                + (
                    "makes a prediction for good"
                    if event == "saturation"
                    else "takes a candidate from the top"
                )
                + ". Expected at least one; run more sentences."
            )
        layer = float(found.layer.double().mean())
        for group in GROUPS:
            scores = trace.score[group, reference][found.example, found.layer]
            rows += _rows(trace, EXPERIMENT, group, layer, scores, event=event)
    return pd.DataFrame(rows)


def candidate_scores(trace: Trace) -> pd.DataFrame:
    """Scores that sub-updates give to the top candidate before each update, layer by layer (Figure 3).

    As `event_scores`, without events, a row for each layer.
    """
    rows = []
    for layer in range(trace.n_layers):
        for group in GROUPS:
            rows += _rows(trace, TOP_CANDIDATE, group, layer, trace.score[group, "before"][:, layer])
    return pd.DataFrame(rows)


def saturation_frequency(trace: Trace) -> pd.DataFrame:
    """Share of the examples whose prediction is made at each layer (Tables 9 and 10).

    The methods say by what: ``ffn``, ``attention``, or ``either``, which sums to 1 over the layers.
    """
    made = saturation(trace)
    rows = []
    for layer in range(trace.n_layers):
        here = made.layer == layer
        for method, hits in (
            ("either", here), ("ffn", here & made.by_ffn), ("attention", here & ~made.by_ffn)
        ):  # fmt: skip
            rows.append(_row(trace, FREQUENCY, method, layer, "share", metrics.proportion(hits)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(
    trace: Trace, experiment: str, group: str, layer: float, scores: Float[Tensor, "m k"], **more: Any
) -> list[dict[str, Any]]:
    over = {"max": scores.amax(1), "mean": scores.mean(1), "min": scores.amin(1)}
    return [
        more | _row(trace, experiment, group, layer, name, metrics.mean(values))
        for name, values in over.items()
    ]


def _row(
    trace: Trace, experiment: str, method: str, layer: float, metric: str, found: metrics.Estimate
) -> dict[str, Any]:
    told = (
        experiment, trace.provenance["model"]["base_model_name_or_path"],
        trace.provenance["data"].get("corpus", "unnamed"), method, layer, layer, metric, trace.k, *found,
    )  # fmt: skip
    return dict(zip(COLUMNS, told, strict=True))
