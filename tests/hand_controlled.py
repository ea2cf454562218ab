"""Control of value vectors by hooks on the plain model, written without matlens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from conftest import LAYERS, SITE_MODULES
from torch import Tensor

CHOSEN = {"L0D5": 3.0, "L0D11": -2.5, "L2D7": 4.0}


def parsed(chosen: Mapping[str, float]) -> list[tuple[int, int, float]]:
    """``L0D5`` and its like taken apart, without matlens."""
    return [(*map(int, name[1:].split("D")), number) for name, number in chosen.items()]


def output_layer(name: str, plain: Any, layer: int) -> Any:
    return plain.get_submodule(LAYERS[name][0])[layer].get_submodule(SITE_MODULES[name]["ffn_post"][0])


@contextmanager
def controlled_by_hand(name: str, plain: Any, chosen: Mapping[str, float]) -> Iterator[None]:
    """Overwrite what output matrices of the plain model are given."""
    handles = []
    for layer, index, number in parsed(chosen):

        def overwrite(_: Any, args: tuple[Tensor], index: int = index, number: float = number) -> Any:
            m = args[0].clone()
            m[..., index] = number
            return (m, *args[1:])

        handles.append(output_layer(name, plain, layer).register_forward_pre_hook(overwrite, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
