"""Saturation and elimination: where a prediction is made and where a candidate falls (section 5.1).

On the way up the top candidate is read before and after every FFN. **Saturation** is where the token that
the model predicts comes to the top and stays there; **elimination** is the update that pushes the top
candidate down furthest. What the dominant sub-updates score for the token in question says whether it was
promoted to the top, and pushed down, or only overtaken.

A score alone moves no probability, only its distance from other tokens' scores: the definition's
``e_w . m_i v_i`` multiplies the odds of a token, and what is added to all tokens alike cancels out. So there
are two more readings of the sub-updates of a trace: against the mean of the vocabulary (`lift_scores`), and
against the one token that the reference token competes with (`odds_scores`). Both are read off the weights;
nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens import metrics
from matlens.errors import InputError, check_rows, checked
from matlens.ffn.projection import unembedding
from matlens.ffn.trace import GROUPS, Trace
from matlens.ffn.values import ValueVectors
from matlens.io.tables import result_row, result_table

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TraceScores: TypeAlias = Mapping[tuple[str, str], Float[Tensor, "n n_layers k"]]
EVENTS, FREQUENCY, UPDATES = "events", "saturation_frequency", "update_scores"  # experiments
QUANTILES = (5, 50, 95)  # per cent


class Saturation(NamedTuple):
    """Where each prediction is made.

    Attributes
    ----------
    layer
        The layer after which the predicted token is the top candidate and remains it.
    by_ffn
        Whether the FFN of that layer has brought the token to the top; otherwise it was there before that
        FFN, by the attention of that layer (or, in layer 0, from the embeddings on).
    """

    layer: Int[Tensor, " n"]
    by_ffn: Bool[Tensor, " n"]


@checked
def find_saturation(trace: Trace) -> Saturation:
    """Find where each prediction of a trace is made (section 5.1).

    Candidates are read before and after every FFN. A prediction is made at the first of these places from
    which on all candidates are the token that the model predicts.
    """
    candidates = torch.stack([trace.before, trace.after], dim=2).flatten(1)
    predicted = candidates == trace.final[:, None]
    n_predicted = predicted.flip(1).to(torch.uint8).cumprod(1).sum(1)  # how many last places have the token
    place = candidates.shape[1] - n_predicted
    return Saturation(place // 2, place % 2 == 1)


class Events(NamedTuple):
    """Updates of one kind.

    Attributes
    ----------
    example, layer
        The row of the trace and the layer of each update.
    reference
        Which token its sub-updates are scored for: ``before`` or ``final``, see `Trace.score`.
    """

    example: Int[Tensor, " m"]
    layer: Int[Tensor, " m"]
    reference: str


@checked
def find_events(trace: Trace) -> dict[str, Events]:
    """Find the saturation and elimination events of FFNs, at most one of each in an example (section 5.1).

    Saturation: the FFN that brings the predicted token to the top, for good; the scores are those of the
    final token. Elimination: of all the FFNs that take the top candidate from the top, the one that leaves it
    on the lowest rank, the first of equals; the scores are those of that candidate.
    """
    saturation = find_saturation(trace)
    (saturated,) = saturation.by_ffn.nonzero(as_tuple=True)
    rank, layer = trace.rank.max(1)
    (eliminated,) = (rank > 1).nonzero(as_tuple=True)
    return {
        "saturation": Events(saturated, saturation.layer[saturated], "final"),
        "elimination": Events(eliminated, layer[eliminated], "before"),
    }


@checked
def updates_by_effect(trace: Trace) -> dict[str, Events]:
    """Sort the updates of a trace by what they do to the top candidate, events included (Figure 3).

    ``update`` is every update, ``stays`` those that leave the candidate on top, ``falls`` those that do not;
    ``saturation`` and ``elimination`` are those of `find_events`.
    """
    falls = trace.rank > 1
    updates = {}
    for effect, chosen in (("update", torch.ones_like(falls)), ("stays", ~falls), ("falls", falls)):
        example, layer = chosen.nonzero(as_tuple=True)
        updates[effect] = Events(example, layer, "before")
    return updates | find_events(trace)


def _scores_of(trace: Trace, scores: TraceScores | None) -> TraceScores:
    """The scores to read, by default the trace's own."""
    if scores is None:
        return trace.score
    if {key: values.shape for key, values in scores.items()} != {
        key: values.shape for key, values in trace.score.items()
    }:
        raise InputError("scores must have the keys and shapes of trace.score, such as lift_scores gives.")
    return scores


def _in_rows(events: Events, rows: Bool[Tensor, " n"] | None) -> Events:
    if rows is None:
        return events
    chosen = rows[events.example]
    return Events(events.example[chosen], events.layer[chosen], events.reference)


@checked
def event_scores(
    trace: Trace, *, scores: TraceScores | None = None, rows: Bool[Tensor, " n"] | None = None
) -> pd.DataFrame:
    """Maximal, mean and minimal score of the reference token at events, means over the events (Table 4).

    A tidy table with one more column, ``event``. The methods are ``dominant`` and ``random`` sub-updates, the
    metrics ``max``, ``mean`` and ``min`` over the ``k`` of an update; ``layer`` is the mean layer of the
    events, ``n`` how many there are.

    Parameters
    ----------
    trace
        Candidates and sub-updates of the examples.
    scores
        Scores to read instead of the trace's own, such as `lift_scores` gives.
    rows
        Which examples count, such as ``~trace.sinks``; by default all.
    """
    check_rows(rows, len(trace))
    scores, table = _scores_of(trace, scores), list[dict[str, Any]]()
    for kind, events in find_events(trace).items():
        events = _in_rows(events, rows)
        if not len(events.example):
            raise InputError(f"There is no {kind} event in these examples. Trace more sentences.")
        layer = float(events.layer.double().mean())
        for group in GROUPS:
            at_events = scores[group, events.reference][events.example, events.layer]
            for metric, values in _extremes_and_mean(at_events).items():
                row = trace_row(trace, EVENTS, group, layer, metric, metrics.mean(values))
                table.append({"event": kind, **row})
    return pd.DataFrame(table)


@checked
def update_scores(
    trace: Trace, *, scores: TraceScores | None = None, rows: Bool[Tensor, " n"] | None = None
) -> pd.DataFrame:
    """Scores of the reference token layer by layer, by what updates do to the top candidate (Figure 3).

    A table as that of `event_scores`, with the kinds of `updates_by_effect` in the column ``event``, and
    without rows where a layer has no update of a kind. Beside ``max``, ``mean`` and ``min`` there are their
    quantiles over the updates, such as ``max_p95``, for the kind ``update``.
    """
    check_rows(rows, len(trace))
    scores, table = _scores_of(trace, scores), list[dict[str, Any]]()
    kinds = {kind: _in_rows(updates, rows) for kind, updates in updates_by_effect(trace).items()}
    for layer in range(trace.n_layers):
        for kind, updates in kinds.items():
            example = updates.example[updates.layer == layer]
            if not len(example):
                continue
            for group in GROUPS:
                of_layer = scores[group, updates.reference][example, layer]
                for metric, values in _extremes_and_mean(of_layer).items():
                    estimates = {metric: metrics.mean(values)}
                    if kind == "update":
                        estimates |= _quantiles(metric, values)
                    for name, estimate in estimates.items():
                        row = trace_row(trace, UPDATES, group, layer, name, estimate)
                        table.append({"event": kind, **row})
    return pd.DataFrame(table)


@checked
def saturation_frequency(trace: Trace) -> pd.DataFrame:
    """Share of the examples whose prediction is made at each layer (Tables 9 and 10).

    The methods say by what: ``ffn``, ``attention``, or ``either``, which sums to 1 over the layers.
    """
    made_at, by_ffn = find_saturation(trace)
    rows = []
    for layer in range(trace.n_layers):
        made = made_at == layer
        for method, hits in (("either", made), ("ffn", made & by_ffn), ("attention", made & ~by_ffn)):
            rows.append(trace_row(trace, FREQUENCY, method, layer, "share", metrics.proportion(hits)))
    return result_table(rows)


def _extremes_and_mean(scores: Float[Tensor, "m k"]) -> dict[str, Float[Tensor, " m"]]:
    return {"max": scores.amax(1), "mean": scores.mean(1), "min": scores.amin(1)}


def _quantiles(metric: str, values: Float[Tensor, " m"]) -> dict[str, metrics.Estimate]:
    quantiles = np.quantile(values.double().numpy(), [percent / 100 for percent in QUANTILES])
    return {
        f"{metric}_p{percent:02}": metrics.Estimate.without_interval(value, len(values))
        for percent, value in zip(QUANTILES, quantiles, strict=True)
    }


def trace_row(
    trace: Trace, experiment: str, method: str, layer: float, metric: str, estimate: metrics.Estimate
) -> dict[str, Any]:
    """A row of a table of results that is about a layer of a trace, see `result_row`."""
    return result_row(
        experiment, model=trace.provenance.identity.name, corpus=trace.provenance.corpus, method=method,
        layer=layer, target=layer, metric=metric, k=trace.k, estimate=estimate,
    )  # fmt: skip


@checked
def lift_scores(trace: Trace, model: TransformerBridge) -> TraceScores:
    """How far each score of a trace lies above the sub-update's mean score over the vocabulary.

    The scores have the keys and shapes of `Trace.score`.
    """
    mean = unembedding(model).mean(0)
    return _relative_scores(trace, model, lambda reference, layer: mean.expand(len(trace), -1))


@checked
def odds_scores(trace: Trace, model: TransformerBridge) -> TraceScores:
    """What each sub-update adds to the log-odds of the reference token against its rival at that update.

    The rival of the top candidate ``before`` the update is the one ``after`` it; the rival of the ``final``
    token is the candidate before. Where reference and rival are one token, this is 0. The scores have the
    keys and shapes of `Trace.score`.
    """
    e = unembedding(model)
    rival = {"before": trace.after.to(e.device), "final": trace.before.to(e.device)}
    return _relative_scores(trace, model, lambda reference, layer: e[rival[reference][:, layer]])


@torch.inference_mode()
def _relative_scores(
    trace: Trace, model: TransformerBridge, baseline: Callable[[str, int], Tensor]
) -> TraceScores:
    """Scores less those of a baseline vector of each example, given by reference and layer."""
    values = ValueVectors(model)
    trace.provenance.check_same(values.identity, ours="the trace")
    relative = {key: torch.empty_like(scores) for key, scores in trace.score.items()}
    for layer in range(trace.n_layers):
        vectors = values.layer(layer)
        for (group, reference), scores in trace.score.items():
            chosen = vectors[trace.index[group][:, layer].to(values.device)]
            static = torch.einsum("nkd,nd->nk", chosen, baseline(reference, layer)).cpu()
            scaled = trace.scale[:, layer, None] * trace.coefficient[group][:, layer]
            relative[group, reference][:, layer] = scores[:, layer] - scaled * static
    return relative
