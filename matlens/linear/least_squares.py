"""Least squares from sufficient statistics that are updated, merged and solved.

All fits minimize ``sum_s w_s ||A x_s - y_s||^2 + ridge ||A||^2``, by default with
no weights, no intercept and no penalty; where the samples do not determine ``A``, the solution of least norm.
Everything is accumulated and solved in float64, for any precision of the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from matlens import parallel
from matlens.errors import Between, InputError, NonNegative, checked, short, warn
from matlens.linear.maps import LinearMap
from matlens.models.identity import Provenance
from matlens.models.sites import check_finite
from matlens.numerics import in_float64, split_product

ENOUGH = 2  # samples per dimension; with fewer, least squares follows the noise of Gaussian samples
_Width = Annotated[int, Between(1, 2**31)]
_DOMINATED = 4  # ratio of held-out to training error above which most of the error is noise
_ALONE = 1e-6  # of one less the leverage, below which a sample alone settles a direction
_BLOCK = 32  # samples whose errors are computed together, to take less memory than the fit
_EXACT = 1e-6  # error, in variances, below which a fit is exact but for rounding


@checked
class LeastSquares:
    """Sufficient statistics of a source and its targets, in constant memory.

    They are not the second moments but their triangular square root: the factor ``R`` of ``[x 1] = QR``, and
    ``Q^T y``. Squaring would lose every direction that is a millionth as strong as the strongest, and
    residual streams have dimensions a thousand times larger than the rest. Two of them are merged by
    factorising both factors together.

    Parameters
    ----------
    d_in
        Width of ``x``.
    d_out
        Width of ``y``, or the width of each target by name, in the order of their columns in ``y``.
    source
        Name of ``x``, for errors and maps.
    split
        Compute products with the targets, which are most of the work, as sums of exact products in float32
        (`split_product`): faster on a device that is slow in float64, and slower on all others.
    norms
        Also store the squared norm of each ``x``, to choose a ridge for few samples.
    """

    def __init__(
        self,
        d_in: _Width,
        d_out: _Width | Mapping[str, int],
        *,
        source: str = "x",
        split: bool = False,
        norms: bool = False,
    ) -> None:
        self.targets = {"y": d_out} if isinstance(d_out, int) else dict(d_out)
        self.source, self.split, self.n = source, split, 0
        self._r = torch.zeros(0, d_in + 1, dtype=torch.float64)
        self._z = torch.zeros(0, sum(self.targets.values()), dtype=torch.float64)
        self.norms = torch.zeros(0, dtype=torch.float64) if norms else None

    @property
    def name(self) -> str:
        """The source and the targets, for messages."""
        return f"{self.source} -> {', '.join(self.targets)}"

    def update(
        self,
        x: Float[Tensor, "n d_in"],
        y: Float[Tensor, "n d_out"] | Sequence[Tensor],
        *,
        weights: Float[Tensor, " n"] | None = None,
    ) -> Self:
        """Add samples, or none if an error is raised.

        Parameters
        ----------
        x, y
            The samples; ``y`` may be several tensors whose columns follow each other.
        weights
            How much each sample counts, by default 1; a weight of 2 is the sample twice, and one of 0 is no
            sample.

        Raises
        ------
        InputError
            A value is not finite, where the message names the site, or a weight is negative.
        """
        x, blocks = x.detach(), [block.detach() for block in ([y] if isinstance(y, Tensor) else y)]
        d_in, d_out = self._r.shape[1] - 1, self._z.shape[1]
        matrices = all(block.ndim == 2 and len(block) == len(x) for block in (x, *blocks))
        if not matrices or x.shape[1] != d_in or sum(block.shape[1] for block in blocks) != d_out:
            raise InputError(
                f"x must be [n, {d_in}] and y [n, {d_out}], got {list(x.shape)} and "
                f"{', '.join(str(list(block.shape)) for block in blocks)}."
            )
        root = None
        if weights is not None:
            weights = check_weights(weights, len(x))
            used = weights > 0
            root = weights[used].sqrt()[:, None]  # a weight is a factor on the squared error
            x, blocks = x[used.to(x.device)], [block[used.to(block.device)] for block in blocks]
        if not len(x):
            return self
        x = in_float64(x)
        norms = None if self.norms is None else x.square().sum(1).cpu()
        rows = torch.cat([x, x.new_ones(len(x), 1)], 1)
        n = len(x)
        del x
        if root is not None:
            root = root.to(rows.device)
            rows, blocks = rows.mul_(root), [in_float64(block).to(rows.device) * root for block in blocks]
        self._add(n, rows, blocks, norms)
        return self

    def merge(self, other: LeastSquares) -> Self:
        """Add the samples of another object, of the same source and targets."""
        if (self.source, [*self.targets.items()]) != (other.source, [*other.targets.items()]):
            raise InputError(f"other must be of {self.name}, got one of {other.name}.")
        if (self.norms is None) != (other.norms is None):
            raise InputError("Both statistics must have norms, or neither.")
        if other.n:
            self._add(other.n, other._r, [other._z], other.norms)
        return self

    def tensors(self) -> dict[str, Tensor]:
        """All statistics, for `from_tensors`: ``r``, ``z``, ``n`` and maybe ``norms``."""
        tensors = {"r": self._r, "z": self._z, "n": torch.tensor(self.n)}
        return tensors if self.norms is None else tensors | {"norms": self.norms}

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        targets: Mapping[str, int] | None = None,
        *,
        source: str = "x",
        split: bool = False,
    ) -> Self:
        """The object with these `tensors`."""
        r, z = tensors["r"], tensors["z"]
        made = cls(r.shape[1] - 1, targets or z.shape[1], source=source, split=split)
        check_finite(r, source)
        check_finite(z, made.name)
        made._r, made._z, made.n, made.norms = r, z, int(tensors["n"]), tensors.get("norms")
        return made

    def reduce(self, *, to_all: bool = False) -> Self:
        """The samples of all processes, merged in rank order, in the main process or ``to_all``.

        The other processes have none then.
        """
        if parallel.world_size() == 1:
            return self
        what = f"least squares of {self.name}"
        gathered = parallel.gather(self.tensors(), what)
        whole = self
        if not parallel.is_main():
            d_in, norms = self._r.shape[1] - 1, self.norms is not None
            whole = type(self)(d_in, self.targets, source=self.source, split=self.split, norms=norms)
        for tensors in gathered[1:]:  # the first are the main process's own
            whole.merge(self._like(tensors))
        return self._like(parallel.broadcast_tensors(whole.tensors(), what)) if to_all else whole

    def _like(self, tensors: Mapping[str, Tensor]) -> Self:
        return self.from_tensors(tensors, self.targets, source=self.source, split=self.split)

    def _add(self, n: int, rows: Tensor, blocks: list[Tensor], norms: Tensor | None) -> None:
        n_old = len(self._r)
        q, r = torch.linalg.qr(torch.cat([self._r.to(rows.device), rows]) if n_old else rows)
        check_finite(r, self.source)
        z = torch.empty(len(r), self._z.shape[1], dtype=torch.float64, device=r.device)
        start = 0
        for block in blocks:
            columns = slice(start, start := start + block.shape[1])
            if self.split:
                z[:, columns] = split_product(q[n_old:], block.to(r.device))
            else:
                torch.matmul(q[n_old:].T, in_float64(block).to(r.device), out=z[:, columns])
            if n_old:
                z[:, columns] += q[:n_old].T @ self._z[:, columns].to(r.device)
        check_finite(z, ", ".join(self.targets))
        self._r, self._z, self.n = r, z, self.n + n
        if self.norms is not None and norms is not None:
            self.norms = torch.cat([self.norms, norms])

    def solve(
        self,
        *,
        intercept: bool = False,
        ridge: NonNegative = 0.0,
        targets: Sequence[str] | None = None,
        provenance: Provenance | None = None,
    ) -> dict[str, LinearMap]:
        """The best map onto each target, or onto some of them, for the samples so far, in float32.

        Singular values below ``eps * max(n, d_in)`` of the largest count as zero, as in
        ``torch.linalg.lstsq(driver="gelsd")``. An intercept is not penalised by ``ridge``.
        """
        weight, bias = self.solution(intercept=intercept, ridge=ridge)
        maps, widths = {}, list(self.targets.values())
        biases = [None] * len(widths) if bias is None else bias.split(widths)
        for target, of_target, b in zip(self.targets, weight.split(widths), biases, strict=True):
            if targets is None or target in targets:
                maps[target] = LinearMap.from_solution(of_target, b, self.source, target, provenance)
        return maps

    def solution(
        self, *, intercept: bool, ridge: NonNegative
    ) -> tuple[Float[Tensor, "d_out d_in"], Float[Tensor, " d_out"] | None]:
        """Weight and bias of the best map in float64; the bias is ``None`` without an intercept."""
        self._check_samples()
        if not intercept:
            r, z = self.factors()
            return _least_norm(r, z, self.n, ridge).T, None
        r, z = self._with_constant_first()
        weight = _least_norm(r[1:, 1:], z[1:], self.n, ridge, floor=_rounding_of(r[:, 1:])).T
        return weight, (z[0] - weight @ r[0, 1:]) / r[0, 0]

    def _check_samples(self) -> None:
        if self.n == 0:
            raise InputError(f"{self.name} must have at least one sample with a weight above 0, got none.")

    def _with_constant_first(self) -> tuple[Tensor, Tensor]:
        """The factor of ``[1 x]``: the rows below the constant's own are that of the centred samples."""
        q, r = torch.linalg.qr(self._r.roll(1, 1))
        return r, q.T @ self._z

    def factors(self, *, centred: bool = False) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, "k d_out"]]:
        """``R`` and ``Q^T y`` of ``x = Q R``, in float64, or of the centred samples.

        ``R^T R`` is ``X^T X``, and ``R^T Q^T y`` is ``X^T Y``, of rows times the roots of their weights.
        """
        width = self._r.shape[1] - 1
        if not centred:
            return self._r[:width, :width], self._z[:width]
        r, z = self._with_constant_first()
        return r[1:, 1:], z[1:]

    def means(self) -> tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"], float]:
        """Weighted means of ``x`` and ``y``, and the sum of the weights."""
        self._check_samples()
        r, z = self._with_constant_first()
        return r[0, 1:] / r[0, 0], z[0] / r[0, 0], float(r[0, 0].square())


def check_weights(weights: Tensor, n: int) -> Float[Tensor, " n"]:
    """Weights of ``n`` samples in float64; raises InputError unless they are finite and >= 0."""
    if len(weights) != n or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise InputError(
            f"weights must be finite numbers of at least 0 for the {n} samples, got {short(weights)}."
        )
    return in_float64(weights.detach())


class NoisyFit(NamedTuple):
    """A fit whose error on other samples is mostly noise of those that it was fitted on.

    ``r2`` is on samples excluded from the fit, and ``r2_fitted`` on the same samples in it; ``None`` where
    there are no more samples than dimensions.
    """

    name: str
    n: int
    width: int
    r2: float | None = None
    r2_fitted: float | None = None


def noise_of_fit(
    state: LeastSquares,
    samples: Iterable[tuple[Tensor, Sequence[Tensor], Tensor | None]],
    names: Sequence[str],
    *,
    intercept: bool,
) -> list[NoisyFit]:
    """Targets whose error on other samples is mostly noise of the fit.

    With ``c = d_in / n`` and Gaussian samples, least squares leaves the error ``s (1 - c)`` on the samples
    that it is fitted on and ``s / (1 - c)`` on others, where ``s`` is the error that no linear map can avoid.
    So the part that the fit adds to ``s`` is the larger one if the error on others is more than four times
    that on its own samples: ``n < 2 d_in``. Real samples are not Gaussian, and rare tokens make it worse, so
    the error on others is measured: leave-one-out is the residual divided by one less the leverage. It looks
    at some ``samples`` of those in ``state``: ``x``, the targets in their order, and weights.
    """
    n, d = state.n, state.factors()[0].shape[1]
    if n <= d:
        return [NoisyFit(name, n, d) for name in names]
    r, z = state.factors(centred=intercept)
    floor = _rounding_of(state.factors()[0]) if intercept else 0.0
    x_mean, y_mean, total = state.means() if intercept else (r.new_zeros(d), z[0] * 0, torch.inf)
    white, z = _whitened(r, z, n, floor)
    parts = []
    for x, targets, weights in samples:
        rotated = (in_float64(x.detach()).to(r.device) - x_mean) @ white
        w = r.new_ones(len(x)) if weights is None else in_float64(weights).to(r.device)
        rest = 1 - w * (1 / total + rotated.square().sum(1))  # one less the leverage
        parts.append((rotated, rest, w, targets))
    # No error grows by more than 1 / rest^2.
    if all(bool((rest.square() >= 1 / _DOMINATED).all()) for _, rest, *_ in parts):
        return []
    # Of each target dimension: sums over samples of y, y^2, and the squares of both errors.
    sums, weight = z.new_zeros(4, z.shape[1]), 0.0
    for rotated, rest, w, targets in parts:
        for block in torch.arange(len(w)).split(_BLOCK):
            y = torch.cat([in_float64(of[block].detach()).to(r.device) for of in targets], 1) - y_mean
            errors = _both_errors(rotated[block], rest[block], y, w[block], white, z)
            sums[0] += w[block] @ y
            for of_sums, values in zip(sums[1:], (y, *errors), strict=True):
                of_sums += w[block] @ values.square_()
        weight += float(w.sum())
    noisy = []
    spread = sums[1] - sums[0].square() / max(weight, 1e-300)
    by_target = torch.cat([sums[2:], spread[None]]).split(list(state.targets.values()), 1)
    for name, of_name in zip(names, by_target, strict=True):
        residual, held_out, variance = of_name[:, of_name[2] > 0]
        fitted, other = float((residual / variance).mean()), float((held_out / variance).mean())
        if other > max(_DOMINATED * fitted, _EXACT):
            noisy.append(NoisyFit(name, n, d, 1 - other, 1 - fitted))
    return noisy


def _both_errors(
    rotated: Tensor, rest: Tensor, y: Tensor, weights: Tensor, white: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    """Errors of samples by the map of all samples, and by that of all others."""
    residual = y - rotated @ z
    held_out = residual / rest.clamp(min=_ALONE)[:, None]
    # A sample that alone settles a direction has no residual; the limit of a vanishing ridge has an error.
    alone = rest < _ALONE
    if bool(alone.any()):
        toward = rotated[alone] @ white.T
        held_out[alone] = toward @ (white @ z) / (weights[alone] * toward.square().sum(1))[:, None]
    return residual, held_out


def are_few(n_samples: int, width: int) -> bool:
    """Whether samples are fewer than twice the width, so a fit needs a penalty."""
    return n_samples < ENOUGH * width


def warn_of_noise(fits: Sequence[NoisyFit], n_fits: int) -> None:
    """Issue one `InputWarning` for all fits of a call that overfit their samples."""
    if not fits:
        return
    worst = min(fits, key=lambda fit: -torch.inf if fit.r2 is None else fit.r2)
    if worst.r2 is None:
        what = (
            f"Maps of {worst.width:,} dimensions must have at least {ENOUGH * worst.width:,} samples, got "
            f"{worst.n:,}: with so few, most of their error on other samples is noise."
        )
    else:
        what = (
            f"{len(fits)} of {n_fits} fits on {worst.n:,} samples in {worst.width:,} dimensions mostly "
            f"follow noise: r2 of {worst.name} is {worst.r2:.2f} on samples excluded from the fit, and "
            f"{worst.r2_fitted:.2f} on the same samples in it."
        )
    warn(f"{what} Use more samples or a ridge.")


# Which singular values count: those above ``eps * max(n, d)`` of the largest, as gelsd has it.


def _rounding_of(r: Tensor) -> float:
    """The rounding level: centering a constant column leaves rounding errors of this size."""
    return float(r.norm(dim=0).max())


def _least_norm(r: Tensor, z: Tensor, n: int, ridge: float, *, floor: float = 0.0) -> Tensor:
    """Solve ``min ||r a - z||^2 + ridge ||a||^2`` for the smallest ``a``."""
    if ridge == 0 and _inverse(r, n, floor) is not None:
        return torch.linalg.solve_triangular(r, z, upper=True)
    u, s, vh = _svd(r, n, floor)
    return vh.T @ (u.T @ z).mul_((1 / (s + ridge / s))[:, None])


def _whitened(r: Tensor, z: Tensor, n: int, floor: float) -> tuple[Tensor, Tensor]:
    """``W`` and ``B``, where ``W W^T`` is the pseudo-inverse of ``r^T r``, and ``W B`` solves for ``z``."""
    inverse = _inverse(r, n, floor)
    if inverse is not None:
        return inverse, z
    u, s, vh = _svd(r, n, floor)
    return vh.T / s, u.T @ z


def _inverse(r: Tensor, n: int, floor: float) -> Tensor | None:
    """The inverse of a triangle if all of its singular values count, else ``None``."""
    if len(r) < r.shape[1]:
        return None
    inverse = torch.linalg.solve_triangular(r, torch.eye(len(r)).to(r), upper=True)
    # The smallest singular value is at least the one, and the largest at most the other.
    return inverse if bool(1 / inverse.norm() > _level(r, n) * max(float(r.norm()), floor)) else None


def _svd(r: Tensor, n: int, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values that count, and their vectors."""
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    counted = s > _level(r, n) * max(float(s[0]) if len(s) else 0.0, floor)
    return u[:, counted], s[counted], vh[counted]


def _level(r: Tensor, n: int) -> float:
    return torch.finfo(r.dtype).eps * max(n, r.shape[1])
