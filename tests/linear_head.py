"""A read-out that is linear and nothing else, and vectors drawn for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.readout import Readout
from matlens.models.weights import WeightChecksum

D, VOCAB = 5, 14


class Head(Readout):
    """A read-out that is linear and nothing else."""

    device = torch.device("cpu")

    def __init__(self, scale: float = 2.0) -> None:
        self.weight = scale * random(VOCAB, D, seed=99)
        self.weights = WeightChecksum([], "the head")
        self.largest = 0

    def logits(self, h: Tensor) -> Tensor:
        self.largest = max(self.largest, len(h))
        return h @ self.weight.T

    def log_probs(self, h: Tensor) -> Tensor:
        return self.logits(h).log_softmax(-1)

    def check_same(self, other: Provenance | ModelIdentity, *, theirs: str = "") -> None:
        """It is of no model, so that the vectors may be of any."""


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distribution(head: Head, h: list[float]) -> list[float]:
    scores = [sum(w * x for w, x in zip(row, h, strict=True)) for row in head.weight.tolist()]
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]
