"""Maps between many pairs of sites at once, from samples that are at hand or that pass by once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens.errors import InputError
from matlens.linear.maps import LinearMap
from matlens.linear.moments import Moments, require_finite
from matlens.linear.pairs import Pair, by_source, require_collected
from matlens.models.identity import Provenance
from matlens.models.sites import Site
from matlens.signatures import checked

_CHUNK = 4096  # samples factorised at a time; never fewer than eight for each dimension
_KEPT = 4 << 30  # bytes of float64 copies that are kept rather than made again for every source


@checked
def fit_samples(
    samples: Mapping[str, Float[Tensor, "n d"]],
    pairs: Sequence[Pair],
    *,
    intercept: bool = False,
    ridge: float = 0.0,
    provenance: Provenance | None = None,
) -> Iterator[LinearMap]:
    """Fit a map for each ``(source, target)``; one factorisation serves all targets of a source.

    Yields the maps source by source, so that a caller who writes them away never holds them all.

    Parameters
    ----------
    samples
        Vectors by site, such as `Activations`; row ``s`` of every site belongs to the same token.
    pairs
        Sites by name, or by number for layers of the stream.
    intercept, ridge
        See `Moments.solve`.
    provenance
        Goes into the maps; by default what `Activations` say of themselves.

    Raises
    ------
    InputError
        A value is not finite; the message names the site.
    """
    if provenance is None:
        provenance = getattr(samples, "provenance", None)
    resolve = getattr(samples, "resolve", Site.parse)  # Activations know which layer is the last
    named = [(str(resolve(source)), str(resolve(target))) for source, target in pairs]
    wanted = {site: samples[site] for pair in named for site in pair}
    for site, vectors in wanted.items():
        require_finite(vectors, site)
    kept = _SideBySide(wanted)
    for source, targets in by_source(named).items():
        moments = _moments(wanted, source, targets)
        n, size = len(wanted[source]), _chunk_size(wanted[source])
        for start in range(0, n, size):
            rows = slice(start, start + size)
            moments.update(wanted[source][rows], kept.blocks(targets, rows))
        yield from _maps(moments, wanted, source, targets, intercept, ridge, provenance)


@runtime_checkable
class Samples(Protocol):
    """As much of `Activations` as a fit needs."""

    @property
    def provenance(self) -> Provenance:
        """Where the vectors come from."""

    @property
    def n_rows(self) -> int:
        """The number of vectors of each site."""

    def __getitem__(self, site: Any, /) -> Tensor:
        """The vectors of a site."""

    def __iter__(self) -> Iterator[str]:
        """The sites."""


@checked
def fit_rows(
    samples: Samples,
    pairs: Sequence[tuple[str, str]],
    *,
    rows: Bool[Tensor, " n"] | None = None,
    intercept: bool = False,
    ridge: float = 0.0,
) -> Iterator[LinearMap]:
    """Fit maps on collected samples or some of them, and write into the maps how many they were.

    Parameters
    ----------
    samples
        Vectors by site, such as `matlens.collect` gives.
    pairs
        Names of the sites of each map.
    rows
        True for the samples to fit on, by default all. An attention sink's activations are so large that a
        fit follows little else: ``~sink_rows(...)`` leaves them out.
    intercept, ridge
        See `Moments.solve`.

    Raises
    ------
    InputError
        A site was not collected, or rows are no mask, too few or too many, or none is chosen.
    """
    require_collected(pairs, samples)
    if rows is not None and not (isinstance(rows, Tensor) and rows.dtype == torch.bool and rows.dim() == 1):
        raise InputError(
            f"'rows' is {_described(rows)}. Expected a tensor with true or false for each of the "
            f"{samples.n_rows} samples."
        )
    if rows is not None and len(rows) != samples.n_rows:
        raise InputError(
            f"'rows' has {len(rows)} values for {samples.n_rows} samples. Expected one for each."
        )
    chosen = slice(None) if rows is None else rows.nonzero()[:, 0]
    n = samples.n_rows if rows is None else int(rows.sum())
    if not n:
        raise InputError("No sample is left to fit on. Expected at least one true value in 'rows'.")
    vectors = {site: samples[site][chosen] for site in dict.fromkeys(itertools.chain(*pairs))}
    provenance = samples.provenance.with_details(n_fitted=n, intercept=intercept, ridge=ridge)
    yield from fit_samples(vectors, pairs, intercept=intercept, ridge=ridge, provenance=provenance)


def _described(rows: object) -> str:
    if isinstance(rows, Tensor):
        return f"a tensor {list(rows.shape)} of {rows.dtype}"
    return repr(type(rows).__name__)


class _SideBySide:
    """Float64 copies of all samples in one matrix, where they are not too many to be copied.

    Targets that are neighbours in it are one product with a source's factor, a quarter quicker than one
    product for each.
    """

    def __init__(self, samples: Mapping[str, Tensor]) -> None:
        self._samples = samples
        self._columns: dict[str, tuple[int, int]] = {}
        alike = len({(len(vectors), vectors.device) for vectors in samples.values()}) == 1
        if alike and sum(vectors.numel() * 8 for vectors in samples.values()) <= _KEPT:
            first = next(iter(samples.values()))
            width = sum(vectors.shape[1] for vectors in samples.values())
            self._wide = torch.empty(len(first), width, dtype=torch.float64, device=first.device)
            start = 0
            for site, vectors in samples.items():
                end = start + vectors.shape[1]
                self._wide[:, start:end] = vectors
                self._columns[site] = start, end
                start = end

    def blocks(self, sites: Sequence[str], rows: slice) -> list[Tensor]:
        """Samples of the sites, in their order, in as few blocks as possible."""
        if not self._columns:
            return [self._samples[site][rows] for site in sites]
        runs: list[tuple[int, int]] = []
        for start, end in (self._columns[site] for site in sites):
            if runs and runs[-1][1] == start:
                runs[-1] = runs[-1][0], end
            else:
                runs.append((start, end))
        return [self._wide[rows, start:end] for start, end in runs]


@checked
def fit_stream(
    batches: Iterable[Mapping[str, Float[Tensor, "n d"]]],
    pairs: Sequence[Pair],
    *,
    intercept: bool = False,
    ridge: float = 0.0,
    provenance: Provenance | None = None,
) -> Iterator[LinearMap]:
    """Fit the same maps from samples that pass by once and are not kept.

    ``batches`` are vectors by site, such as ``rows.vectors`` for the rows of
    `matlens.activations.stream`; the other parameters are those of `fit_samples`.
    """
    grouped, moments, last = by_source(pairs), dict[str, Moments](), dict[str, Tensor]()
    for last in _gathered(batches):
        for source, targets in grouped.items():
            if source not in moments:
                moments[source] = _moments(last, source, targets)
            moments[source].update(last[source], [last[target] for target in targets])
    if not moments:
        raise InputError("There are no samples to fit maps on.")
    for source, targets in grouped.items():
        yield from _maps(moments.pop(source), last, source, targets, intercept, ridge, provenance)


def _moments(example: Mapping[str, Tensor], source: str, targets: list[str]) -> Moments:
    d_out = sum(example[target].shape[1] for target in targets)
    return Moments(example[source].shape[1], d_out, source=source, target=", ".join(targets))


def _maps(
    moments: Moments,
    example: Mapping[str, Tensor],
    source: str,
    targets: list[str],
    intercept: bool,
    ridge: float,
    provenance: Provenance | None,
) -> Iterator[LinearMap]:
    weight, bias = moments.solution(intercept=intercept, ridge=ridge)
    widths = [example[target].shape[1] for target in targets]
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    for target, w, b in zip(targets, weight.split(widths), biases, strict=True):
        yield LinearMap.from_solution(w, b, source, target, provenance)


def _chunk_size(x: Tensor) -> int:
    return max(_CHUNK, 8 * x.shape[1])


def _gathered(batches: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Join small batches: factorising the factor again costs as much as ``d_in`` more samples."""
    waiting: list[Mapping[str, Tensor]] = []

    def joined() -> dict[str, Tensor]:
        for site in waiting[0]:
            for part in waiting:
                require_finite(part[site], site)
        return {site: torch.cat([part[site] for part in waiting]) for site in waiting[0]}

    for batch in batches:
        waiting.append(batch)
        sizes = [len(next(iter(part.values()))) for part in waiting]
        if sum(sizes) >= _chunk_size(next(iter(batch.values()))):
            yield joined()
            waiting = []
    if waiting:
        yield joined()
