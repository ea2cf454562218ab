"""Attention left out of blocks: its output matrix silenced, and a map folded into the FFN before it.

Where attention is added to the stream before the FFN reads it, what the FFN of the block before adds can take
in what attention would have added. In parallel blocks the FFN reads the stream without attention, so it
cannot.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from matlens.errors import InputError
from matlens.parallel import Bar
from matlens.pruning.choices import Method
from matlens.pruning.folding import Matrix, fold_block
from matlens.pruning.layouts import Layout, matrices
from matlens.pruning.streams import TOLERANCE, Streams, full_block, tried_streams

_OUTPUTS = ("o_proj", "c_proj", "dense", "out_proj", "wo")


def output_of(block: nn.Module) -> Any:
    """The module whose output a block's attention adds to the residual stream."""
    paths = matrices(block, _OUTPUTS, of_attention=True)
    if len(paths) != 1:
        raise InputError(
            f"The blocks of this model have {len(paths) or 'no'} output matrices of attention. Expected one, "
            "as in GPT-2 and Llama."
        )
    return block.get_submodule(paths[0])


@torch.no_grad()
def silence(block: nn.Module) -> None:
    """Let a block's attention write nothing."""
    for parameter in output_of(block).parameters():
        parameter.zero_()


def check_foldable_attention(layout: Layout) -> None:
    """Refuse a model whose FFNs do not read what attention adds, or read it changed.

    Without its attention, a block that is given the stream with attention's output must give what the whole
    block gives.
    """
    streams = tried_streams(layout)
    for index, block in enumerate(map(full_block, layout.blocks)):
        whole, silent = streams.after(index, block, streams.h[index]), copy.deepcopy(block)
        silence(silent)
        rest = streams.after(index, silent, _with_attention(streams, index, block))
        if not bool((whole - rest).abs().max() <= TOLERANCE * whole.abs().max()):
            raise InputError(
                f"In block {index} of {type(layout.model).__name__} the FFN does not read the stream with "
                "what attention adds to it: attention and FFN stand side by side, or a norm or a factor "
                "stands between. So a map cannot be folded in the place of attention. Expected a model of "
                "GPT-2's or Llama's kind."
            )


def _with_attention(streams: Streams, index: int, block: nn.Module) -> Float[Tensor, "n length d_model"]:
    """The whole model's stream behind the attention of a block."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(output.to("cpu", copy=True))

    handle = output_of(block).register_forward_hook(keep)
    try:
        streams.after(index, block, streams.h[index])
    finally:
        handle.remove()
    return streams.h[index] + torch.cat(seen).reshape(streams.h[index].shape)


def choose_attention(streams: Streams, n: int, *, progress: bool = True) -> tuple[int, ...]:
    """The ``n`` blocks without whose attention the loss on the text rises least, each for itself."""
    blocks = streams.layout.blocks
    losses = []
    with Bar(total=len(blocks) - 1, desc="attention", unit="block", disable=not progress) as bar:
        for index in range(1, len(blocks)):
            silent = copy.deepcopy(blocks[index])
            silence(silent)
            h = streams.after(index, silent, streams.h[index])
            for later in range(index + 1, len(blocks)):
                h = streams.after(later, blocks[later], h)
            losses.append((float(streams.losses(h).mean()), index))
            bar.update(1)
    return tuple(sorted(index for _, index in sorted(losses)[:n]))


def fold_attention(
    streams: Streams, layers: Sequence[int], method: Method, penalty: float, *, progress: bool = True
) -> dict[int, Matrix]:
    """The matrix of the block before each that loses its attention; maps are fitted one after another."""
    layout, matrices = streams.layout, dict[int, Matrix]()
    if method == Method.out:
        return matrices
    silent = {index: copy.deepcopy(layout.blocks[index]) for index in layers}
    for block in silent.values():
        silence(block)
    at, h = 0, streams.h[0]
    with Bar(total=len(layers), desc="folding", unit="block", disable=not progress) as bar:
        for layer in sorted(layers):
            before = layer - 1
            if not matrices:
                at, h = before, streams.h[before]
            for index in range(at, before):
                h = streams.after(index, silent.get(index, layout.blocks[index]), h)
            block = copy.deepcopy(silent.get(before, layout.blocks[before]))
            right = _with_attention(streams, layer, layout.blocks[layer])
            matrix = fold_block(streams, before, block, h, right, method, penalty)
            matrices[before] = matrix
            layout.write(block, matrix.weight, matrix.bias)
            at, h = layer, streams.after(before, block, h)
            bar.update(1)
    return matrices
