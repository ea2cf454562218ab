"""Alternation schemes: running some blocks and jumping over others (paper A, section 4.3)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from matlens.errors import InputError, checked
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement, Where, jump

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from matlens.linear.mapsets import MapSet

Kind = Literal["blocks", "mat"]
OTHER: dict[Kind, Kind] = {"blocks": "mat", "mat": "blocks"}


@checked
@dataclass(frozen=True)
class Scheme:
    """Alternating segments of layers: run by blocks, or jumped over by ``mat`` (Eqs. 3 and 4).

    Attributes
    ----------
    boundaries
        ``0 = l_0 < l_1 < ... < l_n = L``.
    starts_with
        How the first segment is run.
    """

    boundaries: tuple[int, ...]
    starts_with: Kind

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in itertools.pairwise(self.boundaries))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or not rises:
            raise InputError(f"boundaries must be 0 < l_1 < ... < L, got {self.boundaries}.")

    @property
    def segments(self) -> tuple[tuple[Kind, int, int], ...]:
        """Kind, first and last layer of each segment."""
        kinds = itertools.cycle((self.starts_with, OTHER[self.starts_with]))
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
        """The jumps as replacements for `matlens.patched`, at some tokens or all."""
        last = ModelLayout.from_model(model).n_layers
        if self.boundaries[-1] != last:
            raise InputError(f"The scheme ends at layer {self.boundaries[-1]}, the model at layer {last}.")
        return [replacement for pair in self.jumps for replacement in jump(maps, *pair, where=where)]

    def __str__(self) -> str:
        return " ".join(f"{kind} {first}-{last}" for kind, first, last in self.segments)
