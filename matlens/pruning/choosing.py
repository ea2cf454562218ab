"""Choose the blocks, or attention layers, to remove."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from matlens import metrics
from matlens.activations.sinks import outlying_rows
from matlens.errors import InputError, check_int, short
from matlens.linear.least_squares import LeastSquares
from matlens.numerics import in_float64
from matlens.parallel import Bar
from matlens.pruning.layouts import Streams

Choice = Literal["angle", "r2", "loss", "greedy"]
CHOSEN_ON = 2048  # tokens of the text per candidate; 1,024 choose worse
ROWS_A_COLUMN = 4  # where maps are fitted to choose by, at least


def parse_blocks(blocks: Any, n_layers: int, what: str = "blocks") -> int | tuple[int, ...]:
    """The number of blocks to remove, or their sorted indices, which begin at 1."""
    if isinstance(blocks, Integral):
        return check_int(blocks, f"The number of {what} to remove", min=0, max=n_layers - 1)
    indices = [check_int(block, "A block to remove", min=1, max=n_layers - 1) for block in blocks]
    if len(set(indices)) < len(indices):
        raise InputError(f"blocks must be different, got {short(sorted(indices))}.")
    return tuple(sorted(indices))


def spans_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of blocks, each as its first block and the one after its last."""
    spans: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if spans and spans[-1][1] == block:
            spans[-1] = spans[-1][0], block + 1
        else:
            spans.append((block, block + 1))
    return spans


def choose_span(streams: Streams, n: int, choice: Choice, *, progress: bool = True) -> tuple[int, ...]:
    """The ``n`` consecutive blocks to remove, by ``angle``, ``r2`` or ``loss``."""
    if n == 0:
        return ()
    starts = range(1, len(streams.layout.blocks) - n + 1)
    rows = no_sinks(streams) if choice == "r2" else None
    scores = []
    for start in Bar(starts, desc="spans", unit="span", disable=not progress):
        before, after = streams.h[start], streams.h[start + n]
        if choice == "angle":
            scores.append(float(angles(before, after).mean()))
        elif rows is not None:
            scores.append(-linearity_of(before, after, rows))
        else:
            scores.append(loss_without(streams, range(start, start + n)))
    _check_finite(min(scores))
    best = starts[int(np.argmin(scores))]
    return tuple(range(best, best + n))


def _check_finite(lowest: float) -> None:
    if not math.isfinite(lowest):
        raise InputError(
            "The loss must be finite, and is not whichever blocks are removed. Remove fewer, or use float32."
        )


def angles(a: Float[Tensor, "*n d_model"], b: Float[Tensor, "*n d_model"]) -> Float[Tensor, " *n"]:
    """Angle between vectors, as a share of a half turn."""
    cosine = torch.nn.functional.cosine_similarity(in_float64(a), in_float64(b), dim=-1)
    return cosine.clamp(-1, 1).arccos() / math.pi


def no_sinks(streams: Streams) -> Bool[Tensor, "n length"]:
    """Mask of tokens that are not attention sinks; refused if too few for a map."""
    norms = torch.stack([h.float().norm(dim=-1).flatten() for h in streams.h], 1)
    n_texts, length = streams.tokens.shape
    rows = ~outlying_rows(norms, places=np.tile(np.arange(length), n_texts))
    columns = streams.h[0].shape[-1] + 1
    if int(rows.sum()) <= columns:
        raise InputError(
            f"The text must have more than {columns} tokens without attention sinks to choose spans by "
            f"r2, got {int(rows.sum())}. Use more text, or another choice."
        )
    return rows.reshape(n_texts, length)


def linearity_of(
    h: Float[Tensor, "n length d_model"],
    later: Float[Tensor, "n length d_model"],
    rows: Bool[Tensor, "n length"],
) -> float:
    """The r2 of the best affine map between two layers, on its training tokens."""
    x, y = h[rows].double(), later[rows].double()
    moments = LeastSquares(
        x.shape[1], {"the residual stream after the span": y.shape[1]}, source="the residual stream"
    )
    weight, bias = moments.update(x, y).solution(intercept=True, ridge=0.0)
    return metrics.r2(x @ weight.T + (0 if bias is None else bias), y)


def loss_without(
    streams: Streams, blocks: Iterable[int], instead: Mapping[int, nn.Module] | None = None
) -> float:
    """Mean next-token loss with blocks removed or replaced; infinite if not finite."""
    own = dict(enumerate(streams.layout.blocks))
    changed: dict[int, nn.Module | None] = {**dict.fromkeys(blocks), **(instead or {})}
    first = min(changed)
    h = streams.h[first]
    for index in range(first, len(own)):
        block = changed.get(index, own[index])
        if block is not None:
            h = streams.after(index, block, h)
    loss = float(streams.losses(h).mean())
    return loss if math.isfinite(loss) else math.inf


def greedy_order(streams: Streams, n: int, *, progress: bool = True) -> list[int]:
    """Remove blocks one at a time by lazy greedy; returns them in this order.

    A round evaluates blocks by their last known losses, lowest first, until the next is not below the lowest
    loss of this round. The order is exact greedy's if no loss falls when more blocks are removed. Losses of
    models sometimes do, so it can differ; evaluating every block in every round takes several times as long.
    """
    n_layers = len(streams.layout.blocks)
    losses = dict.fromkeys(range(1, n_layers), -math.inf)
    removed: list[int] = []
    with Bar(total=n, desc="blocks", unit="block", disable=not progress) as bar:
        while len(removed) < n:
            best, lowest = -1, math.inf
            for block in sorted(losses, key=losses.__getitem__):
                if losses[block] >= lowest:
                    break
                losses[block] = loss_without(streams, [*removed, block])
                if losses[block] < lowest:
                    best, lowest = block, losses[block]
            _check_finite(lowest)
            removed.append(best)
            del losses[best]
            bar.update(1)
    return removed


def choose_attention(streams: Streams, n: int, *, progress: bool = True) -> tuple[int, ...]:
    """The ``n`` attention layers whose removal alone increases the loss least."""
    layout, losses = streams.layout, []
    for index in Bar(range(1, len(layout.blocks)), desc="attention", unit="block", disable=not progress):
        silent = layout.without_attention(layout.blocks[index])
        losses.append((loss_without(streams, (), {index: silent}), index))
    return tuple(sorted(index for _, index in sorted(losses)[:n]))
