"""Self-Debiasing as the authors write it down, for one place and in plain numbers."""

from __future__ import annotations

import math


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def debiased_probabilities(
    plain: list[float], announced: list[list[float]], decay: float, floor: float
) -> list[float]:
    """``p~`` as section 4.1 of Schick et al. writes it, with the floor of their code."""
    p, biased = softmax(plain), [softmax(logits) for logits in announced]
    weights = []
    for w in range(len(p)):
        delta = min(p[w] - q[w] for q in biased)
        alpha = 1.0 if delta >= 0 else max(math.exp(decay * delta), floor)
        weights.append(alpha * p[w])
    return [weight / sum(weights) for weight in weights]
