"""Small maps with numbers of their own, and what they come from."""

from __future__ import annotations

import torch
from conftest import D_MODEL
from identities import make_identity

from matlens.linear.maps import LinearMap
from matlens.models.identity import Provenance

Pair = tuple[str, str]
WIDTHS = {"h.0": 4, "h.1": 4, "h.2": 4, "h.3": 4, "ln1_out.0": 4, "attn_out.0": 6}
SEED = Provenance(details={"seed": 5})
ORIGIN = Provenance(make_identity("small"), details={"seed": 3})
PAIRS = [("h.0", "h.1"), ("h.0", "h.3"), ("h.1", "h.2"), ("h.1", "h.3"), ("ln1_out.0", "attn_out.0")]


def linear(source: str, target: str, *, bias: bool = False, seed: int = 0) -> LinearMap:
    """A map with numbers of its own."""
    sites = list(WIDTHS)
    number = 1000 * seed + 100 * sites.index(source) + sites.index(target)
    generator = torch.Generator().manual_seed(number)
    weight = torch.randn(WIDTHS[target], WIDTHS[source], generator=generator)
    return LinearMap(weight, torch.randn(len(weight), generator=generator) if bias else None, source, target)


def same(one: LinearMap, other: LinearMap) -> bool:
    """To the last bit."""
    biases = (one.bias is None and other.bias is None) or (
        one.bias is not None and other.bias is not None and torch.equal(one.bias, other.bias)
    )
    return (
        biases
        and torch.equal(one.weight, other.weight)
        and (one.source, one.target) == (other.source, other.target)
    )


def random_map(source: str = "h.0", target: str = "h.1", seed: int = 0) -> LinearMap:
    """A square map of random numbers, of no known model."""
    generator = torch.Generator().manual_seed(seed)
    return LinearMap(torch.randn(D_MODEL, D_MODEL, generator=generator), None, source, target)
