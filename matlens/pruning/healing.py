"""Healing: folded matrices trained, and nothing else, towards the original model's predictions.

What falls is the divergence of the pruned model's distributions from the original model's, the mean of
``KL(p || q)`` over tokens, on the text that maps were fitted on. The original model's are known from its
streams, and blocks before the first folded matrix need not be run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from matlens.errors import InputError
from matlens.numerics.probabilities import kl_divergence, log_softmax
from matlens.parallel import Bar
from matlens.pruning.choices import Method
from matlens.pruning.folding import changed_by
from matlens.pruning.layouts import Layout
from matlens.pruning.streams import ConstantBlock, Streams

RATE = 3e-4  # of Adam, at its highest
_TOKENS = 1024  # of an update


class Healed(NamedTuple):
    """Tokens that healing read, the divergence from the original model that is left, in nats, and seconds."""

    n_tokens: int
    divergence: float
    seconds: float


def heal(
    streams: Streams, pruned: Any, blocks: Sequence[int], method: Method, n_tokens: int, *,
    seed: int = 0, progress: bool = True,
) -> Healed:  # fmt: skip
    """Train the matrices that a method has changed in a model without some blocks, in place.

    At least ``n_tokens`` are read, in whole updates of some 1,024.
    """
    began = time.monotonic()
    layout, original = replace(streams.layout, model=pruned), streams.layout
    kept = [index for index in range(len(original.blocks)) if index not in set(blocks)]
    folded = changed_by(method, blocks, len(original.blocks))
    first = min(folded)
    start = kept.index(first)
    weights = [
        parameter
        for index in folded
        for parameter in layout.writer_of(layout.blocks[kept.index(index)]).parameters()
    ]
    before = [parameter.requires_grad for parameter in pruned.parameters()]
    length = streams.tokens.shape[1]
    size = max(1, _TOKENS // length)
    updates = max(1, math.ceil(n_tokens / (size * length)))
    # Steps are smaller than half precision can tell, so they are taken in float32.
    stepped = [weight.detach().float() if weight.element_size() < 4 else weight for weight in weights]
    optimizer = torch.optim.Adam(stepped, lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / (0.1 * updates)) * (1 - step / updates)
    )
    order = _order(len(streams.tokens), size * updates, seed)
    divergences: list[float] = []
    try:
        pruned.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        with Bar(total=updates, desc="healing", unit="update", disable=not progress) as bar:
            for texts in order.split(size):
                with torch.no_grad():
                    truth = _read_from(original, len(original.blocks), streams, streams.h[-1][texts], texts)
                given = _read_from(layout, start, streams, streams.h[first][texts], texts)
                loss = kl_divergence(truth, given).mean()
                if not bool(loss.isfinite()):
                    raise InputError("The divergence is not finite while healing. Expected a larger penalty.")
                pruned.zero_grad()
                loss.backward()
                apart = [pair for pair in zip(stepped, weights, strict=True) if pair[0] is not pair[1]]
                for full, weight in apart:
                    full.grad = weight.grad.float()
                optimizer.step()
                with torch.no_grad():
                    for full, weight in apart:
                        weight.copy_(full)
                schedule.step()
                divergences.append(float(loss.detach()))
                bar.update(1)
                bar.set_postfix(kl=f"{divergences[-1]:.3f}")
    finally:
        for parameter, wanted in zip(pruned.parameters(), before, strict=True):
            parameter.requires_grad_(wanted)
            parameter.grad = None
    last = divergences[-max(1, updates // 10) :]
    return Healed(len(order) * length, sum(last) / len(last), time.monotonic() - began)


def _order(n_texts: int, n: int, seed: int) -> Int[Tensor, " n"]:
    """Numbers of texts, all of them in a new order each time."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(n_texts, generator=generator) for _ in range(-(-n // n_texts))]
    return torch.cat(rounds)[:n]


def _read_from(
    layout: Layout, start: int, streams: Streams, h: Float[Tensor, "n length d_model"], texts: Tensor
) -> Float[Tensor, "n length d_vocab"]:
    """Logarithms of what a model says of texts whose stream before a block is known."""
    parent, _, name = layout.path.rpartition(".")
    place, blocks, device = layout.model.get_submodule(parent), layout.blocks, layout.model.device
    # A vector that was made without gradients cannot be part of what has some.
    known = ConstantBlock(h.clone().to(device), streams.rest)
    setattr(place, name, nn.ModuleList([known] * start + list(blocks[start:])))
    try:
        logits = layout.model(streams.tokens[texts].to(device), use_cache=False).logits
    finally:
        setattr(place, name, blocks)
    return log_softmax(logits.float())
