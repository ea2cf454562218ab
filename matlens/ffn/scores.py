"""What scores are compared with: a score alone moves no probability, only its distance from other tokens'.

The definition's ``e_w . m_i v_i`` multiplies the odds of a token, and what is added to all tokens alike
cancels out. So there are two more readings of the sub-updates of a trace: against the mean of the vocabulary,
and against the one token that the reference token competes with. Both are read off the weights; nothing is
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from matlens.ffn.trace import Trace
from matlens.ffn.values import ValueVectors, unembedding

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

TraceScores: TypeAlias = Mapping[tuple[str, str], Float[Tensor, "n n_layers k"]]


def lift(trace: Trace, model: TransformerBridge) -> TraceScores:
    """How far each score of a trace lies above the sub-update's mean score over the vocabulary.

    Raises
    ------
    InputError
        The trace is of another model.
    """
    mean = unembedding(model).mean(0)
    return _above(trace, model, lambda reference, layer: mean.expand(len(trace), -1))


def odds(trace: Trace, model: TransformerBridge) -> TraceScores:
    """What each sub-update adds to the log-odds of the reference token against its rival at that update.

    The rival of the top candidate ``before`` the update is the one ``after`` it; the rival of the ``final``
    token is the candidate before. Where reference and rival are one token, this is 0.

    Raises
    ------
    InputError
        The trace is of another model.
    """
    e = unembedding(model)
    rival = {"before": trace.after.to(e.device), "final": trace.before.to(e.device)}
    return _above(trace, model, lambda reference, layer: e[rival[reference][:, layer]])


@torch.inference_mode()
def _above(trace: Trace, model: TransformerBridge, other: Callable[[str, int], Tensor]) -> TraceScores:
    """Scores less those of another vector of each example, given by reference and layer."""
    values = ValueVectors(model)
    trace.provenance.require_same(values.identity, ours="the trace")
    found = {key: torch.empty_like(scores) for key, scores in trace.score.items()}
    for layer in range(trace.n_layers):
        vectors = values.layer(layer)
        for (group, reference), scores in trace.score.items():
            own = vectors[trace.index[group][:, layer].to(values.device)]
            static = torch.einsum("nkd,nd->nk", own, other(reference, layer)).cpu()
            coefficient = trace.coefficient[group][:, layer]
            found[group, reference][:, layer] = scores[:, layer] - coefficient * static
    return found
