"""Linearity scores of a part, from least squares of its input and output.

With ``x = Q R`` and ``Z = Q^T y`` of the centred vectors, the residual of the best affine map is the part of
``y`` outside the columns of ``Q``: all scores are functions of ``R``, ``Z`` and the factor of ``y``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from matlens import metrics, parallel
from matlens.errors import InputError
from matlens.linear.least_squares import LeastSquares
from matlens.linear.maps import LinearMap
from matlens.linearity.parts import Part
from matlens.models.identity import Provenance
from matlens.numerics import in_float64

R2, R2_OF_VARIANCE = "r2", "r2 of the variance"
PROCRUSTES, ROTATION, BOUND = "procrustes", "rotation", "nbl bound"
LINEAR = (R2, R2_OF_VARIANCE, PROCRUSTES, ROTATION)
"""Scores that are higher for more linear parts."""
SCORES = (*LINEAR, BOUND)

_ROUNDING = torch.finfo(torch.float32).eps


def fit_scores(
    r: Float[Tensor, "k d_in"], z: Float[Tensor, "k d_out"], r_y: Float[Tensor, "k_y d_out"], *, added: bool
) -> dict[str, float]:  # fmt: skip
    """Scores of a part on its training tokens, from factors of centered samples.

    ``procrustes`` is that of 2405.12250: for inputs and outputs centred and scaled to unit norm, 1 minus the
    squared error of the best linear map, which is the share of the total variance that an affine map
    explains. ``rotation`` is the same for the best scaled rotation, as in SciPy's ``procrustes``; NaN if
    widths differ. ``nbl bound`` is NBL's: the sum of ``1 - rho^2`` over canonical correlations ``rho``,
    for attention and FFN (``added``) those of the input with the sum of output and input, as in NBL's code
    with its option ``layer_drop_norm`` off; there ``r_y`` is the factor of ``x + y``.
    """
    of_x = float(r.square().sum())
    crossed = r.T @ z
    total = float(r_y.square().sum())
    if added:  # |y|^2 = |x + y|^2 - 2 <x, y> - |x|^2
        total -= 2 * float(crossed.trace()) + of_x
    explained = float(_projected(r, z).square().sum())
    rotation = math.nan
    if r.shape[1] == z.shape[1] and of_x * total > 0:
        rotation = float(torch.linalg.svdvals(crossed).sum()) ** 2 / (of_x * total)
    combined = z + r if added else z
    procrustes = explained / total if total > 0 else math.nan
    return {PROCRUSTES: procrustes, ROTATION: rotation, BOUND: _bound(r, combined, r_y)}


def _bound(r: Tensor, z: Tensor, r_y: Tensor) -> float:
    explained = _projected(r, z)
    if _is_regular(r_y):
        whitened = torch.linalg.solve_triangular(r_y, explained, upper=True, left=False)
        return max(0.0, r_y.shape[1] - float(whitened.square().sum()))
    _, s, vh = torch.linalg.svd(r_y, full_matrices=False)
    large = s > _level(s)
    whitened = explained @ (vh[large].T / s[large])
    return max(0.0, int(large.sum()) - float(whitened.square().sum()))


def _projected(r: Tensor, z: Tensor) -> Tensor:
    """``Q^T y`` without the directions of ``Q`` that ``x`` does not reach."""
    if _is_regular(r):
        return z
    u, s, _ = torch.linalg.svd(r, full_matrices=False)
    return u[:, s > _level(s)].T @ z


def _is_regular(r: Tensor) -> bool:
    """Whether no dimension is nearly dependent on earlier ones, so that no SVD is needed."""
    diagonal = r.diagonal().abs()
    floor = 100 * _ROUNDING * r.norm(dim=0)
    return len(r) == r.shape[1] and bool((diagonal > floor).all())


def _level(s: Tensor) -> float:
    """Singular values below this are rounding errors of float32 vectors."""
    return _ROUNDING * float(s.max() if len(s) else 0)


def held_out_scores(predicted: Float[Tensor, "n d"], truth: Float[Tensor, "n d"]) -> dict[str, float]:
    """r2 on held-out tokens: mean over dimensions, and of the total variance."""
    truth, predicted = in_float64(truth), in_float64(predicted)
    left = float((truth - predicted).square().sum())
    total = float((truth - truth.mean(0)).square().sum())
    return {R2: metrics.r2(predicted, truth), R2_OF_VARIANCE: 1 - left / total if total > 0 else math.nan}


class PartSums:
    """Least squares of many parts at once, with and without attention sinks.

    All targets of one source share a factor. ``same`` are sites with the same vectors as another, such as
    the input of a norm and the stream; only vectors of the others are needed.
    """

    def __init__(self, parts: Sequence[Part], width: int, same: Mapping[str, str] | None = None) -> None:
        self._width, self._same = width, same or {}
        self._ends = {part: (self._carrier(part.source), self._carrier(part.target)) for part in parts}
        # Sums by source site, with its targets; some sites only need their factor.
        self._fitted: dict[tuple[str, ...], list[Part]] = {}
        for part, (source, _) in self._ends.items():
            self._fitted.setdefault((source,), []).append(part)
        for part in parts:
            self._fitted.setdefault(self._written(part), [])
        self._sums = self._empty()
        self._sinks: list[Mapping[str, Tensor]] = []

    def _carrier(self, site: str) -> str:
        """Of the sites with the same vectors, the one whose vectors are needed."""
        return site if site not in self._same else self._carrier(self._same[site])

    def _written(self, part: Part) -> tuple[str, ...]:
        """The target of a part, with the source where it is added to the stream."""
        source, target = self._ends[part]
        return (target, source) if part.writes else (target,)

    @property
    def sites(self) -> list[str]:
        """Every site whose vectors are needed."""
        return list(dict.fromkeys(site for ends in self._ends.values() for site in ends))

    def _empty(self) -> dict[tuple[str, ...], LeastSquares]:
        return {
            sites: LeastSquares(
                self._width,
                {f"{part.target} of {part.name}": self._width for part in parts} or 1,
                source=sites[0],
            )
            for sites, parts in self._fitted.items()
        }

    def update(self, vectors: Mapping[str, Float[Tensor, "n d"]], sinks: Bool[Tensor, " n"]) -> None:
        """Add samples, with their mask of sinks."""
        self._add(self._sums, {site: of_site[~sinks] for site, of_site in vectors.items()})
        if bool(sinks.any()):
            self._sinks.append({site: of_site[sinks] for site, of_site in vectors.items()})

    def _add(self, sums: Mapping[tuple[str, ...], LeastSquares], vectors: Mapping[str, Tensor]) -> None:
        for sites, parts in self._fitted.items():
            x, *others = (vectors[site] for site in sites)
            x = sum(others, start=x)
            # Where nothing is fitted, the target is the first dimension itself.
            sums[sites].update(x, [vectors[self._ends[part][1]] for part in parts] or x[:, :1])

    def gather(self) -> None:
        """Add the samples of every other process, in the main one."""
        if parallel.world_size() > 1:
            self._sums = {sites: sums.reduce() for sites, sums in self._sums.items()}
            self._sinks = [parallel.concatenate(self._joined_sinks(), "vectors of sinks")]

    def _joined_sinks(self) -> dict[str, Tensor]:
        none = torch.empty(0, self._width, dtype=torch.float32)
        return {site: torch.cat([none, *(part[site] for part in self._sinks)]) for site in self.sites}

    def solve(self, provenance: Provenance) -> Iterator[tuple[Part, bool, LinearMap, dict[str, float]]]:
        """Each part's map with an intercept and its scores: without sinks (False), then with them (True).

        Raises InputError if there are fewer samples than a map has columns.
        """
        sinks = self._empty()
        self._add(sinks, self._joined_sinks())
        for with_sinks in (False, True):
            for sites, sums in self._sums.items():
                if with_sinks:
                    sums.merge(sinks[sites])
                if sums.n <= self._width:
                    raise InputError(
                        f"The text to fit on must have more than {self._width} tokens"
                        f"{'' if with_sinks else ' without sinks'}, best ten times as many, got {sums.n}."
                    )
            factors = {sites: sums.factors(centred=True) for sites, sums in self._sums.items()}
            for sites, parts in self._fitted.items():
                if not parts:
                    continue
                sums, (r, z) = self._sums[sites], factors[sites]
                details = provenance.with_details(n_fitted=sums.n, intercept=True, ridge=0.0)
                # LayerNorm's outputs add up to a constant but for rounding, which must not be fitted.
                weight, bias = sums.solution(intercept=True, ridge=_ROUNDING**2 * float(r.square().sum()))
                assert bias is not None
                columns = (weight.split(self._width), bias.split(self._width), z.split(self._width, 1))
                for part, of_weight, of_bias, of_z in zip(parts, *columns, strict=True):
                    linear = LinearMap.from_solution(of_weight, of_bias, *part.ends, details)
                    r_y, _ = factors[self._written(part)]
                    yield part, with_sinks, linear, fit_scores(r, of_z, r_y, added=part.writes)
