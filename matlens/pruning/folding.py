"""Fold maps of removed blocks into the weights, and heal them.

Blocks ``i .. i+n-1`` are removed. ``m`` is the FFN output of the block before them and ``y`` the residual
stream without it, so ``h^i = y + m``; the new target of the FFN is ``h^{i+n} - y`` instead of ``m``. For
removed attention the target is ``m`` plus the attention output, if the FFN reads the stream after
attention.

Healing trains only the folded matrices, towards the original model's predictions: the mean of ``KL(p ||
q)`` over tokens of the calibration text. The original's predictions come from its stored streams, and
blocks before the first folded matrix are not run.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from matlens.errors import InputError
from matlens.linear.least_squares import LeastSquares
from matlens.numerics import in_float64, kl_divergence, recording_gradients
from matlens.parallel import Bar
from matlens.pruning.choosing import spans_of
from matlens.pruning.layouts import Layout, Streams, differ, full_block, silence

Method = Literal["out", "magnitude", "replaceme", "refit", "chain"]
# Refitted matrices have more parameters than calibration text determines.
PENALTIES: Mapping[Method, float] = {"refit": 0.1, "chain": 0.3}
RATE = 3e-4  # of Adam, at its highest
_TOKENS = 1024  # of an update
_ROWS = 8192  # of a part that moments take in


class Matrix(NamedTuple):
    """An FFN's output matrix and its bias."""

    weight: Float[Tensor, "d_model d_mlp"]
    bias: Float[Tensor, " d_model"] | None


# What can be folded


def check_foldable(layout: Layout) -> None:
    """Check that FFN outputs are added to the residual stream unchanged.

    Tested by a sum: with the matrix set to zero, the output of a block must decrease by the matrix's output.
    """
    streams = Streams.tried(layout)
    for index, block in enumerate(map(full_block, layout.blocks)):
        h = streams.h[index]
        whole, _, written = streams.through(index, block, h, layout.writer_of(block))
        silent = copy.deepcopy(block)
        silence(layout.writer_of(silent))
        if differ(whole - written, streams.after(index, silent, h), whole):
            raise InputError(
                f"model must add FFN outputs to the stream unchanged, and block {index} of "
                f"{type(layout.model).__name__} does not (like Gemma 2 and 3, Granite and post-norm models). "
                "Use method='out', or a model like GPT-2, Llama or GPT-J."
            )


def check_foldable_attention(layout: Layout) -> None:
    """Check that FFNs read the residual stream after attention.

    Tested by a sum: without its attention, a block must map the stream plus the attention output to the same
    output as the original block.
    """
    streams = Streams.tried(layout)
    for index, block in enumerate(map(full_block, layout.blocks)):
        whole, _, written = streams.through(index, block, streams.h[index], layout.attention_of(block))
        rest = streams.after(index, layout.without_attention(block), streams.h[index] + written)
        if differ(rest, whole, whole):
            raise InputError(
                f"model must have FFNs that read the stream after attention, and that of block {index} of "
                f"{type(layout.model).__name__} does not. Use method='out', or a model like GPT-2 or Llama."
            )


# Folding


def changed_by(method: Method, blocks: Sequence[int], n_layers: int) -> list[int]:
    """Blocks whose matrices a method changes: before each span; with ``chain`` all later."""
    before = [first - 1 for first, _ in spans_of(blocks)]
    if method == "out" or not before:
        return []
    if method == "chain":
        return [index for index in range(before[0], n_layers) if index not in set(blocks)]
    return before


def fold_spans(
    streams: Streams, blocks: Sequence[int], method: Method, penalty: float, *, progress: bool = True
) -> dict[int, Matrix]:
    """The matrices of the blocks that a method changes, by number; see `changed_by`."""
    layout, after_span = streams.layout, dict(spans_of(blocks))
    stay = {index: block for index, block in enumerate(layout.blocks) if index not in set(blocks)}
    changed = changed_by(method, blocks, len(layout.blocks))

    def target(index: int) -> Tensor:
        return streams.h[after_span.get(index + 1, index + 1)]

    return _fold_in_turn(streams, stay, changed, target, method, penalty, progress)


def fold_attention(
    streams: Streams, layers: Sequence[int], method: Method, penalty: float, *, progress: bool = True
) -> dict[int, Matrix]:
    """The matrix of the block before each block without attention."""
    layout, own = streams.layout, streams.layout.blocks
    blocks = {i: layout.without_attention(block) if i in layers else block for i, block in enumerate(own)}
    changed = [] if method == "out" else [layer - 1 for layer in sorted(layers)]

    def target(index: int) -> Tensor:
        h, block = streams.h[index + 1], own[index + 1]
        return h + streams.through(index + 1, block, h, layout.attention_of(block))[2]

    return _fold_in_turn(streams, blocks, changed, target, method, penalty, progress)


def _fold_in_turn(
    streams: Streams, blocks: Mapping[int, nn.Module], changed: Sequence[int],
    target: Callable[[int], Tensor], method: Method, penalty: float, progress: bool,
) -> dict[int, Matrix]:  # fmt: skip
    """Fit matrices in turn, each on the residual stream of the changed model."""
    layout, matrices = streams.layout, dict[int, Matrix]()
    if not changed:
        return matrices
    h = streams.h[changed[0]]
    with Bar(total=len(changed), desc="folding", unit="block", disable=not progress) as bar:
        for index in range(changed[0], changed[-1] + 1):
            if index not in blocks:
                continue
            block = blocks[index]
            if index in changed:
                matrices[index] = fold_block(streams, index, block, h, target(index), method, penalty)
                block = copy.deepcopy(block)
                layout.write(block, *matrices[index])
                bar.update(1)
            if index != changed[-1]:
                h = streams.after(index, block, h)
    return matrices


def fold_block(
    streams: Streams, index: int, block: nn.Module, h: Tensor, target: Tensor, method: Method, penalty: float
) -> Matrix:
    """The output matrix of a block that best reproduces the target residual stream after it."""
    writer = streams.layout.writer_of(block)
    out, read, written = streams.through(index, block, h, writer)
    bias = None if writer.bias is None else writer.bias.detach()
    own = Matrix(streams.layout.weight_of(block).detach(), bias)
    outputs = target.float() - (out.float() - written.float())
    return fold(method, own, read.flatten(0, 1), outputs.flatten(0, 1), penalty=penalty)


def fold(
    method: Method,
    matrix: Matrix,
    read: Float[Tensor, "n d_mlp"],
    target: Float[Tensor, "n d_model"],
    *,
    penalty: float = 0.0,
) -> Matrix:
    """The output matrix that best maps ``read`` to ``target``, by a method.

    The penalty is in units of the mean square of an output dimension; towards the identity for ``replaceme``,
    towards the block's own matrix for ``refit`` and ``chain``.
    """
    if method == "out":
        return matrix
    weight = in_float64(matrix.weight).to(read.device)
    bias = None if matrix.bias is None else in_float64(matrix.bias).to(read.device)
    if method == "magnitude":
        written = read.double() @ weight.T + (0 if bias is None else bias)
        factor = target.double().abs().mean(0) / written.abs().mean(0).clamp_min(
            torch.finfo(torch.float64).tiny
        )
        return Matrix(factor[:, None] * weight, None if bias is None else factor * bias)
    d_model, refit = len(weight), method in PENALTIES
    width = weight.shape[1] if refit else d_model
    sums = LeastSquares(width, d_model, source="the FFN's matrix")
    total = 0.0
    for part, truth in zip(read.split(_ROWS), target.split(_ROWS), strict=True):
        written = part.double() @ weight.T + (0 if bias is None else bias)
        x = part.double() if refit else written
        sums.update(x, truth.double() - written)
        total += float(x.square().sum())
    change, shift = sums.solution(intercept=refit and bias is not None, ridge=penalty * total / width)
    if refit:
        return Matrix(weight + change, None if bias is None or shift is None else bias + shift)
    turned = change + torch.eye(d_model, dtype=torch.float64)
    return Matrix(turned @ weight, None if bias is None else turned @ bias)


# Healing


class Healed(NamedTuple):
    """Tokens used for healing, remaining KL to the original in nats, and seconds."""

    n_tokens: int
    divergence: float
    seconds: float


@recording_gradients()
def heal(
    streams: Streams, pruned: Any, blocks: Sequence[int], method: Method, n_tokens: int, *,
    seed: int = 0, progress: bool = True,
) -> Healed:  # fmt: skip
    """Train the matrices that a method changed in a pruned model, in place.

    Reads at least ``n_tokens``, in updates of about 1,024 tokens.
    """
    began = time.monotonic()
    layout, original = replace(streams.layout, model=pruned), streams.layout
    remaining = [index for index in range(len(original.blocks)) if index not in set(blocks)]
    folded = changed_by(method, blocks, len(original.blocks))
    first = min(folded)
    start = remaining.index(first)
    weights = [
        parameter
        for index in folded
        for parameter in layout.writer_of(layout.blocks[remaining.index(index)]).parameters()
    ]
    before = [parameter.requires_grad for parameter in pruned.parameters()]
    length = streams.tokens.shape[1]
    size = max(1, _TOKENS // length)
    updates = max(1, math.ceil(n_tokens / (size * length)))
    # Updates are too small for half precision, so they are in float32.
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
                tokens = streams.tokens[texts]
                with torch.no_grad():
                    truth = streams.log_probs(original, len(original.blocks), streams.h[-1][texts], tokens)
                given = streams.log_probs(layout, start, streams.h[first][texts], tokens)
                loss = kl_divergence(truth, given).mean()
                if not bool(loss.isfinite()):
                    raise InputError(
                        "The loss must be finite during healing, got NaN or infinity. Use a larger penalty."
                    )
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
        for parameter, needed in zip(pruned.parameters(), before, strict=True):
            parameter.requires_grad_(needed)
            parameter.grad = None
    last = divergences[-max(1, updates // 10) :]
    return Healed(len(order) * length, sum(last) / len(last), time.monotonic() - began)


def _order(n_texts: int, n: int, seed: int) -> Int[Tensor, " n"]:
    """Indices of texts, shuffled in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(n_texts, generator=generator) for _ in range(-(-n // n_texts))]
    return torch.cat(rounds)[:n]
