"""Which blocks are left out: as the user says, or as the calibration text does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import metrics
from matlens.activations.sinks import outlying_rows
from matlens.errors import InputError, check, check_int, short
from matlens.linear.least_squares import LeastSquares
from matlens.numerics.precision import in_float64
from matlens.parallel import Bar
from matlens.pruning.choices import Choice
from matlens.pruning.streams import Streams


def read_blocks(blocks: Any, n_layers: int) -> tuple[int, ...]:
    """Check the numbers of the blocks that a user wants left out.

    Raises
    ------
    InputError
        One is not in the model or stands twice, the first is among them, or all are.
    """
    check(blocks, Iterable[Any], "blocks")
    numbers = [check_int(block, "A block to leave out", min=0, max=n_layers - 1) for block in blocks]
    if len(set(numbers)) < len(numbers):
        raise InputError(f"The blocks {short(sorted(numbers))} name one twice. Expected each once.")
    if 0 in numbers:
        raise InputError(
            "Block 0 is among those to leave out, and no block before it could take the map in. Expected "
            f"blocks from 1 to {n_layers - 1}."
        )
    return tuple(sorted(numbers))


def read_wanted(wanted: Any, n_layers: int, what: str = "blocks") -> int | tuple[int, ...]:
    """How many blocks are meant, or which, looked at before any work; ``what`` is left out of them.

    Raises
    ------
    InputError
        There are not so many, or `read_blocks` refuses them.
    """
    if isinstance(wanted, Integral):
        return read_count(wanted, n_layers, what)
    return read_blocks(wanted, n_layers)


def read_count(n: Any, n_layers: int, what: str = "blocks") -> int:
    """Check how many blocks of a model are meant, of which one at least is kept.

    Raises
    ------
    InputError
        There are not so many.
    """
    return check_int(n, f"The number of {what} to leave out", min=0, max=n_layers - 1)


def spans_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of blocks, each as its first block and the one after its last."""
    spans: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if spans and spans[-1][1] == block:
            spans[-1] = spans[-1][0], block + 1
        else:
            spans.append((block, block + 1))
    return spans


def choose_blocks(streams: Streams, n: int, choice: Choice, *, progress: bool = True) -> tuple[int, ...]:
    """The ``n`` blocks to leave out; block 0 is never among them.

    Parameters
    ----------
    streams
        The whole model on calibration text.
    n
        How many blocks.
    choice
        How they are chosen.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        The model has too few blocks, or whichever are left out, the loss is not finite.
    """
    n_layers = len(streams.layout.blocks)
    n = read_count(n, n_layers)
    if n == 0:
        return ()
    if choice == Choice.greedy:
        return tuple(sorted(greedy_order(streams, n, progress=progress)))
    starts = range(1, n_layers - n + 1)
    if choice == Choice.angle:
        worth = [float(angles(streams.h[start], streams.h[start + n]).mean()) for start in starts]
    else:
        worth, kept = [], no_sinks(streams) if choice == Choice.r2 else None
        with Bar(total=len(starts), desc="spans", unit="span", disable=not progress) as bar:
            for start in starts:
                if kept is None:
                    worth.append(loss_without(streams, range(start, start + n)))
                else:
                    worth.append(-linearity_of(streams.h[start], streams.h[start + n], kept))
                bar.update(1)
    _check_finite(min(worth))
    best = starts[min(range(len(starts)), key=worth.__getitem__)]
    return tuple(range(best, best + n))


def _check_finite(least: float) -> None:
    if not math.isfinite(least):
        raise InputError(
            "Whichever blocks are left out, the loss is not finite. Expected fewer of them, or a model in "
            "float32."
        )


def angles(a: Float[Tensor, "*n d_model"], b: Float[Tensor, "*n d_model"]) -> Float[Tensor, " *n"]:
    """Angle between vectors, as a share of a half turn."""
    cosine = torch.nn.functional.cosine_similarity(in_float64(a), in_float64(b), dim=-1)
    return cosine.clamp(-1, 1).arccos() / math.pi


def no_sinks(streams: Streams) -> Bool[Tensor, "n length"]:
    """Which tokens are no attention sinks, by their norms at all layers.

    Raises
    ------
    InputError
        They are fewer than an affine map of the stream has columns, so that every map would be exact.
    """
    norms = torch.stack([h.float().norm(dim=-1).flatten() for h in streams.h], 1)
    n_texts, length = streams.tokens.shape
    kept = ~outlying_rows(norms, places=np.tile(np.arange(length), n_texts))
    columns = streams.h[0].shape[-1] + 1
    if int(kept.sum()) <= columns:
        raise InputError(
            f"Spans are to be chosen by r2, and the text has {int(kept.sum())} tokens that are no attention "
            f"sinks for maps of {columns} columns. Expected more of it, better four times as many tokens, or "
            "another choice."
        )
    return kept.reshape(n_texts, length)


def linearity_of(
    h: Float[Tensor, "n length d_model"],
    later: Float[Tensor, "n length d_model"],
    kept: Bool[Tensor, "n length"],
) -> float:
    """The r2 of the best affine map of a stream to a later one, on the tokens that it is fitted on."""
    x, y = h[kept].double(), later[kept].double()
    moments = LeastSquares(x.shape[1], y.shape[1], source="the stream", target="the stream behind the span")
    weight, bias = moments.update(x, y).solution(intercept=True, ridge=0.0)
    return metrics.r2(x @ weight.T + (0 if bias is None else bias), y)


def loss_without(streams: Streams, blocks: Iterable[int]) -> float:
    """Mean loss of the next token on the calibration text where blocks are left out alone.

    It is infinite where the model without them gives no numbers.
    """
    out = set(blocks)
    first = min(out)
    h = streams.h[first]
    for index in range(first, len(streams.layout.blocks)):
        if index not in out:
            h = streams.after(index, streams.layout.blocks[index], h)
    loss = float(streams.losses(h).mean())
    return loss if math.isfinite(loss) else math.inf


def greedy_order(streams: Streams, n: int, *, progress: bool = True) -> list[int]:
    """Take blocks away one by one; which go, in the order in which they do.

    A block is tried again only while its loss without the blocks that were taken before it is below what the
    best of this round costs: losses rise as blocks go, so the others would only have become worse.

    Raises
    ------
    InputError
        There are not so many blocks, or without any further one the loss is not finite.
    """
    n_layers = len(streams.layout.blocks)
    n = read_count(n, n_layers)
    losses = dict.fromkeys(range(1, n_layers), -math.inf)
    gone: list[int] = []
    with Bar(total=n, desc="blocks", unit="block", disable=not progress) as bar:
        while len(gone) < n:
            best, least = -1, math.inf
            for block in sorted(losses, key=losses.__getitem__):
                if losses[block] >= least:
                    break
                losses[block] = loss_without(streams, [*gone, block])
                if losses[block] < least:
                    best, least = block, losses[block]
            _check_finite(least)
            gone.append(best)
            del losses[best]
            bar.update(1)
    return gone
