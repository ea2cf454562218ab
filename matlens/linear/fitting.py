"""Maps between many pairs of sites at once, from samples in memory, in a folder or streamed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations, Rows
from matlens.data.overlap import fitted_on
from matlens.errors import InputError, NonNegative, check_rows, checked
from matlens.linear.least_squares import LeastSquares, check_weights, warn_if_few
from matlens.linear.maps import LinearMap
from matlens.linear.pairs import Pair, by_source, check_collected, resolve_pairs
from matlens.models.identity import Provenance
from matlens.models.weights import tensor_digest
from matlens.numerics import check_float64_device, in_float64, return_freed_memory
from matlens.parallel import Bar

_CHUNK = 4096  # samples factorised at a time; never fewer than eight for each dimension
CONVERTED_BYTES = 4 << 30  # of float64 copies that are made once, and not for every source

Samples = dict[str, Tensor]
"""Samples, one per row: vectors by site, and ``weights`` unless all count the same."""


def fitting_bar(maps: Iterable[LinearMap], n: int, *, progress: bool) -> Bar:
    """Maps as they are fitted, with a progress bar."""
    return Bar(maps, total=n, desc="fitting", unit="map", disable=not progress)


def chunk_size(width: int) -> int:
    """How many samples of a width are factorised at a time: the factor is factorised again each time."""
    return max(_CHUNK, 8 * width)


def chunks(batches: Iterable[Samples], size: int) -> Iterator[Samples]:
    """Batches joined to chunks of at least ``size`` samples, each emptied when the next is asked for."""
    waiting: list[Samples] = []
    for batch in batches:
        waiting.append(batch)
        if sum(map(_count, waiting)) >= size:
            chunk, waiting = joined(waiting), []
            yield chunk
            chunk.clear()  # the caller's variable would keep it in memory
    if waiting:
        yield joined(waiting)


def joined(parts: list[Samples]) -> Samples:
    """All samples of some parts, which are emptied: together they are most of the memory."""
    return {name: _cat([part.pop(name) for part in parts]) for name in list(parts[0])} if parts else {}


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _count(samples: Mapping[str, Tensor]) -> int:
    return len(next(iter(samples.values()), ()))


@dataclass(frozen=True)
class Selection:
    """Which samples are fitted on, and how much each counts."""

    mask: Bool[Tensor, " n"] | None = None  # true for those with a weight above 0; None for all
    weights: Float[Tensor, " n"] | None = None  # in float64; None where all count the same

    @classmethod
    def parse(cls, rows: Tensor | None, weights: Tensor | None, n: int) -> Selection:
        """Check ``rows`` and ``weights`` of ``n`` samples."""
        if rows is None and weights is None:
            return cls()
        check_rows(rows, n)
        mask = torch.ones(n, dtype=torch.bool) if rows is None else rows.cpu()
        if weights is not None:
            weights = check_weights(weights, n).cpu()
            mask = mask & (weights > 0)
        if not bool(mask.any()):
            raise InputError("rows and weights must select at least one sample, got none.")
        return cls(mask, weights)

    @property
    def details(self) -> dict[str, str]:
        """Samples and weights of a fit, for its provenance."""
        if self.mask is None:
            return {}
        weights = {} if self.weights is None else {"weights": tensor_digest(self.weights[self.mask])}
        return {"rows": tensor_digest(self.mask)} | weights

    def select(self, vectors: Mapping[str, Tensor], index: Tensor) -> Samples:
        """The selected ones of the vectors of the samples ``index``."""
        if self.mask is None:
            return dict(vectors)
        mask = self.mask[index]
        samples = {site: of_site[mask.to(of_site.device)] for site, of_site in vectors.items()}
        return samples if self.weights is None else samples | {"weights": self.weights[index][mask]}


def update(fits: Iterable[LeastSquares], samples: Samples) -> None:
    """Add samples to the statistics of several sources."""
    for fit in fits:
        targets = [samples[target] for target in fit.targets]
        fit.update(samples[fit.source], targets, weights=samples.get("weights"))
    return_freed_memory()


@checked
def fit_samples(
    samples: Activations,
    pairs: Sequence[Pair],
    *,
    rows: Bool[Tensor, " n"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
    intercept: bool = False,
    ridge: NonNegative = 0.0,
    split: bool = False,
    device: torch.device | str | None = None,
) -> Iterator[LinearMap]:
    """Fit a map for each ``(source, target)``; one factorisation serves all targets of a source.

    Yields the maps source by source, so that a caller who writes them never has them all. Without a ridge,
    fewer than two samples per dimension issue one `InputWarning` at the end.

    Parameters
    ----------
    samples
        Collected vectors, whose rows distributed processes divide; for vectors of your own see `fit_stream`.
    pairs
        Sites by name, or by number for layers of the residual stream.
    rows
        True for the samples to fit on, by default all. An attention sink's activations are so large that a
        fit follows little else: ``~sink_rows(...)`` excludes them.
    weights
        How much each sample counts, by default 1: scikit-learn's ``sample_weight``.
    intercept, ridge
        See `LeastSquares.solve`.
    split
        As in `LeastSquares`.
    device
        Where maps are fitted, by default where the samples are, which are moved there part by part.
    """
    device = None if device is None else check_float64_device(device)
    named = resolve_pairs(pairs, samples.provenance)
    check_collected(named, samples)
    widths = {site: samples.width(site) for site in itertools.chain(*named)}
    selection = Selection.parse(rows, weights, samples.n_rows)
    options = {"intercept": intercept, "ridge": ridge, **selection.details}
    parallel.check_same([samples.provenance.to_json(), named, samples.n_rows, options], "fitting")
    n_fitted = samples.n_rows if selection.mask is None else int(selection.mask.sum())
    record = fitted_on(samples.at_rows, selection.mask)
    provenance = samples.provenance.with_details(**options, **record, n_fitted=n_fitted)
    widest = max(widths[source] for source, _ in named)
    size = chunk_size(widest)

    def read(sites: Iterable[str]) -> Iterator[Samples]:
        for part in samples.shards(list(sites), divided=True):
            vectors = {site: of_site.to(device) for site, of_site in part.vectors.items()}
            yield selection.select(vectors, torch.from_numpy(part.index))

    # Few samples are converted once, and not for every source.
    are_converted = device is None and 8 * samples.n_rows * sum(widths.values()) <= CONVERTED_BYTES
    if are_converted:
        converted = joined([{name: in_float64(of) for name, of in part.items()} for part in read(widths)])
    for fit in least_squares_of(named, widths, split=split):
        if are_converted:
            for start in range(0, _count(converted), size):
                update([fit], {name: values[start : start + size] for name, values in converted.items()})
        else:
            for chunk in chunks(read([fit.source, *fit.targets]), size):
                update([fit], chunk)
        fit = fit.reduce(to_all=True)
        maps = fit.solve(intercept=intercept, ridge=ridge, provenance=provenance)
        yield from (maps.pop(target).to("cpu") for target in fit.targets)
    if not ridge:
        warn_if_few(n_fitted, widest)


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
) -> Iterator[LinearMap]:
    """Fit the same maps from samples that are streamed and not stored.

    Parameters
    ----------
    batches
        Batches of `matlens.activations.stream`, or vectors by site.
    rows, weights
        As in `fit_samples`, in the order of the collection; for vectors by site, in the order of the batches.
    pairs, intercept, ridge, split
        As in `fit_samples`.
    provenance
        Goes into the maps; by default that of the first batch of `matlens.activations.stream`. Vectors by
        site have none, and `patched` refuses maps of an unknown model.
    divided
        Whether several processes each have batches of their own, as from ``stream(..., divided=True)``:
        their statistics are merged at the end, and each process has the maps of all samples.
    """
    named = resolve_pairs(pairs, Provenance())
    n = next((len(given) for given in (rows, weights) if given is not None), 0)
    selection = Selection.parse(rows, weights, n)
    batches = iter(batches)
    first = next(batches, None)
    vectors = first.vectors if isinstance(first, Rows) else first or {}
    widths = {site: of_site.shape[1] for site, of_site in vectors.items()}
    if divided:
        widths = parallel.broadcast(widths, "widths of the samples")
    if not widths:
        raise InputError("batches must have at least one sample to fit maps on, got none.")
    check_collected(named, widths)
    origin = first.provenance if provenance is None and isinstance(first, Rows) else provenance
    fits = list(least_squares_of(named, widths, split=split))
    sites = list(dict.fromkeys(itertools.chain(*named)))
    batches = () if first is None else itertools.chain([first], batches)
    selected = _selected(batches, sites, selection, origin, divided=divided)
    for chunk in chunks(selected, chunk_size(widths[named[0][0]])):
        update(fits, chunk)
    if divided:
        fits = [fit.reduce(to_all=True) for fit in fits]
    n = fits[0].n
    if provenance is None and origin is not None:
        options = {"intercept": intercept, "ridge": ridge, **selection.details}
        if isinstance(first, Rows) and first.examples is not None:
            options |= fitted_on(first.examples, selection.mask)
        provenance = origin.with_details(**options, n_fitted=n)
    for fit in fits:
        maps = fit.solve(intercept=intercept, ridge=ridge, provenance=provenance)
        yield from (maps.pop(target) for target in fit.targets)
    if not ridge:
        warn_if_few(n, max(widths[fit.source] for fit in fits))


def least_squares_of(
    pairs: Sequence[tuple[str, str]], widths: Mapping[str, int], *, norms: bool = False, split: bool = False
) -> Iterator[LeastSquares]:
    """Empty statistics of each source and its targets."""
    for source, targets in by_source(pairs).items():
        d_out = {target: widths[target] for target in targets}
        yield LeastSquares(widths[source], d_out, source=source, norms=norms, split=split)


def _selected(
    batches: Iterable[Rows | Mapping[str, Tensor]],
    sites: Sequence[str],
    selection: Selection,
    provenance: Provenance | None,
    *,
    divided: bool,
) -> Iterator[Samples]:
    """The selected samples of each batch; raises InputError if they are not as many as were selected from."""
    n_seen = 0
    for batch in batches:
        if isinstance(batch, Rows):
            vectors, index = batch.vectors, torch.from_numpy(batch.index)
            if parallel.world_size() > 1 and batch.divided != divided:
                raise InputError(
                    f"divided must be {not divided} for these batches, got {divided}: stream and fit_stream "
                    "must have the same divided."
                )
            if provenance is not None and provenance.model is not None:
                provenance.check_same(batch.provenance, ours="the provenance", theirs="the vectors")
        else:
            vectors, index = dict(batch), torch.arange(n_seen, n_seen + _count(batch))
        n_seen += len(index)
        if selection.mask is not None and bool((index >= len(selection.mask)).any()):
            n_seen = len(selection.mask) + 1
            break
        yield selection.select({site: vectors[site] for site in sites}, index)
    if selection.mask is None:
        return
    if divided:
        seen = parallel.concatenate({"n": torch.tensor([n_seen])}, "the number of samples seen")
        n_seen = int(seen["n"].sum())
    if n_seen != len(selection.mask):
        raise InputError(f"rows and weights must have a value for each sample, got {len(selection.mask)}.")
