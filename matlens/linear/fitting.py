"""Maps between many pairs of sites at once, from samples in memory, in a folder or streamed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import parallel
from matlens.activations.activations import Activations, Rows
from matlens.errors import InputError, NonNegative, checked
from matlens.linear.least_squares import LeastSquares, NoisyFit, check_weights, noise_of_fit, warn_of_noise
from matlens.linear.maps import LinearMap, tensor_digest
from matlens.linear.pairs import Pair, by_source, check_collected, list_pairs
from matlens.models.identity import Provenance
from matlens.models.sites import Site, check_finite
from matlens.numerics import check_float64_device, in_float64, return_freed_memory
from matlens.parallel import Bar

_CHUNK = 4096  # samples factorised at a time; never fewer than eight for each dimension
N_HELD_OUT = 256  # samples that leave-one-out looks at
_COMPARED, _ALIKE = 16, 1e-2  # samples that processes compare, and by how much of the largest they may differ
CONVERTED_BYTES = 4 << 30  # of float64 copies that are made once, and not for every source


Batch = tuple[Mapping[str, Tensor], Tensor | None]
"""Vectors by site, and their weights."""


def fitting_bar(maps: Iterable[LinearMap], n: int, *, progress: bool) -> Bar:
    """Maps as they are fitted, with a progress bar."""
    return Bar(maps, total=n, desc="fitting", unit="map", disable=not progress)


def chunk_size(width: int) -> int:
    """How many samples of a width are factorised at a time: the factor is factorised again each time."""
    return max(_CHUNK, 8 * width)


@dataclass(frozen=True)
class Selection:
    """Which of all samples are fitted on, and how much each counts."""

    mask: Bool[Tensor, " n"]  # true for those with a weight above 0
    weights: Float[Tensor, " n"] | None  # in float64; None where all count the same

    @classmethod
    def parse(cls, rows: Tensor | None, weights: Tensor | None, n: int) -> Selection | None:
        """Check ``rows`` and ``weights`` of ``n`` samples; ``None`` if neither is given."""
        if rows is None and weights is None:
            return None
        mask = torch.ones(n, dtype=torch.bool) if rows is None else rows.cpu()
        if len(mask) != n:
            raise InputError(f"rows must have a value for each of the {n} samples, got {len(mask)}.")
        if weights is not None:
            weights = check_weights(weights, n).cpu()
            mask = mask & (weights > 0)
        if not bool(mask.any()):
            raise InputError("rows and weights must select at least one sample, got none.")
        return cls(mask, weights)

    @property
    def n(self) -> int:
        """How many samples are fitted on."""
        return int(self.mask.sum())

    @property
    def details(self) -> dict[str, str]:
        """Samples and weights of a fit, for its provenance."""
        weights = {} if self.weights is None else {"weights": tensor_digest(self.weights[self.mask])}
        return {"rows": tensor_digest(self.mask)} | weights

    def part(self, index: Any) -> Selection:
        """The same of some of the samples, by their index or a mask."""
        return Selection(self.mask[index], None if self.weights is None else self.weights[index])


def select(vectors: Mapping[str, Tensor], selection: Selection | None, index: Any = slice(None)) -> Batch:
    """The selected ones of vectors of the samples ``index``, and their weights."""
    if selection is None:
        return vectors, None
    part = selection.part(index)
    selected = {site: of_site[part.mask.to(of_site.device)] for site, of_site in vectors.items()}
    return selected, None if part.weights is None else part.weights[part.mask]


class PairFits:
    """`LeastSquares` by source; small batches wait until they are worth a factorisation.

    About ``n_sampled`` of the samples are kept for leave-one-out: of the first ones or, if there will be
    ``n_all``, of all.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        widths: Mapping[str, int],
        *,
        n_sampled: int = 0,
        n_all: int = 0,
        norms: bool = False,
        split: bool = False,
    ) -> None:
        self.targets, self._pairs = by_source(pairs), pairs
        self.sites = list(dict.fromkeys(itertools.chain(*pairs)))
        self._fits: dict[str, LeastSquares] = {}
        for source, targets in self.targets.items():
            d_out = {target: widths[target] for target in targets}
            self._fits[source] = LeastSquares(widths[source], d_out, source=source, norms=norms, split=split)
        self._waiting: list[tuple[dict[str, Tensor], Tensor | None]] = []
        self._sample: list[Batch] = []
        self._n_unsampled, self._n_seen = n_sampled, 0
        self._step = -(-n_all // n_sampled) if n_sampled else 0  # 0 where it is unknown

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

    def update(self, vectors: Mapping[str, Tensor], weights: Tensor | None = None) -> None:
        """Add samples."""
        check_collected(self._pairs, vectors)
        own = {site: vectors[site] for site in self.sites}
        n = len(own[self.sites[0]])
        if not n:
            return
        if self._n_unsampled > 0:
            start = -self._n_seen % self._step if self._step else 0
            few = slice(start, None, self._step or -(-n // self._n_unsampled))
            # Copies: a slice would keep the whole batch in memory.
            part = {site: of_site[few].clone() for site, of_site in own.items()}
            self._sample.append((part, None if weights is None else weights[few]))
            self._n_unsampled -= len(part[self.sites[0]])
        self._n_seen += n
        self._waiting.append((own, weights))
        if sum(len(part[self.sites[0]]) for part, _ in self._waiting) >= chunk_size(
            own[self.sites[0]].shape[1]
        ):
            self._flush()

    def reduce(self) -> None:
        """Merge the samples of all processes in the main one; the others have none then."""
        for source in self._fits:
            self._fits[source] = self[source].reduce()

    def solve(
        self,
        *,
        intercept: bool,
        ridge: float,
        provenance: Provenance | None,
        divided: bool,
        noisy: list[NoisyFit],
    ) -> Iterator[LinearMap]:
        """Maps source by source; if the samples were ``divided``, all processes get those of the main one.

        Fits that follow noise are added to ``noisy``.
        """
        for source, targets in self.targets.items():
            maps = {}
            if parallel.is_main() or not divided:
                fit = self[source]
                if not ridge:
                    samples = [(part[source], [part[t] for t in targets], w) for part, w in self._sample]
                    names = [f"{source} -> {target}" for target in targets]
                    noisy += noise_of_fit(fit, samples, names, intercept=intercept)
                maps = fit.solve(intercept=intercept, ridge=ridge, provenance=provenance)
            for target in targets:
                yield maps.pop(target) if not divided else _of_main(maps, source, target, provenance)

    def _flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        weighed = [weights for _, weights in waiting if weights is not None]
        weights = _cat(weighed) if weighed else None
        last_use = {site: source for source, targets in self.targets.items() for site in (source, *targets)}
        joined: dict[str, Tensor] = {}
        for source, targets in self.targets.items():
            # No site is there twice, nor longer than it is needed: together they are most of the memory.
            for site in (source, *targets):
                if site not in joined:
                    joined[site] = _cat([part.pop(site) for part, _ in waiting])
            self._fits[source].update(joined[source], [joined[target] for target in targets], weights=weights)
            for site in [site for site in joined if last_use[site] == source]:
                del joined[site]
        return_freed_memory()


def _of_main(
    maps: dict[str, LinearMap], source: str, target: str, provenance: Provenance | None
) -> LinearMap:
    """A map that the main process has solved, in every process."""
    if parallel.world_size() == 1:
        return maps.pop(target)
    parts = maps.pop(target).parts if parallel.is_main() else {}
    parts = parallel.broadcast_tensors(parts, f"map {source} -> {target}")
    return LinearMap(parts["weight"], parts.get("bias"), source, target, provenance or Provenance())


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
) -> Iterator[LinearMap]:
    """Fit a map for each ``(source, target)``; one factorisation serves all targets of a source.

    Yields the maps source by source, so that a caller who writes them never has them all. Fits without a
    ridge that overfit their samples issue one `InputWarning` at the end.

    Parameters
    ----------
    samples
        `Activations`, whose rows distributed processes divide, or vectors by site; row ``s`` of every site
        belongs to the same token.
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
    """
    device = None if device is None else check_float64_device(device)
    resolve = getattr(samples, "resolve", Site.parse)  # Activations know which layer is the last
    named = [(str(resolve(source)), str(resolve(target))) for source, target in list_pairs(pairs)]
    check_collected(named, samples)
    sites = list(dict.fromkeys(itertools.chain(*named)))
    n = samples.n_rows if isinstance(samples, Activations) else len(samples[sites[0]])
    selection = Selection.parse(rows, weights, n)
    if provenance is None and isinstance(samples, Activations):
        n_fitted = n if selection is None else selection.n
        provenance = _with_options(samples.provenance, selection, intercept=intercept, ridge=ridge)
        provenance = provenance.with_details(n_fitted=n_fitted)
    divided, origin = isinstance(samples, Activations), None
    if isinstance(samples, Activations):
        widths, origin = {site: samples.width(site) for site in sites}, samples.provenance.to_json()
    else:
        widths = {site: samples[site].shape[1] for site in sites}
        if len(counts := {len(samples[site]) for site in sites}) > 1:
            raise InputError(f"All sites must have the same number of samples, got {sorted(counts)}.")
    details = None if selection is None else selection.details
    parallel.check_same([origin, named, n, intercept, ridge, details], "fitting")
    if parallel.world_size() > 1 and n:
        given = next(samples.shards(sites)).vectors if isinstance(samples, Activations) else samples
        _check_same_samples({site: given[site] for site in sites})

    def read(some: list[str]) -> Iterator[Batch]:
        if isinstance(samples, Activations):
            parts: Iterable[Any] = samples.shards(some, divided=True, device=device)
        else:
            own = {site: samples[site] for site in some}
            parts = (part for part, _ in _chunks(own, None, chunk_size(widths[some[0]]), device))
        return _selected(parts, selection, n, provenance, divided=divided)

    home = "cpu" if isinstance(samples, Activations) else samples[sites[0]].device
    # Few samples are converted once, and not for every source.
    are_converted = device is None and 8 * n * sum(widths.values()) <= CONVERTED_BYTES
    stored = _joined(read(sites)) if are_converted else None
    noisy: list[NoisyFit] = []
    n_own = (n if selection is None else selection.n) // (parallel.world_size() if divided else 1)
    for source, targets in by_source(named).items():
        n_sampled = 0 if ridge else N_HELD_OUT
        pairs_of_source = [(source, target) for target in targets]
        fits = PairFits(pairs_of_source, widths, n_sampled=n_sampled, n_all=n_own, split=split)
        batches: Iterable[Batch] = () if are_converted else read([source, *targets])
        for batch in _chunks(*stored, chunk_size(widths[source])) if stored else batches:
            fits.update(*batch)
        if divided:
            fits.reduce()
        for linear in fits.solve(
            intercept=intercept, ridge=ridge, provenance=provenance, divided=divided, noisy=noisy
        ):
            yield linear if device is None else linear.to(home)
    warn_of_noise(noisy, len(named))


def _check_same_samples(samples: Mapping[str, Tensor]) -> None:
    """Raise InputError if processes were given different samples, by some of them."""
    n = len(next(iter(samples.values())))
    few = torch.linspace(0, n - 1, min(n, _COMPARED)).long()
    ours = {site: of_site.detach()[few.to(of_site.device)].cpu() for site, of_site in samples.items()}
    theirs = parallel.broadcast_tensors(ours, "some of the samples")
    for site, values in ours.items():
        # Each may have run the model itself, where sums are taken in another order.
        slack = _ALIKE * float(theirs[site].abs().max())
        if values.shape != theirs[site].shape or bool(((values - theirs[site]).abs() > slack).any()):
            raise InputError(
                f"The samples of {site} must be the same in all processes, and differ in process "
                f"{parallel.rank()}. Use fit_stream(..., divided=True) for samples of each process."
            )


def _joined(batches: Iterable[Batch]) -> Batch | None:
    """All samples in float64, None if there are none."""
    parts = list(batches)
    if not parts:
        return None
    weights = [of_part for _, of_part in parts if of_part is not None]
    vectors = {site: _cat([in_float64(part[site]) for part, _ in parts]) for site in parts[0][0]}
    return vectors, _cat(weights) if weights else None


def _cat(parts: list[Tensor]) -> Tensor:
    """All parts in one tensor; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _chunks(
    vectors: Mapping[str, Tensor], weights: Tensor | None, size: int, device: torch.device | None = None
) -> Iterator[Batch]:
    """The samples part by part, on a device if one is given."""
    for start in range(0, len(next(iter(vectors.values()))), size):
        part = slice(start, start + size)
        of_sites = {site: of_site.detach()[part].to(device) for site, of_site in vectors.items()}
        yield of_sites, None if weights is None else weights[part]


def _with_options(provenance: Provenance, selection: Selection | None, **options: Any) -> Provenance:
    """The provenance of maps that are fitted on some samples with these options."""
    return provenance.with_details(**options, **({} if selection is None else selection.details))


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
    named = [(str(Site.parse(source)), str(Site.parse(target))) for source, target in list_pairs(pairs)]
    expected = next((len(given) for given in (rows, weights) if given is not None), None)
    selection = Selection.parse(rows, weights, expected or 0)
    batches = iter(batches)
    first = list(itertools.islice(batches, 1))
    widths = {site: of_site.shape[1] for batch in first for site, of_site in _vectors_of(batch).items()}
    if divided:
        widths = parallel.broadcast(widths, "widths of the samples")
    if not widths:
        raise InputError("batches must have at least one sample to fit maps on, got none.")
    check_collected(named, widths)
    count = provenance is None
    if count and first and isinstance(first[0], Rows):
        provenance = _with_options(first[0].provenance, selection, intercept=intercept, ridge=ridge)
    fits = PairFits(named, widths, n_sampled=0 if ridge else N_HELD_OUT, split=split)
    batches = itertools.chain(first, batches)
    for batch in _selected(batches, selection, expected, provenance, divided=divided):
        fits.update(*batch)
    if divided:
        fits.reduce()
    if count:  # in processes without a batch too, which have no provenance
        n = parallel.broadcast(fits.n, "the number of samples") if divided else fits.n
        provenance = None if provenance is None else provenance.with_details(n_fitted=n)
    noisy: list[NoisyFit] = []
    yield from fits.solve(
        intercept=intercept, ridge=ridge, provenance=provenance, divided=divided, noisy=noisy
    )
    warn_of_noise(noisy, len(named))


def _vectors_of(batch: Rows | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return batch.vectors if isinstance(batch, Rows) else batch


def _selected(
    batches: Iterable[Rows | Mapping[str, Tensor]],
    selection: Selection | None,
    expected: int | None,
    provenance: Provenance | None,
    *,
    divided: bool,
) -> Iterator[Batch]:
    """Vectors of the selected samples and their weights, batch by batch."""
    seen = 0
    for batch in batches:
        vectors = _vectors_of(batch)
        if parallel.world_size() > 1 and getattr(batch, "divided", divided) != divided:
            raise InputError(
                f"divided must be {not divided} for these batches, got {divided}: stream and fit_stream must "
                "have the same divided."
            )
        if isinstance(batch, Rows) and provenance is not None and provenance.model is not None:
            provenance.check_same(batch.provenance, ours="the provenance", theirs="the vectors")
        count = len(next(iter(vectors.values()), ()))
        if not count:
            continue
        index = torch.as_tensor(batch.index) if isinstance(batch, Rows) else torch.arange(seen, seen + count)
        seen += count
        if selection is not None and int(index.max()) >= len(selection.mask):
            break
        selected, of_selected = select(vectors, selection, index)
        for site, of_site in selected.items():
            check_finite(of_site, site)
        yield selected, of_selected
    if divided and expected is not None:
        of_ranks = parallel.concatenate({"seen": torch.tensor([seen])}, "the number of samples seen")
        seen = int(of_ranks["seen"].sum())
    if expected not in (None, seen):
        raise InputError(f"rows and weights must have a value for each sample, got {expected}.")
