"""Moments of many pairs of sites at once, of samples that pass by, of one process or of several."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, Self

import torch
from jaxtyping import Float
from torch import Tensor

from matlens import parallel
from matlens.errors import InputError, checked, short
from matlens.linear.least_squares import LeastSquares, check_finite
from matlens.linear.maps import LinearMap
from matlens.linear.pairs import Pair, by_source, check_collected, list_pairs
from matlens.models.identity import Provenance
from matlens.models.sites import Site
from matlens.numerics.freed import give_back_freed
from matlens.numerics.precision import in_float64

_CHUNK = 4096  # samples factorised at a time; never fewer than eight for each dimension


class MomentsOfPairs(Protocol):
    """Moments by source, of which maps are solved: in memory or in folders."""

    @property
    def targets(self) -> Mapping[str, Sequence[str]]:
        """The targets of each source, in the order in which their coordinates stand side by side."""

    @property
    def widths(self) -> Mapping[str, int]:
        """How many coordinates the vectors of each site have."""

    def moments(self, source: str) -> LeastSquares:
        """What is kept of a source and all of its targets."""

    def norms(self, source: str) -> Tensor | None:
        """Squared norms of the samples of a source, where they were kept."""


@checked
class PairMoments:
    """What least squares needs of many pairs of sites, in memory that does not grow with the samples.

    Parameters
    ----------
    pairs
        Sites by name, or by number for layers of the stream; one set of moments serves a source.
    widths
        How many coordinates the sites have, where that is known before the first samples.
    norms
        Whether to keep the squared norm of each sample too, from which a penalty for few samples is chosen.
    split
        Whether products are split into exact ones in float32, see `LeastSquares`.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        widths: Mapping[str, int] | None = None,
        norms: bool = False,
        split: bool = False,
    ) -> None:
        self._split = split
        named = [(str(Site.parse(source)), str(Site.parse(target))) for source, target in list_pairs(pairs)]
        self.targets, self.widths = by_source(named), dict(widths or {})
        self._pairs = [(source, target) for source, targets in self.targets.items() for target in targets]
        self._moments: dict[str, LeastSquares] = {}
        self._norms: dict[str, list[Tensor]] | None = (
            {source: [] for source in self.targets} if norms else None
        )
        self._waiting: list[tuple[dict[str, Tensor], Tensor | None]] = []
        if self.widths:
            self._prepare()

    @property
    def n(self) -> int:
        """How many samples have been seen, without those whose weight is 0."""
        self._flush()
        return next(iter(self._moments.values())).n if self._moments else 0

    @property
    def settled(self) -> bool:
        """Whether no samples wait; looking at what is kept then changes no bit of what comes of it."""
        return not self._waiting

    def update(
        self, vectors: Mapping[str, Float[Tensor, "n d"]], *, weights: Float[Tensor, " n"] | None = None
    ) -> Self:
        """Add samples; small batches wait until they are worth a factorisation.

        Raises
        ------
        InputError
            A site is missing, or a value is not finite, where the message names the site.
        """
        check_collected(self._pairs, vectors)
        own = {site: vectors[site] for site in dict.fromkeys(itertools.chain(*self._pairs))}
        self._waiting.append((own, weights))
        first = next(iter(vectors.values()))
        if sum(len(next(iter(part.values()))) for part, _ in self._waiting) >= chunk_size(first):
            self._flush()
        return self

    def merge(self, other: MomentsOfPairs) -> Self:
        """Add the samples that another set has seen, of the same pairs."""
        if {source: list(targets) for source, targets in other.targets.items()} != self.targets:
            raise InputError("Moments of other pairs of sites cannot be merged. Expected the same pairs.")
        self._flush()
        if not self.widths and other.widths:
            self.widths = dict(other.widths)
            self._prepare()
        for source in self.targets if other.widths else ():
            self._moments[source].merge(other.moments(source))
            if self._norms is not None and (norms := other.norms(source)) is not None:
                self._norms[source].append(norms)
        return self

    def moments(self, source: str) -> LeastSquares:
        """What is kept of a source and all of its targets.

        Raises
        ------
        InputError
            It is none of the sources, or there are no samples.
        """
        check_source(source, self.targets)
        self._flush()
        if source not in self._moments:
            raise InputError("There are no samples to fit maps on.")
        return self._moments[source]

    def norms(self, source: str) -> Float[Tensor, " n"] | None:
        """Squared norms of the samples of a source, in float64, where they are kept.

        Raises
        ------
        InputError
            It is none of the sources.
        """
        check_source(source, self.targets)
        self._flush()
        if self._norms is None:
            return None
        return torch.cat([torch.zeros(0, dtype=torch.float64), *self._norms[source]])

    def restore(self, source: str, moments: LeastSquares, norms: Float[Tensor, " n"] | None) -> None:
        """Put back what was kept of a source in an earlier run.

        Raises
        ------
        InputError
            It is none of the sources.
        """
        check_source(source, self.targets)
        self._moments[source] = moments
        if self._norms is not None and norms is not None:
            self._norms[source] = [norms]

    def empty(self) -> PairMoments:
        """Moments of the same pairs, of no samples yet."""
        return PairMoments(self._pairs, widths=self.widths, norms=self._norms is not None, split=self._split)

    def _prepare(self) -> None:
        for source, targets in self.targets.items():
            d_out = sum(self.widths[target] for target in targets)
            self._moments[source] = LeastSquares(
                self.widths[source], d_out, source=source, target=", ".join(targets), split=self._split
            )

    def _flush(self) -> None:
        if not self._waiting:
            return
        for part, _ in self._waiting:
            for site, vectors in part.items():
                check_finite(vectors, site)
        waiting, self._waiting = self._waiting, []
        if not self._moments:
            self.widths |= {site: vectors.shape[1] for site, vectors in waiting[0][0].items()}
            self._prepare()
        weighed = [weights for _, weights in waiting if weights is not None]
        weights = torch.cat(weighed) if weighed else None
        last_use = {site: source for source, targets in self.targets.items() for site in (source, *targets)}
        joined: dict[str, Tensor] = {}
        for source, targets in self.targets.items():
            # No site is there twice, nor longer than it is needed: together they are most of the memory.
            for site in (source, *targets):
                if site not in joined:
                    joined[site] = _joined([part.pop(site) for part, _ in waiting])
            self._moments[source].update(
                joined[source], [joined[target] for target in targets], weights=weights
            )
            if self._norms is not None:
                self._norms[source].append(in_float64(joined[source]).square().sum(1).cpu())
            for site in [site for site in joined if last_use[site] == source]:
                del joined[site]
        del waiting, joined
        give_back_freed()


def check_source(source: str, targets: Mapping[str, Sequence[str]]) -> None:
    """Refuse what no moments are kept of.

    Raises
    ------
    InputError
        It is none of the sources.
    """
    if source not in targets:
        raise InputError(
            f"No moments are kept of {short(source)}. Expected one of the sources {', '.join(targets)}."
        )


def chunk_size(x: Tensor) -> int:
    """How many samples of this width are factorised at a time: the factor is factorised again each time."""
    return samples_together(x.shape[1])


def samples_together(width: int) -> int:
    """`chunk_size` of samples of a width."""
    return max(_CHUNK, 8 * width)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def solve_pairs(
    kept: MomentsOfPairs,
    pairs: Iterable[tuple[str, str]],
    *,
    intercept: bool,
    ridge: float,
    provenance: Provenance | None,
) -> Iterator[LinearMap]:
    """Maps of some of the pairs that moments were kept of, source by source.

    Raises
    ------
    InputError
        No moments were kept of a pair, or there were no samples.
    """
    wanted = by_source(check_kept(kept, list(pairs)))
    for source, targets in wanted.items():
        weight, bias = kept.moments(source).solution(intercept=intercept, ridge=ridge)
        widths = [kept.widths[target] for target in kept.targets[source]]
        biases = [None] * len(widths) if bias is None else bias.split(widths)
        solved = dict(zip(kept.targets[source], zip(weight.split(widths), biases, strict=True), strict=True))
        for target in targets:
            yield LinearMap.from_solution(*solved[target], source, target, provenance)


def check_kept(kept: MomentsOfPairs, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Refuse pairs that moments were not kept of.

    Raises
    ------
    InputError
        Some are so; the message names them.
    """
    absent = [
        f"{source} -> {target}" for source, target in pairs if target not in kept.targets.get(source, ())
    ]
    if absent:
        raise InputError(
            f"No moments were kept of {', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''}. Expected "
            "pairs among those that the moments were asked for."
        )
    return pairs


# Several processes


def gathered(kept: PairMoments) -> PairMoments:
    """Moments of the samples of all processes, in the leading one; the others have none any more.

    The factors of each source go to the leading process once, and are factorised together there.
    """
    if parallel.world_size() == 1:
        return kept
    kept._flush()
    whole = PairMoments(
        [(source, target) for source, targets in kept.targets.items() for target in targets],
        norms=kept._norms is not None,
        split=kept._split,
    )
    for source, targets in kept.targets.items():
        parts: dict[str, Tensor] = {}
        if source in kept._moments:
            moments = kept._moments.pop(source)
            parts = moments.tensors() | {"widths": torch.tensor([kept.widths[target] for target in targets])}
            if kept._norms is not None and kept._norms[source]:
                parts["norms"] = torch.cat(kept._norms[source])
        for of_process in parallel.gather(parts, f"moments of {source}"):
            if not of_process:
                continue
            moments = LeastSquares.from_tensors(of_process, source, ", ".join(targets), split=kept._split)
            there = whole._moments.get(source)
            whole._moments[source] = moments if there is None else there.merge(moments)
            whole.widths |= dict(zip(targets, of_process["widths"].tolist(), strict=True))
            whole.widths[source] = of_process["r"].shape[1] - 1
            if whole._norms is not None and "norms" in of_process:
                whole._norms[source].append(of_process["norms"])
    return whole


def maps_for_all(
    maps: Iterable[LinearMap], pairs: Sequence[tuple[str, str]], provenance: Provenance | None
) -> Iterator[LinearMap]:
    """Maps that the leading process solves, in every process; ``pairs`` are what they are between."""
    if parallel.world_size() == 1:
        yield from maps
        return
    solved = iter(maps)
    for source, target in pairs:
        parts = {}
        if parallel.is_main():
            linear = next(solved)
            parts = {"weight": linear.weight} | ({} if linear.bias is None else {"bias": linear.bias})
        parts = parallel.broadcast_tensors(parts, f"map {source} -> {target}")
        yield LinearMap(parts["weight"], parts.get("bias"), source, target, provenance or Provenance())
