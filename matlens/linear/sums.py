"""`LeastSquares` of many pairs of sites from streamed samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from matlens import parallel
from matlens.errors import InputError
from matlens.linear.least_squares import LeastSquares
from matlens.linear.maps import LinearMap
from matlens.linear.pairs import by_source, check_collected
from matlens.models.identity import Provenance
from matlens.models.sites import check_finite
from matlens.numerics import give_back_freed

_CHUNK = 4096  # samples factorised at a time; never fewer than eight for each dimension


class FitsBySource(Protocol):
    """`LeastSquares` by source: in memory or in folders."""

    @property
    def targets(self) -> Mapping[str, Sequence[str]]:
        """The targets of each source."""

    def __getitem__(self, source: str, /) -> LeastSquares:
        """The sufficient statistics of a source and all of its targets."""


class PairFits:
    """`LeastSquares` by source; small batches wait until they are worth a factorisation.

    Parameters
    ----------
    pairs
        Names of the sites of each pair.
    widths
        The width of each site.
    norms, split
        As in `LeastSquares`.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        widths: Mapping[str, int],
        *,
        norms: bool = False,
        split: bool = False,
    ) -> None:
        self.targets, self._pairs = by_source(pairs), pairs
        self._fits: dict[str, LeastSquares] = {}
        for source, targets in self.targets.items():
            d_out = {target: widths[target] for target in targets}
            self._fits[source] = LeastSquares(widths[source], d_out, source=source, norms=norms, split=split)
        self._waiting: list[tuple[dict[str, Tensor], Tensor | None]] = []

    def __getitem__(self, source: str) -> LeastSquares:
        self._flush()
        return self._fits[source]

    def __setitem__(self, source: str, fit: LeastSquares) -> None:
        self._fits[source] = fit

    @property
    def n(self) -> int:
        """How many samples there are, without those whose weight is 0."""
        return self[next(iter(self._fits))].n

    @property
    def settled(self) -> bool:
        """Whether no samples wait, so that reading the statistics does not change how they are divided."""
        return not self._waiting

    def update(self, vectors: Mapping[str, Tensor], *, weights: Tensor | None = None) -> None:
        """Add samples; raises InputError, which names the site, if a value is not finite."""
        check_collected(self._pairs, vectors)
        own = {site: vectors[site] for site in dict.fromkeys(itertools.chain(*self._pairs))}
        self._waiting.append((own, weights))
        width = next(iter(vectors.values())).shape[1]
        if sum(len(next(iter(part.values()))) for part, _ in self._waiting) >= chunk_size(width):
            self._flush()

    def reduce(self) -> None:
        """Merge the samples of all processes in the main one; the others have none then."""
        for source in self._fits:
            self._fits[source] = self[source].reduce()

    def _flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for part, _ in waiting:
            for site, vectors in part.items():
                check_finite(vectors, site)
        weighed = [weights for _, weights in waiting if weights is not None]
        weights = torch.cat(weighed) if weighed else None
        last_use = {site: source for source, targets in self.targets.items() for site in (source, *targets)}
        joined: dict[str, Tensor] = {}
        for source, targets in self.targets.items():
            # No site is there twice, nor longer than it is needed: together they are most of the memory.
            for site in (source, *targets):
                if site not in joined:
                    parts = [part.pop(site) for part, _ in waiting]
                    joined[site] = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._fits[source].update(joined[source], [joined[target] for target in targets], weights=weights)
            for site in [site for site in joined if last_use[site] == source]:
                del joined[site]
        give_back_freed()


def chunk_size(width: int) -> int:
    """How many samples of a width are factorised at a time: the factor is factorised again each time."""
    return max(_CHUNK, 8 * width)


def solve_pairs(
    fits: FitsBySource,
    pairs: Sequence[tuple[str, str]],
    *,
    intercept: bool,
    ridge: float,
    provenance: Provenance | None,
) -> Iterator[LinearMap]:
    """Maps of some of the pairs, source by source."""
    check_kept(fits, pairs)
    for source, targets in by_source(pairs).items():
        maps = fits[source].solve(intercept=intercept, ridge=ridge, targets=targets, provenance=provenance)
        yield from (maps.pop(target) for target in targets)


def check_kept(fits: FitsBySource, pairs: Sequence[tuple[str, str]]) -> None:
    """Raise InputError for pairs without sufficient statistics."""
    absent = [
        f"{source} -> {target}" for source, target in pairs if target not in fits.targets.get(source, ())
    ]
    if absent:
        raise InputError(
            f"There are no sufficient statistics of {', '.join(absent[:3])}{', ...' if absent[3:] else ''}. "
            "Collect or stream again with these pairs."
        )


def maps_for_all(
    maps: Iterable[LinearMap], pairs: Sequence[tuple[str, str]], provenance: Provenance | None
) -> Iterator[LinearMap]:
    """Maps between ``pairs`` that the main process solves, in every process."""
    if parallel.world_size() == 1:
        yield from maps
        return
    solved = iter(maps)
    for source, target in pairs:
        parts = next(solved).parts if parallel.is_main() else {}
        parts = parallel.broadcast_tensors(parts, f"map {source} -> {target}")
        yield LinearMap(parts["weight"], parts.get("bias"), source, target, provenance or Provenance())
