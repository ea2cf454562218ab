"""What least squares keeps of samples, and the solution from it.

All fits minimise ``sum_s w_s ||A x_s - y_s||^2 + ridge ||A||^2`` (definitions, section 3), by default with
no weights, no intercept and no penalty; where the samples do not determine ``A``, the solution of least norm.
Everything is accumulated and solved in float64, whatever the samples' precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from matlens import parallel
from matlens.errors import InputError, NonNegativeInt, check_int, check_number, checked
from matlens.linear.maps import LinearMap
from matlens.linear.samples import NoisyFit, check_weights
from matlens.models.identity import Provenance
from matlens.numerics.precision import in_float64
from matlens.numerics.products import split_product

_WIDEST = 2**31  # coordinates of a vector; no model is near
_DOMINATED = 4  # error on other samples over that on the fit's own, from which most of it is noise
_ALONE = 1e-6  # of one less the leverage, below which a sample alone settles a direction
_BLOCK = 32  # samples whose errors are computed together, to take less memory than the fit
_EXACT = 1e-6  # error, in variances, below which a fit is exact but for rounding


@checked
class LeastSquares:
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
    split
        Whether products with the targets, which are most of the work, are sums of exact products in float32
        (`split_product`): quicker on a device that is slow in float64, and slower on all others.
    """

    def __init__(
        self, d_in: int, d_out: int, *, source: str = "x", target: str = "y", split: bool = False
    ) -> None:
        check_int(d_in, "d_in", min=1, max=_WIDEST)
        check_int(d_out, "d_out", min=1, max=_WIDEST)
        self.source, self.target, self.n, self.split = source, target, 0, split
        self._r = torch.zeros(0, d_in + 1, dtype=torch.float64)
        self._z = torch.zeros(0, d_out, dtype=torch.float64)

    def update(
        self,
        x: Float[Tensor, "n d_in"],
        y: Float[Tensor, "n d_out"] | Sequence[Tensor],
        *,
        weights: Float[Tensor, " n"] | None = None,
    ) -> Self:
        """Add samples.

        Parameters
        ----------
        x, y
            The samples; ``y`` may be several tensors that stand side by side.
        weights
            How much each sample counts, by default 1; a weight of 2 is the sample twice, and one of 0 leaves
            it out.

        Raises
        ------
        InputError
            Shapes do not fit, or a value is not finite, where the message names the site; or a weight is
            negative or not finite. Nothing is added then.
        """
        x, blocks = x.detach(), [block.detach() for block in ([y] if isinstance(y, Tensor) else y)]
        fits = all(block.ndim == 2 for block in (x, *blocks))
        shape = (
            sum(block.shape[-1] for block in blocks if block.ndim),
            {len(block) for block in blocks if fits},
        )
        if not fits or x.shape[1] + 1 != self._r.shape[1] or shape != (self._z.shape[1], {len(x)}):
            raise InputError(
                f"Samples x {list(x.shape)} and y {[list(block.shape) for block in blocks]} do not fit: "
                f"expected as many rows in each, and widths {self._r.shape[1] - 1} and {self._z.shape[1]}."
            )
        if weights is not None:
            of_rows = check_weights(weights, len(x)).sqrt()[:, None]
            kept = of_rows[:, 0] > 0
            x, blocks = x[kept.to(x.device)], [block[kept.to(block.device)] for block in blocks]
            if len(x):  # a weight is a factor on the squared error
                rows = _with_ones(x)
                roots = of_rows[kept].to(rows.device)
                blocks = [in_float64(block).to(rows.device) * roots for block in blocks]
                self._add(len(x), rows.mul_(roots), blocks)
        elif len(x):
            self._add(len(x), _with_ones(x), blocks)
        return self

    def merge(self, other: LeastSquares) -> Self:
        """Add the samples that another object has seen."""
        if (self.source, self.target) != (other.source, other.target):
            raise InputError(
                f"other must be LeastSquares of {self.source} -> {self.target}, got {other.source} -> "
                f"{other.target}."
            )
        if other.n:
            self._add(other.n, other._r, [other._z])
        return self

    @property
    def state(self) -> tuple[Float[Tensor, "rank d_in_and_1"], Float[Tensor, "rank d_out"]]:
        """The triangular factor ``R`` of ``[x 1]`` and ``Q^T y``, in float64: all there is of the samples."""
        return self._r, self._z

    @classmethod
    def from_state(
        cls,
        r: Float[Tensor, "rank d_in_and_1"],
        z: Float[Tensor, "rank d_out"],
        n: NonNegativeInt,
        *,
        source: str = "x",
        target: str = "y",
        split: bool = False,
    ) -> Self:
        """What another object, such as one of another process, has kept of ``n`` samples.

        Raises
        ------
        InputError
            The factors do not belong together, are not in float64, or hold a number that is not finite.
        """
        fits = r.ndim == z.ndim == 2 and len(r) == len(z) and r.shape[1] > 1 and z.shape[1] > 0
        if not fits or r.dtype != torch.float64 or z.dtype != torch.float64 or (len(r) > 0) != (n > 0):
            raise InputError(
                f"Factors {list(r.shape)} of {r.dtype} and {list(z.shape)} of {z.dtype} do not belong to {n} "
                "samples. Expected two of float64 with as many rows, as those of LeastSquares."
            )
        check_finite(r, source)
        check_finite(z, target)
        made = cls(r.shape[1] - 1, z.shape[1], source=source, target=target, split=split)
        made._r, made._z, made.n = r, z, n
        return made

    def tensors(self) -> dict[str, Tensor]:
        """What `from_tensors` makes the same object of, in another process."""
        return {"r": self._r, "z": self._z, "n": torch.tensor(self.n)}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], source: str, target: str, *, split: bool = False
    ) -> Self:
        """The object whose `tensors` these are."""
        return cls.from_state(
            tensors["r"], tensors["z"], int(tensors["n"]), source=source, target=target, split=split
        )

    def reduce(self, *, to_all: bool = False) -> Self:
        """The samples of all processes, in rank order: in the main process, or in all of them.

        Without ``to_all``, the other processes get their own samples back.
        """
        if parallel.world_size() == 1:
            return self
        name = f"{self.source} -> {self.target}"
        whole: Self | None = None
        for tensors in parallel.gather(self.tensors(), f"least squares of {name}"):
            part = self.from_tensors(tensors, self.source, self.target, split=self.split)
            whole = part if whole is None else whole.merge(part)
        whole = self if whole is None else whole
        if not to_all:
            return whole
        shared = parallel.broadcast_tensors(whole.tensors(), f"reduced least squares of {name}")
        return self.from_tensors(shared, self.source, self.target, split=self.split)

    def _add(self, n: int, rows: Tensor, blocks: list[Tensor]) -> None:
        held = len(self._r)
        q, r = torch.linalg.qr(torch.cat([self._r.to(rows.device), rows]) if held else rows)
        check_finite(r, self.source)
        z = torch.empty(len(r), self._z.shape[1], dtype=torch.float64, device=r.device)
        start = 0
        for block in blocks:
            columns = slice(start, start := start + block.shape[1])
            if self.split:
                z[:, columns] = split_product(q[held:], block.to(r.device))
            else:
                torch.matmul(q[held:].T, in_float64(block).to(r.device), out=z[:, columns])
            if held:
                z[:, columns] += q[:held].T @ self._z[:, columns].to(r.device)
        check_finite(z, self.target)
        self._r, self._z, self.n = r, z, self.n + n

    def solve(
        self, *, intercept: bool = False, ridge: float = 0.0, provenance: Provenance | None = None
    ) -> LinearMap:
        """Find the best map for what has been seen so far.

        Singular values below ``eps * max(n, d_in)`` of the largest count as zero, as in
        ``torch.linalg.lstsq(driver="gelsd")``. An intercept is not penalised by ``ridge``.

        Raises
        ------
        InputError
            There are no samples, or the ridge is negative or not finite.
        """
        weight, bias = self.solution(intercept=intercept, ridge=ridge)
        return LinearMap.from_solution(weight, bias, self.source, self.target, provenance)

    def solution(self, *, intercept: bool, ridge: float) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the best map in float64; the bias is ``None`` without an intercept."""
        ridge = check_ridge(ridge)
        if self.n == 0:
            raise InputError(
                f"No samples of {self.source} -> {self.target} have been seen, or none with a weight above 0."
            )
        width = self._r.shape[1] - 1
        if not intercept:
            return _least_norm(self._r[:width, :width], self._z[:width], self.n, ridge).T, None
        r, z = self._with_constant_first()
        # What centring leaves of a constant column is rounding of the column itself.
        floor = r[:, 1:].norm(dim=0).max()
        weight = _least_norm(r[1:, 1:], z[1:], self.n, ridge, floor=floor).T
        return weight, (z[0] - weight @ r[0, 1:]) / r[0, 0]

    def _with_constant_first(self) -> tuple[Tensor, Tensor]:
        """The factor of ``[1 x]``: the rows below the constant's own are that of the centred samples."""
        q, r = torch.linalg.qr(self._r.roll(1, 1))
        return r, q.T @ self._z

    def factors(self, *, centred: bool = False) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, "k d_out"]]:
        """``R`` and ``Q^T y`` of ``x = Q R``, in float64; of the centred samples where that is asked for.

        ``R^T R`` is ``X^T X``, and ``R^T Q^T y`` is ``X^T Y``, of rows times the roots of their weights.
        """
        width = self._r.shape[1] - 1
        if not centred:
            return self._r[:width, :width], self._z[:width]
        r, z = self._with_constant_first()
        return r[1:, 1:], z[1:]

    def means(self) -> tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"], float]:
        """Weighted means of ``x`` and ``y``, and the sum of the weights.

        Raises
        ------
        InputError
            There are no samples.
        """
        if self.n == 0:
            raise InputError(f"No samples of {self.source} -> {self.target} have been seen.")
        r, z = self._with_constant_first()
        return r[0, 1:] / r[0, 0], z[0] / r[0, 0], float(r[0, 0].square())


def noise_of_fit(
    moments: LeastSquares,
    samples: Iterable[tuple[Tensor, Sequence[Tensor], Tensor | None]],
    names: Sequence[str],
    *,
    intercept: bool,
) -> list[NoisyFit]:
    """Which targets are fitted so that their error on other samples is mostly the noise of the fit's own.

    With ``c = d_in / n`` and Gaussian samples, least squares leaves the error ``s (1 - c)`` on the samples
    that it is fitted on and ``s / (1 - c)`` on others, where ``s`` is the error that no linear map can avoid.
    So the part that the fit adds to ``s`` is the larger one if the error on others is more than four times
    that on its own samples: ``n < 2 d_in``. Real samples are not Gaussian, and rare tokens make it worse, so
    the error on others is measured: leave-one-out is the residual divided by one less the leverage.

    In SmolLM2-135M (576 dimensions) r2 of h.0 -> h.30 and of h.15 -> h.30, left out and on 1,000 other
    sentences: with 1,200 samples -1.35 and 0.15, others -1.05 and 0.22 (both are found); with 1,400 -0.46 and
    0.25, others -0.27 and 0.33 (the first is); with 2,000 0.08 and 0.41, others 0.16 and 0.45 (none is).

    Parameters
    ----------
    moments
        Of all samples.
    samples
        Some of these: ``x``, the targets in the order of the moments' columns, and weights, batch by batch.
    names
        What the fits are called.
    intercept
        Whether the fit has one.
    """
    n, d = moments.n, moments.state[0].shape[1] - 1
    if n <= d:
        return [NoisyFit(name, n, d) for name in names]
    r, z = moments.factors(centred=intercept)
    floor = moments.factors()[0].norm(dim=0).max() if intercept else None
    x_mean, y_mean, total = moments.means() if intercept else (r.new_zeros(d), z[0] * 0, torch.inf)
    white, basis = _whitening(r, n, floor=floor)
    if basis is not None:
        z = basis.T @ z
    # Of each target: its width, and sums over samples of the weights, y, y^2 and the squares of both errors.
    widths: list[int] = []
    sums = z.new_zeros(4, z.shape[1])
    weight = 0.0
    for x, targets, weights in samples:
        widths = [target.shape[1] for target in targets]
        for rows in torch.arange(len(x)).split(_BLOCK):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            w = r.new_ones(len(rows)) if weights is None else in_float64(weights[part]).to(r.device)
            h, *ys = (in_float64(of[part].detach()).to(r.device) for of in (x, *targets))
            y = torch.cat(ys, 1) - y_mean
            errors = _both_errors(h - x_mean, y, w, white, z, 1 / total)
            sums[0] += w @ y
            for of_sums, values in zip(sums[1:], (y, *errors), strict=True):
                of_sums += w @ values.square_()
            weight += float(w.sum())
    noisy = []
    spread = sums[1] - sums[0].square() / max(weight, 1e-300)
    for name, of_name in zip(names, torch.cat([sums[2:], spread[None]]).split(widths, 1), strict=True):
        residual, left_out, variance = of_name[:, of_name[2] > 0]
        fitted, other = float((residual / variance).mean()), float((left_out / variance).mean())
        if other > max(_DOMINATED * fitted, _EXACT):
            noisy.append(NoisyFit(name, n, d, 1 - other, 1 - fitted))
    return noisy


def _both_errors(
    x: Tensor, y: Tensor, weights: Tensor, white: Tensor, z: Tensor, constant: float
) -> tuple[Tensor, Tensor]:
    """Errors of samples by the map of all samples, and by that of all others."""
    turned = x @ white
    residual = y - turned @ z
    rest = 1 - weights * (constant + turned.square().sum(1))
    left_out = residual / rest.clamp(min=_ALONE)[:, None]
    # A sample that alone settles a direction has no residual; the limit of a vanishing ridge has an error.
    alone = rest < _ALONE
    if bool(alone.any()):
        toward = turned[alone] @ white.T
        left_out[alone] = toward @ (white @ z) / (weights[alone] * toward.square().sum(1))[:, None]
    return residual, left_out


def _with_ones(x: Tensor) -> Tensor:
    """``[x 1]`` in float64."""
    x = in_float64(x)
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def _least_norm(r: Tensor, z: Tensor, n: int, ridge: float, *, floor: Tensor | None = None) -> Tensor:
    """Solve ``min ||r a - z||^2 + ridge ||a||^2`` for the smallest ``a``.

    Singular values below ``eps * max(n, d)`` of the largest, or of ``floor``, count as zero.
    """
    level = torch.finfo(r.dtype).eps * max(n, r.shape[1])
    bounds = [r.norm()] if floor is None else [r.norm(), floor]
    if ridge == 0 and _inverse(r, level * torch.stack(bounds).max()) is not None:
        return torch.linalg.solve_triangular(r, z, upper=True)
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    least = level * torch.stack([s.max() if len(s) else r.norm(), *bounds[1:]]).max()
    u, s, vh = u[:, s > least], s[s > least], vh[s > least]
    return vh.T @ (u.T @ z).mul_((1 / (s + ridge / s))[:, None])


def _inverse(r: Tensor, level: Tensor) -> Tensor | None:
    """The inverse of a triangle if none of its singular values can be below a level, else ``None``."""
    if len(r) < r.shape[1]:
        return None
    inverse = torch.linalg.solve_triangular(r, torch.eye(len(r)).to(r), upper=True)
    # The smallest singular value is at least this.
    return inverse if bool(1 / inverse.norm() > level) else None


def _whitening(r: Tensor, n: int, *, floor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``W`` and ``B`` so that ``W W^T`` is the pseudo-inverse of ``r^T r``, and ``W B^T`` that of ``r``.

    ``B`` is ``None`` where it is the identity.
    """
    level = torch.finfo(r.dtype).eps * max(n, r.shape[1])
    bounds = [r.norm()] if floor is None else [r.norm(), floor]
    inverse = _inverse(r, level * torch.stack(bounds).max())
    if inverse is not None:
        return inverse, None
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    kept = s > level * torch.stack([s.max(), *bounds[1:]]).max()
    return vh[kept].T / s[kept], u[:, kept]


def check_ridge(ridge: Any) -> float:
    """Read the penalty of a fit: a finite number of at least 0."""
    return check_number(ridge, "The ridge penalty", min=0)


def check_finite(values: Tensor, name: str) -> None:
    """Refuse samples that a model has overflowed to."""
    # A sum is not finite if a term is not, and is quicker than looking at each. It may overflow itself.
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise InputError(
            f"The samples of {name} hold values that are not finite. A float16 model has probably "
            "overflowed: run it in bfloat16 or float32."
        )
