"""Alternation schemes of paper A: weighted round-robin, and R2 (section 4.3)."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, short
from matlens.patching import Scheme

Kind = Literal["blocks", "mat"]
OTHER: dict[Kind, Kind] = {"blocks": "mat", "mat": "blocks"}


def wrr_schemes(n_layers: int) -> list[tuple[int, int, Scheme]]:
    """All weighted round-robin schemes, as ``(a, b, scheme)``; ``a + b`` divides ``L``.

    Boundaries are ``0, a, a+b, 2a+b, 2a+2b, ..., L``; for each there is the scheme that starts with blocks
    and the one that starts with ``mat``.
    """
    schemes = []
    for whole in (n for n in range(2, n_layers + 1) if n_layers % n == 0):
        for a in range(1, whole):
            starts = range(0, n_layers, whole)
            boundaries = (*(edge for start in starts for edge in (start, start + a)), n_layers)
            schemes += [(a, whole - a, Scheme(boundaries, kind)) for kind in OTHER]
    return schemes


def r2_schemes(r2: Float[Tensor, "layers layers"]) -> dict[int, tuple[Scheme, float]]:
    """For each number of blocks, the scheme with the largest score, and the score (R2).

    A score is the product of ``r2[l, l']`` over the ``mat`` segments of a scheme, 1 if there are none. Exact,
    by dynamic programming over ``(layer, blocks run, kind of the last segment)``. Two negative r2 have a
    positive product, so the smallest product of each state is stored as well as the largest.
    """
    n_layers = len(r2) - 1
    table = np.asarray(r2, dtype=np.float64)
    if table.shape != (n_layers + 1,) * 2 or not np.isfinite(table[np.triu_indices(n_layers + 1, 1)]).all():
        raise InputError(
            f"r2 must have finite values for all pairs of layers, got {short(r2)}. Fit maps with --pairs all."
        )
    # By layer, blocks run and kind of the last segment: largest and smallest product, with boundaries.
    best: dict[tuple[int, int, Kind], list[tuple[float, tuple[int, ...]]]] = {
        (0, 0, kind): [(1.0, (0,))] for kind in OTHER
    }
    for layer, n_blocks, kind in itertools.product(range(1, n_layers + 1), range(n_layers + 1), OTHER):
        candidates = []
        for before in range(layer):
            n_run, factor = (layer - before, 1.0) if kind == "blocks" else (0, float(table[before, layer]))
            for score, path in best.get((before, n_blocks - n_run, OTHER[kind]), ()):
                candidates.append((factor * score, (*path, layer)))
        if candidates:
            best[layer, n_blocks, kind] = [max(candidates), min(candidates)]
    chosen = {}
    for n_blocks in range(n_layers + 1):
        ends = [(*state, kind) for kind in OTHER for state in best.get((n_layers, n_blocks, kind), ())]
        score, path, kind = max(ends)
        chosen[n_blocks] = Scheme(path, kind if len(path) % 2 == 0 else OTHER[kind]), score
    return chosen
