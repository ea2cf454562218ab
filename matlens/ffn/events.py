"""Saturation and elimination events (paper B, section 5.1).

**Saturation** is where the predicted token becomes the top candidate for good; **elimination** is the update
that lowers a top candidate most. The scores of the dominant sub-updates for the token in question say whether
it was promoted to the top, and pushed down, or only overtaken.

A score alone changes no probability, only its difference from other tokens' scores: ``e_w . m_i v_i``
multiplies the odds of a token, and a number added to all scores cancels out. `relative_scores` compares with
the mean of the vocabulary, or with the one token that the reference token competes with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens import metrics
from matlens.errors import InputError, check_rows, checked
from matlens.ffn.projection import unembedding
from matlens.ffn.trace import GROUPS, Trace
from matlens.ffn.values import ValueVectors
from matlens.io.tables import result_row
from matlens.linear.maps import tensor_digest
from matlens.numerics import without_autocast

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

EVENTS = "events"  # the experiment


class TraceScores(dict[tuple[str, str], Tensor]):
    """Scores ``[n, n_layers, k]`` of a trace's sub-updates, with the keys of `Trace.score`."""

    def __init__(self, scores: Mapping[tuple[str, str], Tensor], trace: Trace) -> None:
        super().__init__(scores)
        self.trace = _digest(trace)


def _digest(trace: Trace) -> str:
    return tensor_digest(*trace.score.values())


class Saturation(NamedTuple):
    """The layer after which the predicted token is the top candidate for good.

    ``by_ffn``: whether its FFN brings the token to the top, or its attention (in layer 0, the embedding).
    """

    layer: Int[Tensor, " n"]
    by_ffn: Bool[Tensor, " n"]


@checked
def find_saturation(trace: Trace) -> Saturation:
    """Find where each prediction of a trace is made (paper B, section 5.1).

    Candidates are read before and after every FFN. A prediction is made at the first of these places from
    which on all candidates are the token that the model predicts.
    """
    candidates = torch.stack([trace.before, trace.after], dim=2).flatten(1)
    predicted = candidates == trace.final[:, None]
    n_predicted = predicted.flip(1).to(torch.uint8).cumprod(1).sum(1)  # how many last places have the token
    place = candidates.shape[1] - n_predicted
    return Saturation(place // 2, place % 2 == 1)


class Events(NamedTuple):
    """Updates of one kind, by row of the trace and layer.

    ``reference`` is the token that their sub-updates are scored for: ``before`` or ``final``.
    """

    example: Int[Tensor, " m"]
    layer: Int[Tensor, " m"]
    reference: str

    def of_examples(self, rows: Bool[Tensor, " n"] | None) -> Events:
        """The updates of some examples."""
        if rows is None:
            return self
        chosen = rows[self.example]
        return Events(self.example[chosen], self.layer[chosen], self.reference)


@checked
def find_events(trace: Trace) -> dict[str, Events]:
    """Find saturation and elimination events, at most one of each per example.

    Saturation: the FFN that brings the predicted token to the top for good; the scores are those of the
    final token. Elimination: of all FFNs that take the top candidate from the top, the one that leaves it on
    the lowest rank (the first of equals); the scores are those of that candidate.
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
def event_scores(
    trace: Trace,
    *,
    scores: Mapping[tuple[str, str], Float[Tensor, "n n_layers k"]] | None = None,
    rows: Bool[Tensor, " n"] | None = None,
) -> pd.DataFrame:
    """Mean over events of the maximal, mean and minimal score of the reference token (Table 4).

    A tidy table with one more column, ``event``. The methods are ``dominant`` and ``random`` sub-updates, the
    metrics ``max``, ``mean`` and ``min`` over the ``k`` of an update; ``layer`` is the mean layer of the
    events, ``n`` how many there are. ``scores`` are by default the trace's own, see `relative_scores`;
    ``rows`` are the examples to include, such as ``~trace.sinks``.
    """
    check_rows(rows, len(trace))
    shapes = {key: own.shape for key, own in trace.score.items()}
    of_other = isinstance(scores, TraceScores) and scores.trace != _digest(trace)
    if of_other or (scores is not None and {key: given.shape for key, given in scores.items()} != shapes):
        raise InputError("scores must be of this trace. Use relative_scores(trace, ...).")
    table = list[dict[str, Any]]()
    for kind, events in find_events(trace).items():
        events = events.of_examples(rows)
        if not len(events.example):
            raise InputError(f"There is no {kind} event in these examples. Trace more sentences.")
        layer = float(events.layer.double().mean())
        for group in GROUPS:
            at_events = (scores or trace.score)[group, events.reference][events.example, events.layer]
            extremes = {"max": at_events.amax(1), "mean": at_events.mean(1), "min": at_events.amin(1)}
            for metric, values in extremes.items():
                row = trace_row(trace, EVENTS, group, layer, metric, metrics.mean(values))
                table.append({"event": kind, **row})
    return pd.DataFrame(table)


@checked
def trace_row(
    trace: Trace, experiment: str, method: str, layer: float, metric: str, estimate: metrics.Estimate
) -> dict[str, Any]:
    """A row of a table of results that is about a layer of a trace, see `result_row`."""
    return result_row(
        experiment, model=trace.provenance.model_name, corpus=trace.provenance.corpus, method=method,
        layer=layer, target=layer, metric=metric, k=trace.k, estimate=estimate,
    )  # fmt: skip


@checked
@torch.no_grad()
@without_autocast()
def relative_scores(trace: Trace, model: TransformerBridge, to: Literal["mean", "rival"]) -> TraceScores:
    """Scores relative to the vocabulary's mean (lift) or to the rival's score (log-odds).

    The rival of the top candidate ``before`` an update is the one ``after`` it; the rival of the ``final``
    token is the candidate before. Where reference and rival are one token, the score is 0. Keys and shapes
    are those of `Trace.score`.
    """
    values, e = ValueVectors(model), unembedding(model)
    trace.provenance.check_same(values.identity, ours="the trace")
    mean = e.mean(0).expand(len(trace), -1)
    rival = {"before": trace.after.to(e.device), "final": trace.before.to(e.device)}
    relative = {key: torch.empty_like(scores) for key, scores in trace.score.items()}
    for layer in range(trace.n_layers):
        vectors = values.layer_view(layer)
        for (group, reference), scores in trace.score.items():
            baseline = mean if to == "mean" else e[rival[reference][:, layer]]
            chosen = vectors[trace.index[group][:, layer].to(values.device)]
            static = torch.einsum("nkd,nd->nk", chosen, baseline).cpu()
            scaled = trace.scale[:, layer, None] * trace.coefficient[group][:, layer]
            relative[group, reference][:, layer] = scores[:, layer] - scaled * static
    return TraceScores(relative, trace)
