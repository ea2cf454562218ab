"""Least squares between sites, from samples that are at hand or that pass by once.

All fits minimise ``sum_s ||A x_s - y_s||^2 + ridge ||A||^2`` (definitions, section 3), by default with
no intercept and no penalty; where the samples do not determine ``A``, the solution of least norm.
Everything is accumulated and solved in float64, whatever the samples' precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from matlens.errors import InputError
from matlens.maps import LinearMap, site_name

Pair = tuple[str | int, str | int]
_CHUNK = 4096  # samples factorised at a time; never fewer than eight for each dimension
_KEPT = 4 << 30  # bytes of float64 copies that are kept rather than made again for every source


class Moments:
    """What least squares needs to know of samples ``(x, y)``, in memory that does not grow with them.

    Kept is not the matrix of second moments but its triangular square root: the factor ``R`` of
    ``[x 1] = QR``, and ``Q^T y``. Squaring would lose every direction of the stream that is a millionth
    as strong as the strongest, and streams have coordinates a thousand times larger than the rest.
    Parts merge into the whole by factorising their factors once more.

    Parameters
    ----------
    d_in, d_out
        Widths of ``x`` and ``y``.
    source, target
        What ``x`` and ``y`` are, for errors and for the map.
    """

    def __init__(self, d_in: int, d_out: int, *, source: str = "x", target: str = "y") -> None:
        self.source, self.target, self.n = source, target, 0
        self._r = torch.zeros(0, d_in + 1, dtype=torch.float64)
        self._z = torch.zeros(0, d_out, dtype=torch.float64)

    def update(self, x: Float[Tensor, "n d_in"], y: Float[Tensor, "n d_out"] | Sequence[Tensor]) -> Self:
        """Add samples; ``y`` may be several tensors that stand side by side.

        Raises
        ------
        InputError
            Shapes do not fit, or a value is not finite; the message names the site. Nothing is added
            then.
        """
        blocks = [y] if isinstance(y, Tensor) else list(y)
        shape = sum(block.shape[1] for block in blocks), {len(block) for block in blocks}
        if x.shape[1] + 1 != self._r.shape[1] or shape != (self._z.shape[1], {len(x)}):
            raise InputError(
                f"Samples x {list(x.shape)} and y {[list(block.shape) for block in blocks]} do not fit: "
                f"expected as many rows in each, and widths {self._r.shape[1] - 1} and {self._z.shape[1]}."
            )
        if len(x):
            ones = x.new_ones(len(x), 1, dtype=torch.float64)
            self._add(len(x), torch.cat([x.double(), ones], 1), blocks)
        return self

    def merge(self, other: Moments) -> Self:
        """Add the samples that another object has seen."""
        if (self.source, self.target) != (other.source, other.target):
            raise InputError(
                f"Moments of {other.source} -> {other.target} cannot be merged into those of "
                f"{self.source} -> {self.target}."
            )
        self._add(other.n, other._r, [other._z])
        return self

    def _add(self, n: int, rows: Tensor, blocks: list[Tensor]) -> None:
        held = len(self._r)
        q, r = torch.linalg.qr(torch.cat([self._r.to(rows.device), rows]) if held else rows)
        _require_finite(r, self.source)
        z = torch.empty(len(r), self._z.shape[1], dtype=torch.float64, device=r.device)
        start = 0
        for block in blocks:
            columns = slice(start, start := start + block.shape[1])
            torch.matmul(q[held:].T, block.double(), out=z[:, columns])
            if held:
                z[:, columns] += q[:held].T @ self._z[:, columns].to(r.device)
        _require_finite(z, self.target)
        self._r, self._z, self.n = r, z, self.n + n

    def solve(
        self, *, intercept: bool = False, ridge: float = 0.0, provenance: Mapping[str, Any] | None = None
    ) -> LinearMap:
        """Find the best map for what has been seen so far.

        Singular values below ``eps * max(n, d_in)`` of the largest count as zero, as in
        ``torch.linalg.lstsq(driver="gelsd")``. An intercept is not penalised by ``ridge``.
        """
        weight, bias = self.solution(intercept=intercept, ridge=ridge)
        return LinearMap.of(weight, bias, self.source, self.target, provenance)

    def solution(self, *, intercept: bool, ridge: float) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the best map in float64; the bias is ``None`` without an intercept."""
        if self.n == 0:
            raise InputError(f"No samples of {self.source} -> {self.target} have been seen.")
        width = self._r.shape[1] - 1
        if not intercept:
            return _least_norm(self._r[:width, :width], self._z[:width], self.n, ridge).T, None
        # With the constant in front, the rows below its own are the factor of the centred samples.
        q, r = torch.linalg.qr(self._r.roll(1, 1))
        z = q.T @ self._z
        # What centring leaves of a constant column is rounding of the column itself.
        floor = r[:, 1:].norm(dim=0).max()
        weight = _least_norm(r[1:, 1:], z[1:], self.n, ridge, floor=floor).T
        return weight, (z[0] - weight @ r[0, 1:]) / r[0, 0]


def _least_norm(r: Tensor, z: Tensor, n: int, ridge: float, *, floor: Tensor | None = None) -> Tensor:
    """Solve ``min ||r a - z||^2 + ridge ||a||^2`` for the smallest ``a``.

    Singular values below ``eps * max(n, d)`` of the largest, or of ``floor``, count as zero.
    """
    level = torch.finfo(r.dtype).eps * max(n, r.shape[1])
    bounds = [r.norm()] if floor is None else [r.norm(), floor]
    if ridge == 0 and len(r) == r.shape[1]:
        # The least singular value is no less than this, the largest no more than the norm: where that
        # settles that none counts as zero, the triangle is solved as it is.
        least = 1 / torch.linalg.solve_triangular(r, torch.eye(len(r)).to(r), upper=True).norm()
        if bool(least > level * torch.stack(bounds).max()):
            return torch.linalg.solve_triangular(r, z, upper=True)
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    least = level * torch.stack([s.max() if len(s) else r.norm(), *bounds[1:]]).max()
    u, s, vh = u[:, s > least], s[s > least], vh[s > least]
    return vh.T @ ((1 / (s + ridge / s))[:, None] * (u.T @ z))


def fit_samples(
    samples: Mapping[str, Float[Tensor, "n d"]],
    pairs: Sequence[Pair],
    *,
    intercept: bool = False,
    ridge: float = 0.0,
    provenance: Mapping[str, Any] | None = None,
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
    name = getattr(samples, "resolve", site_name)  # Activations know which layer is the last
    named = [(name(source), name(target)) for source, target in pairs]
    wanted = {site: samples[site] for pair in named for site in pair}
    for site, vectors in wanted.items():
        _require_finite(vectors, site)
    kept = _SideBySide(wanted)
    for source, targets in by_source(named).items():
        moments = _moments(wanted, source, targets)
        n, size = len(wanted[source]), _chunk_size(wanted[source])
        for start in range(0, n, size):
            rows = slice(start, start + size)
            moments.update(wanted[source][rows], kept.blocks(targets, rows))
        yield from _maps(moments, wanted, source, targets, intercept, ridge, provenance)


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


def fit_stream(
    batches: Iterable[Mapping[str, Float[Tensor, "n d"]]],
    pairs: Sequence[Pair],
    *,
    intercept: bool = False,
    ridge: float = 0.0,
    provenance: Mapping[str, Any] | None = None,
) -> Iterator[LinearMap]:
    """Fit the same maps from samples that pass by once and are not kept.

    ``batches`` are vectors by site, such as ``rows.vectors`` for the rows of `matlens.stream`; the other
    parameters are those of `fit_samples`.
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


def by_source(pairs: Sequence[tuple[Any, Any]]) -> dict[str, list[str]]:
    """Targets of each source, both in the order in which they first occur."""
    grouped: dict[str, list[str]] = {}
    for source, target in dict.fromkeys((site_name(a), site_name(b)) for a, b in pairs):
        grouped.setdefault(source, []).append(target)
    return grouped


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
    provenance: Mapping[str, Any] | None,
) -> Iterator[LinearMap]:
    weight, bias = moments.solution(intercept=intercept, ridge=ridge)
    widths = [example[target].shape[1] for target in targets]
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    for target, w, b in zip(targets, weight.split(widths), biases, strict=True):
        yield LinearMap.of(w, b, source, target, provenance)


def _chunk_size(x: Tensor) -> int:
    return max(_CHUNK, 8 * x.shape[1])


def _gathered(batches: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Join small batches: factorising the factor again costs as much as ``d_in`` more samples."""
    waiting: list[Mapping[str, Tensor]] = []

    def joined() -> dict[str, Tensor]:
        for site in waiting[0]:
            for part in waiting:
                _require_finite(part[site], site)
        return {site: torch.cat([part[site] for part in waiting]) for site in waiting[0]}

    for batch in batches:
        waiting.append(batch)
        sizes = [len(next(iter(part.values()))) for part in waiting]
        if sum(sizes) >= _chunk_size(next(iter(batch.values()))):
            yield joined()
            waiting = []
    if waiting:
        yield joined()


def _require_finite(values: Tensor, name: str) -> None:
    # A sum is not finite if a term is not, and is quicker than looking at each. It may overflow itself.
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise InputError(
            f"The samples of {name} hold values that are not finite. A float16 model has probably "
            "overflowed: run it in bfloat16 or float32."
        )
