"""Maps between many pairs of sites at once, from samples that are at hand or that pass by once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.errors import InputError, checked
from matlens.linear.least_squares import check_finite, check_ridge, noise_of_fit
from matlens.linear.maps import LinearMap, tensor_digest
from matlens.linear.pairs import Pair, by_source, check_collected, list_pairs
from matlens.linear.samples import (
    NoisyFit,
    Passing,
    Samples,
    StoredSamples,
    check_alike,
    check_collection,
    chosen_of_batches,
    chosen_samples,
    warn_of_noise,
)
from matlens.linear.sums import PairMoments, chunk_size, gathered, maps_for_all, solve_pairs
from matlens.models.identity import Provenance
from matlens.models.sites import Site
from matlens.numerics.precision import check_float64_device, in_float64
from matlens.parallel import Bar

_COMPARED, _ALIKE = 16, 1e-2  # samples that processes compare, and by how much of the largest they may differ
LEFT_OUT = 1024  # samples that leave-one-out looks at
KEPT = 4 << 30  # bytes of float64 copies that are kept rather than made again for every source


def fitting_bar(maps: Iterable[LinearMap], n: int, *, progress: bool) -> Bar:
    """Maps as they are fitted, with a bar over all of them."""
    return Bar(maps, total=n, desc="fitting", unit="map", disable=not progress)


@checked
def fit_samples(
    samples: Mapping[str, Float[Tensor, "n d"]],
    pairs: Sequence[Pair],
    *,
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    intercept: bool = False,
    ridge: float = 0.0,
    provenance: Provenance | None = None,
    split: bool = False,
    device: torch.device | str | None = None,
    noisy: list[NoisyFit] | None = None,
) -> Iterator[LinearMap]:
    """Fit a map for each ``(source, target)``; one factorisation serves all targets of a source.

    Yields the maps source by source, so that a caller who writes them away never holds them all. At the end
    an `InputWarning` says if fits without a ridge follow the noise of their samples.

    Parameters
    ----------
    samples
        Vectors by site, such as `Activations`; row ``s`` of every site belongs to the same token.
    pairs
        Sites by name, or by number for layers of the stream.
    rows
        True for the samples to fit on, by default all. An attention sink's activations are so large that a
        fit follows little else: ``~sink_rows(...)`` leaves them out.
    weights
        How much each sample counts, by default 1: numbers of at least 0, as scikit-learn's
        ``sample_weight``.
    intercept, ridge
        See `LeastSquares.solve`.
    provenance
        Goes into the maps; by default what `Activations` say of themselves.
    split
        Whether products in float64 are sums of exact ones in float32, see `LeastSquares`: for devices
        that are slow in float64.
    device
        Where products are taken and maps are solved, by default where the samples are; these are brought
        there part by part, and the maps back.
    noisy
        Collects the fits that follow the noise of their samples (`noise_of_fit`), instead of a warning.

    Raises
    ------
    InputError
        A value is not finite, where the message names the site; a site has no samples; rows or weights are
        not those of these samples; the ridge is negative or not finite; or the device has no float64.
    """
    ridge, there = check_ridge(ridge), None if device is None else check_float64_device(device)
    if provenance is None:
        provenance = getattr(samples, "provenance", None)
    resolve = getattr(samples, "resolve", Site.parse)  # Activations know which layer is the last
    named = [(str(resolve(source)), str(resolve(target))) for source, target in list_pairs(pairs)]
    check_collected(named, samples)
    wanted = {site: samples[site] for pair in named for site in pair}
    check_alike(wanted)
    chosen, weights = chosen_samples(rows, weights, len(wanted[named[0][0]]))
    if chosen is not None:
        wanted = {site: vectors[chosen] for site, vectors in wanted.items()}
    n = len(wanted[named[0][0]])
    if (world_size := parallel.world_size()) > 1:
        _check_same_everywhere(wanted, weights, [named, n, intercept, ridge])
        rank = parallel.rank()
        share = slice(rank * n // world_size, (rank + 1) * n // world_size)
        wanted = {site: vectors[share] for site, vectors in wanted.items()}
        weights = None if weights is None else weights[share]
    for site, vectors in wanted.items():
        check_finite(vectors, site)
    side_by_side = _SideBySide(wanted)
    found: list[NoisyFit] = []
    n_fits = 0
    for source, targets in by_source(named).items():
        pairs_of_source = [(source, target) for target in targets]
        widths = {site: of.shape[1] for site, of in wanted.items()}
        kept = PairMoments(pairs_of_source, widths=widths, split=split)
        n, size = len(wanted[source]), chunk_size(wanted[source])
        for start in range(0, n, size):
            part = slice(start, start + size)
            of_part = None if weights is None else weights[part]
            x, blocks = wanted[source][part], side_by_side.blocks(targets, part)
            if there is not None:
                x, blocks = x.to(there), [block.to(there) for block in blocks]
            kept.moments(source).update(x, blocks, weights=of_part)
        kept = gathered(kept)
        n_fits += len(targets)
        if not ridge and parallel.is_main():
            few = slice(None, None, max(1, -(-n // LEFT_OUT)))
            x, ys = wanted[source][few], [wanted[target][few] for target in targets]
            names = [f"{source} -> {target}" for target in targets]
            samples_left_out = [(x, ys, None if weights is None else weights[few])]
            found += noise_of_fit(kept.moments(source), samples_left_out, names, intercept=intercept)
        maps = maps_for_all(
            solve_pairs(kept, pairs_of_source, intercept=intercept, ridge=ridge, provenance=provenance),
            pairs_of_source, provenance,
        )  # fmt: skip
        yield from maps if there is None else (linear.to(wanted[source].device) for linear in maps)
    _report(found, n_fits, noisy)


def _report(found: list[NoisyFit], n_fits: int, noisy: list[NoisyFit] | None) -> None:
    if noisy is None:
        warn_of_noise(found, n_fits)
    else:
        noisy += found


def _check_same_everywhere(
    samples: Mapping[str, Tensor], weights: Tensor | None, arguments: Sequence[Any]
) -> None:
    """Refuse to divide samples among processes of which one was given others, by a few of them."""
    parallel.check_same([*arguments, sorted(samples), weights is not None], "fitting")
    n = len(next(iter(samples.values())))
    few = torch.linspace(0, n - 1, min(n, _COMPARED)).long()
    ours = {site: vectors[few.to(vectors.device)].cpu() for site, vectors in samples.items()}
    if weights is not None:
        ours["weights"] = weights[few.to(weights.device)].cpu()
    theirs = parallel.broadcast_tensors(ours, "some of the samples")
    for site, values in ours.items():
        # Each may have run the model itself, where sums are taken in another order.
        slack = _ALIKE * float(theirs[site].abs().max())
        if values.shape != theirs[site].shape or bool(((values - theirs[site]).abs() > slack).any()):
            raise InputError(
                f"Process {parallel.rank()} was given other samples of {site} than process 0. Expected all "
                "samples in every process, as matlens.collect gives them: they are divided inside. Rows that "
                "differ from process to process go through fit_stream(..., divided=True)."
            )


@checked
def fit_rows(
    samples: Samples,
    pairs: Sequence[tuple[str, str]],
    *,
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    intercept: bool = False,
    ridge: float = 0.0,
    split: bool = False,
    device: torch.device | str | None = None,
    noisy: list[NoisyFit] | None = None,
) -> Iterator[LinearMap]:
    """Fit maps on collected samples or some of them, and write into the maps how many they were.

    Parameters
    ----------
    samples
        Vectors by site, such as `matlens.collect` gives.
    pairs
        Names of the sites of each map.
    rows, weights, intercept, ridge, split, device, noisy
        See `fit_samples`.

    Raises
    ------
    InputError
        A site was not collected, or rows or weights are not those of the samples, or none is chosen.
    """
    check_collection(samples)
    ridge, pairs = check_ridge(ridge), [(str(a), str(b)) for a, b in list_pairs(pairs)]
    check_collected(pairs, samples)
    chosen, kept_weights = chosen_samples(rows, weights, samples.n_rows)
    sites = dict.fromkeys(itertools.chain(*pairs))
    n = samples.n_rows if chosen is None else len(chosen)
    details: dict[str, Any] = {"n_fitted": n, "intercept": intercept, "ridge": ridge}
    if chosen is not None:
        details["rows"] = tensor_digest(chosen)
    if kept_weights is not None:
        details["weights"] = tensor_digest(kept_weights)
    provenance = samples.provenance.with_details(**details)
    options: dict[str, Any] = {
        "intercept": intercept, "ridge": ridge, "split": split, "provenance": provenance,
    }  # fmt: skip
    if isinstance(samples, StoredSamples) and samples.stored_bytes(sites) > KEPT // 2:
        found: list[NoisyFit] = []
        for source, targets in by_source(pairs).items():
            of_source = [(source, target) for target in targets]
            batches = samples.shards([source, *targets], divided=True, device=device)
            yield from fit_stream(
                batches, of_source, rows=rows, weights=weights, divided=True, noisy=found, **options
            )
        _report(found, len(pairs), noisy)
        return
    vectors = {site: samples[site] for site in sites}
    if chosen is not None:
        vectors = {site: of_site[chosen] for site, of_site in vectors.items()}
    yield from fit_samples(vectors, pairs, weights=kept_weights, device=device, noisy=noisy, **options)


class _SideBySide:
    """Float64 copies of all samples in one matrix, where they are not too many to be copied.

    Targets that are neighbours in it are one product with a source's factor, a quarter quicker than one
    product for each.
    """

    def __init__(self, samples: Mapping[str, Tensor]) -> None:
        self._samples = samples
        self._columns: dict[str, tuple[int, int]] = {}
        alike = len({(len(vectors), vectors.device) for vectors in samples.values()}) == 1
        if alike and sum(vectors.numel() * 8 for vectors in samples.values()) <= KEPT:
            first = next(iter(samples.values()))
            width = sum(vectors.shape[1] for vectors in samples.values())
            self._wide = in_float64(first.new_empty(0)).new_empty(len(first), width)
            start = 0
            for site, vectors in samples.items():
                end = start + vectors.shape[1]
                self._wide[:, start:end] = vectors.to(self._wide.device)
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
    batches: Iterable[Mapping[str, Float[Tensor, "n d"]] | Passing],
    pairs: Sequence[Pair],
    *,
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    intercept: bool = False,
    ridge: float = 0.0,
    provenance: Provenance | None = None,
    divided: bool = False,
    split: bool = False,
    noisy: list[NoisyFit] | None = None,
) -> Iterator[LinearMap]:
    """Fit the same maps from samples that pass by once and are not kept.

    Parameters
    ----------
    batches
        What `matlens.activations.stream` yields, or vectors by site.
    rows, weights
        As in `fit_samples`, in the order of the collection; where batches are vectors by site alone, in the
        order in which these pass by.
    pairs, intercept, ridge, split, noisy
        As in `fit_samples`.
    provenance
        Goes into the maps; by default what the first batch of `matlens.activations.stream` says of itself.
        Vectors by site alone say nothing, and `patched` refuses maps of an unknown model.
    divided
        Whether several processes each pass batches of their own, as ``stream(..., divided=True)`` gives
        them: their moments are merged at the end, and each process has the maps of all samples.

    Raises
    ------
    InputError
        As in `fit_samples`; or the batches are of a model with other changes than the provenance says, or
        are divided among processes otherwise than ``divided`` says.
    """
    ridge = check_ridge(ridge)
    kept = PairMoments(pairs, split=split)
    named = [(source, target) for source, targets in kept.targets.items() for target in targets]
    own, batches = _with_provenance(_check_division(batches, divided))
    first = _FirstSamples()
    for vectors, of_batch in chosen_of_batches(batches, rows, weights, provenance or own):
        kept.update(vectors, weights=of_batch)
        first.add({site: vectors[site] for pair in named for site in pair}, of_batch)
    n = {"n": torch.tensor(kept.n)}
    if divided:
        kept = gathered(kept)
        n = parallel.broadcast_tensors({"n": torch.tensor(kept.n)}, "the number of samples")
    if provenance is None and own is not None:
        provenance = own.with_details(n_fitted=int(n["n"]), intercept=intercept, ridge=ridge)
    maps = solve_pairs(kept, named, intercept=intercept, ridge=ridge, provenance=provenance)
    yield from maps_for_all(maps, named, provenance) if divided else maps
    if not ridge and (parallel.is_main() or not divided):
        _report(first.noisy(kept, intercept=intercept), len(named), noisy)


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

    def noisy(self, kept: PairMoments, *, intercept: bool) -> list[NoisyFit]:
        found: list[NoisyFit] = []
        for source, targets in kept.targets.items() if self._n else ():
            samples = (
                (part[source], [part[target] for target in targets], weights) for part, weights in self._parts
            )
            names = [f"{source} -> {target}" for target in targets]
            found += noise_of_fit(kept.moments(source), samples, names, intercept=intercept)
        return found


def _with_provenance(batches: Iterator[Any]) -> tuple[Provenance | None, Iterator[Any]]:
    """What the first batch says of the model and the examples, where it does, and all batches."""
    first = list(itertools.islice(batches, 1))
    known = getattr(first[0], "provenance", None) if first else None
    # Handed on and not kept: a batch may be most of the memory.
    return known, itertools.chain(_drained(first), batches)


def _drained(batches: list[Any]) -> Iterator[Any]:
    while batches:
        yield batches.pop()


def _check_division(batches: Iterable[Any], divided: bool) -> Iterator[Any]:
    """Refuse batches that would be counted by every process, or those of one process for all samples."""
    several = parallel.world_size() > 1
    for batch in batches:
        if several and getattr(batch, "divided", divided) != divided:
            whose = "these are all samples" if divided else "these are batches of this process alone"
            raise InputError(
                f"fit_stream has divided={divided} in one of several processes, and {whose}. "
                "Expected the same of both: stream(..., divided=True) with fit_stream(..., divided=True), or "
                "neither."
            )
        yield batch
