"""Control of value vectors by hooks on the plain model, written without matlens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from conftest import LAYERS, SITE_MODULES
from torch import Tensor

CHOSEN = {"L0D5": 3.0, "L0D11": -2.5, "L2D7": 4.0}


def parsed(chosen: Mapping[str, float]) -> list[tuple[int, int, float]]:
    """``L0D5`` and its like taken apart, without matlens."""
    return [(*map(int, name[1:].split("D")), number) for name, number in chosen.items()]


def output_layer(name: str, plain: Any, layer: int) -> Any:
    return plain.get_submodule(LAYERS[name][0])[layer].get_submodule(SITE_MODULES[name]["ffn_post"][0])


@contextmanager
def controlled_by_hand(
    name: str,
    plain: Any,
    chosen: Mapping[str, float],
    change: Callable[[Tensor, float], Tensor] | None = None,
    meant: Callable[[int], Tensor] | None = None,
) -> Iterator[None]:
    """Change what output matrices of the plain model are given, which reads one sentence and keeps no cache.

    ``change`` makes a coefficient from the old one and a number, by default the number; ``meant`` says of a
    sentence with so many tokens which of them are meant, by default all.
    """
    handles = []
    for layer, index, number in parsed(chosen):

        def overwrite(_: Any, args: tuple[Tensor], index: int = index, number: float = number) -> Any:
            m = args[0].clone()
            new = torch.full_like(m[..., index], number) if change is None else change(m[..., index], number)
            m[..., index] = new if meant is None else torch.where(meant(m.shape[-2]), new, m[..., index])
            return (m, *args[1:])

        handles.append(output_layer(name, plain, layer).register_forward_pre_hook(overwrite, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
