"""Least squares from sufficient statistics that are updated, merged and solved.

All fits minimise ``sum_s w_s ||A x_s - y_s||^2 + ridge ||A||^2`` (definitions, section 3), by default with
no weights, no intercept and no penalty; where the samples do not determine ``A``, the solution of least norm.
Everything is accumulated and solved in float64, whatever the samples' precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Self

import torch
from jaxtyping import Float
from torch import Tensor

from matlens import parallel
from matlens.errors import Between, InputError, NonNegative, checked
from matlens.linear.maps import LinearMap
from matlens.linear.samples import NoisyFit, check_weights
from matlens.models.identity import Provenance
from matlens.numerics import in_float64, split_product

_Width = Annotated[int, Between(1, 2**31)]
_DOMINATED = 4  # error on other samples over that on the fit's own, from which most of it is noise
_ALONE = 1e-6  # of one less the leverage, below which a sample alone settles a direction
_BLOCK = 32  # samples whose errors are computed together, to take less memory than the fit
_EXACT = 1e-6  # error, in variances, below which a fit is exact but for rounding


@checked
class LeastSquares:
    """Sufficient statistics of a source and its targets, in memory that does not grow with the samples.

    They are not the second moments but their triangular square root: the factor ``R`` of ``[x 1] = QR``, and
    ``Q^T y``. Squaring would lose every direction that is a millionth as strong as the strongest, and
    residual streams have dimensions a thousand times larger than the rest. Two of them are merged by
    factorising both factors together.

    Parameters
    ----------
    d_in
        Width of ``x``.
    d_out
        Width of ``y``, or the width of each target by name, which stand side by side in ``y``.
    source
        What ``x`` is, for errors and for the maps.
    split
        Whether products with the targets, which are most of the work, are sums of exact products in float32
        (`split_product`): faster on a device that is slow in float64, and slower on all others.
    norms
        Whether to keep the squared norm of each ``x`` too, from which a ridge for few samples is chosen.
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
        self._norms = [torch.zeros(0, dtype=torch.float64)] if norms else []

    @property
    def name(self) -> str:
        """The source and the targets, for messages."""
        return f"{self.source} -> {', '.join(self.targets)}"

    @property
    def norms(self) -> Float[Tensor, " n"] | None:
        """Squared norms of the samples, where they are kept."""
        if len(self._norms) > 1:
            self._norms = [torch.cat(self._norms)]
        return self._norms[0] if self._norms else None

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
        self._check_shapes(x, blocks)
        root = None
        if weights is not None:
            weights = check_weights(weights, len(x))
            used = weights > 0
            root = weights[used].sqrt()[:, None]  # a weight is a factor on the squared error
            x, blocks = x[used.to(x.device)], [block[used.to(block.device)] for block in blocks]
        if not len(x):
            return self
        rows, norms = _with_ones(x), []
        if self._norms:
            norms = [rows[:, :-1].square().sum(1).cpu()]
        if root is not None:
            root = root.to(rows.device)
            rows, blocks = rows.mul_(root), [in_float64(block).to(rows.device) * root for block in blocks]
        self._add(len(x), rows, blocks, norms)
        return self

    def _check_shapes(self, x: Tensor, blocks: Sequence[Tensor]) -> None:
        d_in, d_out = self._r.shape[1] - 1, self._z.shape[1]
        matrices = all(block.ndim == 2 and len(block) == len(x) for block in (x, *blocks))
        if not matrices or x.shape[1] != d_in or sum(block.shape[1] for block in blocks) != d_out:
            raise InputError(
                f"x must be [n, {d_in}] and y [n, {d_out}], got {list(x.shape)} and "
                f"{', '.join(str(list(block.shape)) for block in blocks)}."
            )

    def merge(self, other: LeastSquares) -> Self:
        """Add the samples that another object has seen, of the same source and targets."""
        if (self.source, [*self.targets.items()]) != (other.source, [*other.targets.items()]):
            raise InputError(f"other must be of {self.name}, got one of {other.name}.")
        if bool(self._norms) != bool(other._norms):
            raise InputError("other must keep norms as well, or neither.")
        if other.n:
            self._add(other.n, other._r, [other._z], other._norms)
        return self

    def tensors(self) -> dict[str, Tensor]:
        """All that there is of the samples, for `from_tensors`: ``r``, ``z``, ``n`` and maybe ``norms``."""
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
        """The object whose `tensors` these are, such as that of another process.

        Raises
        ------
        InputError
            The factors do not belong together, are not in float64, or hold a value that is not finite.
        """
        r, z, n = tensors["r"], tensors["z"], int(tensors["n"])
        fits = r.ndim == z.ndim == 2 and len(r) == len(z) and r.shape[1] > 1 and z.shape[1] > 0
        if not fits or r.dtype != torch.float64 or z.dtype != torch.float64 or (len(r) > 0) != (n > 0):
            raise InputError(
                f"r and z must be float64 with as many rows for {n} samples, got {list(r.shape)} of "
                f"{r.dtype} and {list(z.shape)} of {z.dtype}."
            )
        made = cls(
            r.shape[1] - 1, targets or z.shape[1], source=source, split=split, norms="norms" in tensors
        )
        check_finite(r, source)
        check_finite(z, made.name)
        made._r, made._z, made.n = r, z, n
        made._norms = [tensors["norms"]] if "norms" in tensors else []
        return made

    def reduce(self, *, to_all: bool = False) -> Self:
        """The samples of all processes, merged in rank order.

        The main process has them, and with ``to_all`` each; otherwise the others have none.
        """
        if parallel.world_size() == 1:
            return self
        gathered = parallel.gather(self.tensors(), f"least squares of {self.name}")
        whole = self if parallel.is_main() else self.empty()
        for tensors in gathered[1:]:  # the first are the main process's own
            whole.merge(self._like(tensors))
        if not to_all:
            return whole
        return self._like(parallel.broadcast_tensors(whole.tensors(), f"least squares of {self.name}"))

    def empty(self) -> Self:
        """The same source and targets, without samples."""
        return type(self)(
            self._r.shape[1] - 1, self.targets, source=self.source, split=self.split, norms=bool(self._norms)
        )

    def _like(self, tensors: Mapping[str, Tensor]) -> Self:
        return self.from_tensors(tensors, self.targets, source=self.source, split=self.split)

    def _add(self, n: int, rows: Tensor, blocks: list[Tensor], norms: list[Tensor]) -> None:
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
        self._norms = [*self._norms, *norms]  # a copy of this object shares the list

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

        Raises
        ------
        InputError
            There are no samples, or the ridge is negative or not finite.
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
        width = self._r.shape[1] - 1
        if not intercept:
            return _least_norm(self._r[:width, :width], self._z[:width], self.n, ridge).T, None
        r, z = self._with_constant_first()
        # What centring leaves of a constant column is rounding of the column itself.
        floor = r[:, 1:].norm(dim=0).max()
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
        self._check_samples()
        r, z = self._with_constant_first()
        return r[0, 1:] / r[0, 0], z[0] / r[0, 0], float(r[0, 0].square())


def noise_of_fit(
    state: LeastSquares,
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
    state
        Of all samples.
    samples
        Some of these: ``x``, the targets in their order, and weights, batch by batch.
    names
        What the fits are called.
    intercept
        Whether the fit has one.
    """
    n, d = state.n, state.factors()[0].shape[1]
    if n <= d:
        return [NoisyFit(name, n, d) for name in names]
    r, z = state.factors(centred=intercept)
    floor = state.factors()[0].norm(dim=0).max() if intercept else None
    x_mean, y_mean, total = state.means() if intercept else (r.new_zeros(d), z[0] * 0, torch.inf)
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


def check_finite(values: Tensor, name: str) -> None:
    """Refuse samples that a model has overflowed to."""
    # A sum is not finite if a term is not, and is quicker than looking at each. It may overflow itself.
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise InputError(
            f"The samples of {name} hold values that are not finite. A float16 model has probably "
            "overflowed: run it in bfloat16 or float32."
        )
