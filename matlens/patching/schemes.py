"""Alternation schemes: running some blocks and jumping over others (paper A, section 4.3)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, PositiveInt, checked, short
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement, Where, jump

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.linear.mapsets import MapSet

Kind = Literal["blocks", "mat"]
_OTHER: dict[Kind, Kind] = {"blocks": "mat", "mat": "blocks"}


@checked
@dataclass(frozen=True)
class Scheme:
    """Segments of layers that are run by blocks and jumped over by ``mat`` in turn (Eqs. 3 and 4).

    Attributes
    ----------
    boundaries
        ``0 = l_0 < l_1 < ... < l_n = L``.
    starts_with
        Whether the first segment is run by ``"blocks"`` or jumped over by ``"mat"``.

    Raises
    ------
    InputError
        The boundaries do not start at 0 or do not rise.
    """

    boundaries: tuple[int, ...]
    starts_with: Kind

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in itertools.pairwise(self.boundaries))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or not rises:
            raise InputError(
                f"The boundaries {self.boundaries} are not a scheme. Expected two or more: 0 < l_1 < ... < L."
            )

    @property
    def segments(self) -> tuple[tuple[Kind, int, int], ...]:
        """Kind, first and last layer of each segment."""
        kinds = itertools.cycle((self.starts_with, _OTHER[self.starts_with]))
        pairs = itertools.pairwise(self.boundaries)
        return tuple((kind, first, last) for kind, (first, last) in zip(kinds, pairs, strict=False))

    @property
    def jumps(self) -> tuple[tuple[int, int], ...]:
        """Layers that ``mat`` maps from and to."""
        return tuple((first, last) for kind, first, last in self.segments if kind == "mat")

    @property
    def n_blocks(self) -> int:
        """Number of blocks that are run."""
        return sum(last - first for kind, first, last in self.segments if kind == "blocks")

    def replacements(
        self, model: TransformerBridge, maps: MapSet, *, where: Where = "all"
    ) -> list[Replacement]:
        """What to give to `matlens.patched` to run the model this way.

        Parameters
        ----------
        model, maps
            The model, and ``mat`` for its jumps.
        where
            The tokens that jump; the others are run by all blocks.

        Raises
        ------
        InputError
            The scheme does not end at the model's last layer, or a map is missing.
        """
        last = ModelLayout.from_model(model).n_layers
        if self.boundaries[-1] != last:
            raise InputError(
                f"The scheme ends at layer {self.boundaries[-1]}, and this model's last layer is {last}."
            )
        return [replacement for pair in self.jumps for replacement in jump(maps, *pair, where=where)]

    def __str__(self) -> str:
        return " ".join(f"{kind} {first}-{last}" for kind, first, last in self.segments)


@checked
def wrr_schemes(n_layers: PositiveInt) -> list[tuple[int, int, Scheme]]:
    """All weighted round-robin schemes, as ``(a, b, scheme)`` for ``a, b >= 1`` with ``a+b`` dividing ``L``.

    Boundaries are ``0, a, a+b, 2a+b, 2a+2b, ..., L``; for each there is the scheme that starts with blocks
    and the one that starts with ``mat``.
    """
    schemes = []
    for whole in (n for n in range(2, n_layers + 1) if n_layers % n == 0):
        for a in range(1, whole):
            starts = range(0, n_layers, whole)
            boundaries = (*(edge for start in starts for edge in (start, start + a)), n_layers)
            schemes += [(a, whole - a, Scheme(boundaries, kind)) for kind in _OTHER]
    return schemes


@checked
def r2_schemes(r2: Float[Tensor, "layers layers"]) -> dict[int, tuple[Scheme, float]]:
    """For each number of blocks kept, the scheme of the greatest score, and that score (R2).

    A score is the product of ``r2[l, l']`` over the ``mat`` segments of a scheme, and 1 where it has none.
    Exact, by dynamic programming over ``(layer, blocks kept, kind of the last segment)``. Two negative r2
    make a positive product, so the least product of each state is stored as well as the greatest.

    Parameters
    ----------
    r2
        ``r2[l, l']`` of ``mat`` from layer ``l`` to ``l'``.

    Raises
    ------
    InputError
        A pair of layers has no r2.
    """
    n_layers = len(r2) - 1
    table = np.asarray(r2, dtype=np.float64)
    if table.shape != (n_layers + 1,) * 2 or not np.isfinite(table[np.triu_indices(n_layers + 1, 1)]).all():
        raise InputError(
            f"The table of r2, {short(r2)}, lacks pairs of layers. Fit a map for every pair: --pairs all."
        )
    # By layer, blocks kept and kind of the last segment: the greatest and the least product, with boundaries.
    best: dict[tuple[int, int, Kind], list[tuple[float, tuple[int, ...]]]] = {
        (0, 0, kind): [(1.0, (0,))] for kind in _OTHER
    }
    for layer, kept, kind in itertools.product(range(1, n_layers + 1), range(n_layers + 1), _OTHER):
        reached = []
        for before in range(layer):
            n_run, factor = (layer - before, 1.0) if kind == "blocks" else (0, float(table[before, layer]))
            for score, path in best.get((before, kept - n_run, _OTHER[kind]), ()):
                reached.append((factor * score, (*path, layer)))
        if reached:
            best[layer, kept, kind] = [max(reached), min(reached)]
    chosen = {}
    for kept in range(n_layers + 1):
        ends = [(*state, kind) for kind in _OTHER for state in best.get((n_layers, kept, kind), ())]
        score, path, kind = max(ends)
        chosen[kept] = Scheme(path, kind if len(path) % 2 == 0 else _OTHER[kind]), score
    return chosen
