"""Least squares from sufficient statistics that are updated, merged and solved.

All fits minimize ``sum_s w_s ||A x_s - y_s||^2 + ridge ||A||^2``, by default with
no weights, no intercept and no penalty; where the samples do not determine ``A``, the solution of least norm.
Everything is accumulated and solved in float64, for any precision of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Self

import torch
from jaxtyping import Float
from torch import Tensor

from matlens import parallel
from matlens.errors import Between, InputError, NonNegative, checked, short, warn
from matlens.linear.maps import LinearMap
from matlens.models.identity import Provenance
from matlens.numerics import check_finite, in_float64, split_product

ENOUGH = 2  # samples per dimension; with fewer, least squares mostly follows noise
_Width = Annotated[int, Between(1, 2**31)]


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
        """All statistics, for `from_tensors`, on the CPU: ``r``, ``z``, ``n`` and maybe ``norms``."""
        tensors = {"r": self._r.cpu(), "z": self._z.cpu(), "n": torch.tensor(self.n)}
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
        for tensors in parallel.gather(self.tensors(), what)[1:]:  # the first are the main process's own
            self.merge(self._like(tensors))
        if to_all:
            return self._like(parallel.broadcast(self.tensors(), what))
        if parallel.is_main():
            return self
        d_in, norms = self._r.shape[1] - 1, self.norms is not None
        return type(self)(d_in, self.targets, source=self.source, split=self.split, norms=norms)

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
        provenance: Provenance | None = None,
    ) -> dict[str, LinearMap]:
        """The best map onto each target for the samples so far, in float32.

        Singular values below ``eps * max(n, d_in)`` of the largest count as zero, as in
        ``torch.linalg.lstsq(driver="gelsd")``. An intercept is not penalised by ``ridge``.
        """
        weight, bias = self.solution(intercept=intercept, ridge=ridge)
        maps, widths = {}, list(self.targets.values())
        biases = [None] * len(widths) if bias is None else bias.split(widths)
        for target, of_target, b in zip(self.targets, weight.split(widths), biases, strict=True):
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
        # Centring a constant column leaves rounding errors of this size.
        floor = float(r[:, 1:].norm(dim=0).max())
        weight = _least_norm(r[1:, 1:], z[1:], self.n, ridge, floor=floor).T
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


def are_few(n_samples: int, width: int) -> bool:
    """Whether samples are fewer than twice the width, so a fit needs a penalty."""
    return n_samples < ENOUGH * width


def warn_if_few(n_samples: int, width: int) -> None:
    """Warn of fits on fewer than two samples per dimension, without a ridge.

    With ``c = d_in / n`` and Gaussian samples, least squares leaves the error ``s (1 - c)`` on the samples
    that it is fitted on and ``s / (1 - c)`` on others, where ``s`` is the error that no linear map can avoid.
    So the part that the fit adds to ``s`` is the larger one for ``n < 2 d_in``.
    """
    if are_few(n_samples, width):
        warn(
            f"Maps of {width:,} dimensions must have at least {ENOUGH * width:,} samples, got {n_samples:,}: "
            "with so few, most of their error on other samples is noise. Use more samples or a ridge."
        )


def _least_norm(r: Tensor, z: Tensor, n: int, ridge: float, *, floor: float = 0.0) -> Tensor:
    """Solve ``min ||r a - z||^2 + ridge ||a||^2`` for the smallest ``a``.

    Singular values count above ``eps * max(n, d)`` of the largest, or of ``floor`` if that is larger.
    """
    level = torch.finfo(r.dtype).eps * max(n, r.shape[1])
    if ridge == 0 and len(r) == r.shape[1]:
        inverse = torch.linalg.solve_triangular(r, torch.eye(len(r)).to(r), upper=True)
        # The smallest singular value is at least the one, and the largest at most the other.
        if bool(1 / inverse.norm() > level * max(float(r.norm()), floor)):
            return torch.linalg.solve_triangular(r, z, upper=True)
    u, s, vh = torch.linalg.svd(r, full_matrices=False)
    counted = s > level * max(float(s[0]) if len(s) else 0.0, floor)
    u, s, vh = u[:, counted], s[counted], vh[counted]
    return vh.T @ (u.T @ z).mul_((1 / (s + ridge / s))[:, None])
