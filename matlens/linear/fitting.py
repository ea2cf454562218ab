"""Maps between many pairs of sites at once, from samples in memory or streamed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations, Rows
from matlens.errors import InputError, NonNegative, checked
from matlens.linear.least_squares import LeastSquares, noise_of_fit
from matlens.linear.maps import LinearMap
from matlens.linear.pairs import Pair, by_source, check_collected, list_pairs
from matlens.linear.samples import (
    NoisyFit,
    Selection,
    check_alike,
    selected_batches,
    vectors_of,
    warn_of_noise,
)
from matlens.linear.sums import PairFits, chunk_size, maps_for_all, solve_pairs
from matlens.models.identity import Provenance
from matlens.models.sites import Site, check_finite
from matlens.numerics import check_float64_device, in_float64
from matlens.parallel import Bar

_COMPARED, _ALIKE = 16, 1e-2  # samples that processes compare, and by how much of the largest they may differ
LEFT_OUT = 1024  # samples that leave-one-out looks at
KEPT = 4 << 30  # bytes of float64 copies that are stored rather than made again for every source


def fitting_bar(maps: Iterable[LinearMap], n: int, *, progress: bool) -> Bar:
    """Maps as they are fitted, with a progress bar."""
    return Bar(maps, total=n, desc="fitting", unit="map", disable=not progress)


@checked
def fit_samples(
    samples: Activations | Mapping[str, Float[Tensor, "n d"]],
    pairs: Sequence[Pair],
    *,
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    intercept: bool = False,
    ridge: NonNegative = 0.0,
    provenance: Provenance | None = None,
    split: bool = False,
    device: torch.device | str | None = None,
    noisy: list[NoisyFit] | None = None,
) -> Iterator[LinearMap]:
    """Fit a map for each ``(source, target)``; one factorisation serves all targets of a source.

    Yields the maps source by source, so that a caller who writes them never has them all. At the end an
    Fits without a ridge that overfit their samples issue an `InputWarning`.

    Parameters
    ----------
    samples
        `Activations`, or vectors by site; row ``s`` of every site belongs to the same token.
    pairs
        Sites by name, or by number for layers of the residual stream.
    rows
        True for the samples to fit on, by default all. An attention sink's activations are so large that a
        fit follows little else: ``~sink_rows(...)`` excludes them.
    weights
        How much each sample counts, by default 1: scikit-learn's ``sample_weight``.
    intercept, ridge
        See `LeastSquares.solve`.
    provenance
        Goes into the maps; by default that of `Activations`, with how the maps were fitted.
    split
        As in `LeastSquares`.
    device
        Where maps are fitted, by default where the samples are, which are moved there part by part.
    noisy
        Collects the fits that follow the noise of their samples (`noise_of_fit`), instead of a warning.
    """
    device = None if device is None else check_float64_device(device)
    resolve = getattr(samples, "resolve", Site.parse)  # Activations know which layer is the last
    named = [(str(resolve(source)), str(resolve(target))) for source, target in list_pairs(pairs)]
    check_collected(named, samples)
    sites = list(dict.fromkeys(itertools.chain(*named)))
    n = samples.n_rows if isinstance(samples, Activations) else len(samples[sites[0]])
    selection = Selection.parse(rows, weights, n)
    if provenance is None and isinstance(samples, Activations):
        provenance = samples.provenance.with_details(
            n_fitted=n if selection is None else selection.n, intercept=intercept, ridge=ridge,
            **({} if selection is None else selection.details),
        )  # fmt: skip
    options: dict[str, Any] = {"intercept": intercept, "ridge": ridge, "provenance": provenance}
    found: list[NoisyFit] = []
    if isinstance(samples, Activations) and samples.stored_bytes(sites) > KEPT // 2:
        for source, targets in by_source(named).items():
            maps = fit_stream(
                samples.shards([source, *targets], divided=True, device=device),
                [(source, target) for target in targets],
                rows=rows, weights=weights, divided=True, split=split, noisy=found, **options,
            )  # fmt: skip
            yield from (linear.to("cpu") for linear in maps)
        _report(found, len(named), noisy)
        return
    selected = {site: samples[site] for site in sites}
    check_alike(selected)
    if selection is not None:
        selected, weights = selection.apply(selected)
    selected, weights = _own_share(selected, weights, [named, intercept, ridge])
    for site, vectors in selected.items():
        check_finite(vectors, site)
    in_one_matrix = _OneMatrix(selected)
    n = len(selected[sites[0]])
    some = slice(None, None, max(1, -(-n // LEFT_OUT)))
    for source, targets in by_source(named).items():
        widths = {target: selected[target].shape[1] for target in targets}
        fit = LeastSquares(selected[source].shape[1], widths, source=source, split=split)
        size = chunk_size(selected[source].shape[1])
        for start in range(0, n, size):
            part = slice(start, start + size)
            x, blocks = selected[source][part], in_one_matrix.blocks(targets, part)
            if device is not None:
                x, blocks = x.to(device), [block.to(device) for block in blocks]
            fit.update(x, blocks, weights=None if weights is None else weights[part])
        fit = fit.reduce()
        if not ridge and parallel.is_main():
            names = [f"{source} -> {target}" for target in targets]
            ys = [selected[target][some] for target in targets]
            left_out = selected[source][some], ys, None if weights is None else weights[some]
            found += noise_of_fit(fit, [left_out], names, intercept=intercept)
        solved = fit.solve(**options) if parallel.is_main() else {}
        in_order = (solved.pop(target) for target in targets)
        for linear in maps_for_all(in_order, [(source, target) for target in targets], provenance):
            yield linear if device is None else linear.to(selected[source].device)
    _report(found, len(named), noisy)


def _own_share(
    samples: dict[str, Tensor], weights: Tensor | None, arguments: Sequence[Any]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The samples of this process, of samples that all processes were given."""
    if (world_size := parallel.world_size()) == 1:
        return samples, weights
    n, rank = len(next(iter(samples.values()))), parallel.rank()
    parallel.check_same([*arguments, n, sorted(samples), weights is not None], "fitting")
    few = torch.linspace(0, n - 1, min(n, _COMPARED)).long()
    given = samples if weights is None else samples | {"weights": weights}
    ours = {name: values[few.to(values.device)].cpu() for name, values in given.items()}
    theirs = parallel.broadcast_tensors(ours, "some of the samples")
    for site, values in ours.items():
        # Each may have run the model itself, where sums are taken in another order.
        slack = _ALIKE * float(theirs[site].abs().max())
        if values.shape != theirs[site].shape or bool(((values - theirs[site]).abs() > slack).any()):
            raise InputError(
                f"The samples of {site} must be the same in all processes, and differ in process {rank}. Use "
                "fit_stream(..., divided=True) for samples of each process."
            )
    share = slice(rank * n // world_size, (rank + 1) * n // world_size)
    own = {site: vectors[share] for site, vectors in samples.items()}
    return own, None if weights is None else weights[share]


def _report(found: list[NoisyFit], n_fits: int, noisy: list[NoisyFit] | None) -> None:
    if noisy is None:
        warn_of_noise(found, n_fits)
    else:
        noisy += found


class _OneMatrix:
    """Float64 copies of all samples in one matrix, where they are not too many to be copied.

    Targets whose columns follow each other are one product with a source's factor, a quarter quicker than
    one product for each.
    """

    def __init__(self, samples: Mapping[str, Tensor]) -> None:
        self._samples = samples
        self._columns: dict[str, tuple[int, int]] = {}
        same_device = len({vectors.device for vectors in samples.values()}) == 1
        if same_device and sum(vectors.numel() * 8 for vectors in samples.values()) <= KEPT:
            first = next(iter(samples.values()))
            width = sum(vectors.shape[1] for vectors in samples.values())
            self._matrix = in_float64(first.new_empty(0)).new_empty(len(first), width)
            start = 0
            for site, vectors in samples.items():
                end = start + vectors.shape[1]
                self._matrix[:, start:end] = vectors.to(self._matrix.device)
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
        return [self._matrix[rows, start:end] for start, end in runs]


@checked
def fit_stream(
    batches: Iterable[Rows | Mapping[str, Float[Tensor, "n d"]]],
    pairs: Sequence[Pair],
    *,
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    intercept: bool = False,
    ridge: NonNegative = 0.0,
    provenance: Provenance | None = None,
    divided: bool = False,
    split: bool = False,
    noisy: list[NoisyFit] | None = None,
) -> Iterator[LinearMap]:
    """Fit the same maps from samples that are streamed and not stored.

    Parameters
    ----------
    batches
        Batches of `matlens.activations.stream`, or vectors by site.
    rows, weights
        As in `fit_samples`, in the order of the collection; for vectors by site, in the order of the batches.
    pairs, intercept, ridge, split, noisy
        As in `fit_samples`.
    provenance
        Goes into the maps; by default that of the first batch of `matlens.activations.stream`. Vectors by
        site have none, and `patched` refuses maps of an unknown model.
    divided
        Whether several processes each have batches of their own, as from ``stream(..., divided=True)``:
        their statistics are merged at the end, and each process has the maps of all samples.
    """
    named = [(str(Site.parse(source)), str(Site.parse(target))) for source, target in list_pairs(pairs)]
    widths, own, batches = _first_of(_check_division(batches, divided))
    provenance = provenance or own
    if divided:
        widths = parallel.broadcast(widths, "widths of the samples")
    if not widths:
        raise InputError("batches must have at least one sample to fit maps on, got none.")
    check_collected(named, widths)
    fits, sample = PairFits(named, widths, split=split), _FirstSamples()
    named = [(source, target) for source, targets in fits.targets.items() for target in targets]
    for vectors, of_batch in selected_batches(batches, rows, weights, provenance, divided=divided):
        fits.update(vectors, weights=of_batch)
        sample.add({site: vectors[site] for pair in named for site in pair}, of_batch)
    if divided:
        fits.reduce()
    n = parallel.broadcast(fits.n, "the number of samples") if divided else fits.n
    if own is not None and provenance is own:
        provenance = own.with_details(n_fitted=n, intercept=intercept, ridge=ridge)
    maps = solve_pairs(fits, named, intercept=intercept, ridge=ridge, provenance=provenance)
    yield from maps_for_all(maps, named, provenance) if divided else maps
    if not ridge and (parallel.is_main() or not divided):
        _report(sample.noisy(fits, intercept=intercept), len(named), noisy)


class _FirstSamples:
    """The first samples of a stream, which leave-one-out looks at."""

    def __init__(self) -> None:
        self._n = 0
        self._parts: list[tuple[dict[str, Tensor], Tensor | None]] = []

    def add(self, vectors: Mapping[str, Tensor], weights: Tensor | None) -> None:
        if self._n < LEFT_OUT:
            few = slice(LEFT_OUT - self._n)
            # Copies: a slice would keep the whole batch in memory.
            part = {site: of_site[few].clone() for site, of_site in vectors.items()}
            self._parts.append((part, None if weights is None else weights[few]))
            self._n += len(next(iter(part.values())))

    def noisy(self, fits: PairFits, *, intercept: bool) -> list[NoisyFit]:
        found: list[NoisyFit] = []
        for source, targets in fits.targets.items() if self._n else ():
            samples = (
                (part[source], [part[target] for target in targets], weights) for part, weights in self._parts
            )
            names = [f"{source} -> {target}" for target in targets]
            found += noise_of_fit(fits[source], samples, names, intercept=intercept)
        return found


def _first_of(batches: Iterator[Any]) -> tuple[dict[str, int], Provenance | None, Iterator[Any]]:
    """Widths of the sites in the first batch, its provenance, and all batches."""
    first = next(batches, None)
    if first is None:
        return {}, None, batches
    widths = {site: of_site.shape[1] for site, of_site in vectors_of(first).items()}
    return widths, getattr(first, "provenance", None), itertools.chain([first], batches)


def _check_division(batches: Iterable[Any], divided: bool) -> Iterator[Any]:
    """Refuse batches that would be counted by every process, or those of one process for all samples."""
    for batch in batches:
        if parallel.world_size() > 1 and getattr(batch, "divided", divided) != divided:
            raise InputError(
                f"divided must be {batch.divided} for these batches, got {divided}: stream and fit_stream "
                "must have the same divided."
            )
        yield batch
