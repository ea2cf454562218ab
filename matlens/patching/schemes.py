"""Alternation schemes: running some blocks and jumping over others (paper A, section 4.3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError, PositiveInt, checked
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement, Where, jump

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.linear.mapsets import MapSet

Kind = Literal["blocks", "mat"]


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
        if self.starts_with not in ("blocks", "mat"):
            raise InputError(f"starts_with is {self.starts_with!r}. Expected 'blocks' or 'mat'.")

    @property
    def segments(self) -> tuple[tuple[Kind, int, int], ...]:
        """Kind, first and last layer of each segment."""
        kinds: Iterator[Kind] = itertools.cycle(
            ("blocks", "mat") if self.starts_with == "blocks" else ("mat", "blocks")
        )
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
            schemes += [
                (a, whole - a, Scheme(boundaries, "blocks")),
                (a, whole - a, Scheme(boundaries, "mat")),
            ]
    return schemes


@checked
def r2_score(scheme: Scheme, r2: Float[Tensor, "layers layers"]) -> float:
    """Product of ``r2[l, l']`` over the ``mat`` segments of a scheme; 1 where it has none."""
    last = scheme.boundaries[-1]
    if r2.ndim != 2 or min(r2.shape) <= last:
        raise InputError(
            f"The table of r2 has the shape {tuple(r2.shape)}, and the scheme ends at layer {last}. Expected "
            "a row and a column for each layer, as r2_matrix() gives."
        )
    return float(np.prod([float(r2[pair]) for pair in scheme.jumps]))


@dataclass(frozen=True)
class _Best:
    """The greatest and the least product up to some layer, each with the boundaries that reach it."""

    high: float
    high_path: tuple[int, ...]
    low: float
    low_path: tuple[int, ...]


@checked
def r2_schemes(r2: Float[Tensor, "layers layers"]) -> dict[int, tuple[Scheme, float]]:
    """For each number of blocks kept, the scheme of the greatest `r2_score` and that score (R2).

    Exact, by dynamic programming over ``(layer, blocks kept, kind of the last segment)``. As r2 can be
    negative and two negative factors make a positive product, the least product of each state is kept
    beside the greatest.

    Parameters
    ----------
    r2
        ``r2[l, l']`` of ``mat`` from layer ``l`` to ``l'``, as `matlens.lens.r2_matrix` gives it.

    Raises
    ------
    InputError
        A pair of layers has no r2.
    """
    if r2.ndim != 2 or r2.shape[0] != r2.shape[1] or len(r2) < 2:
        raise InputError(
            f"The table of r2 has the shape {tuple(r2.shape)}. Expected a row and a column for each layer, "
            "as r2_matrix() gives."
        )
    n_layers = len(r2) - 1
    table = np.asarray(r2, dtype=np.float64)
    if not np.isfinite(table[np.triu_indices(n_layers + 1, 1)]).all():
        raise InputError(
            "The table of r2 lacks pairs of layers. Expected a map for every pair, as the option --pairs all "
            "fits them."
        )
    best: dict[tuple[int, int, str, str], _Best] = {}
    for layer in range(1, n_layers + 1):
        for kept in range(layer + 1):
            for start in ("blocks", "mat"):
                for kind in ("blocks", "mat"):
                    reached = list(_arrivals(best, table, layer, kept, start, kind))
                    if reached:
                        high, low = max(reached, key=_first), min(reached, key=_first)
                        best[layer, kept, start, kind] = _Best(*high, *low)
    chosen = {}
    for kept in range(n_layers + 1):
        ends: list[tuple[float, Scheme]] = []
        for start in ("blocks", "mat"):
            for kind in ("blocks", "mat"):
                end = best.get((n_layers, kept, start, kind))
                if end is not None:
                    ends.append((end.high, Scheme(end.high_path, start)))  # type: ignore[arg-type]
        score, scheme = max(ends, key=_first)
        chosen[kept] = scheme, score
    return chosen


def _first(pair: tuple[float, object]) -> float:
    return pair[0]


def _arrivals(
    best: dict[tuple[int, int, str, str], _Best],
    r2: np.ndarray,
    layer: int,
    kept: int,
    start: str,
    kind: str,
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Products and boundaries of all ways to a state by one more segment of its kind."""
    other = "mat" if kind == "blocks" else "blocks"
    for before in range(layer):
        length = layer - before if kind == "blocks" else 0
        factor = 1.0 if kind == "blocks" else float(r2[before, layer])
        if before == 0:
            if start == kind and kept == length:
                yield factor, (0, layer)
        elif (known := best.get((before, kept - length, start, other))) is not None:
            yield factor * known.high, (*known.high_path, layer)
            yield factor * known.low, (*known.low_path, layer)
