"""Memory that fits hold at their peak, counted in the arrays that they make, before they make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from matlens.errors import check_choice, check_int, checked
from matlens.linear import fitting
from matlens.linear.samples import are_few
from matlens.linear.sums import chunk_size

_DOUBLE, _SINGLE = 8, 4
_MOST = 2**60
PairsToFit = Literal["last", "all"]
Widths = tuple[int, int]
"""Coordinates of a source, and of all of its targets side by side."""


@checked
def moments_bytes(d_in: int, d_out: int, n_rows: int = _MOST) -> int:
    """Bytes of the two factors of `LeastSquares` of samples ``(x, y)``, as long as ``x`` is wide.

    So they do not grow with the samples; of fewer samples than that, they are as long as those are many.
    """
    d_in = check_int(d_in, "d_in", min=1, max=_MOST)
    d_out = check_int(d_out, "d_out", min=1, max=_MOST)
    rank = min(check_int(n_rows, "The number of samples", min=0, max=_MOST), d_in + 1)
    return _DOUBLE * rank * (d_in + 1 + d_out)


@checked
def written_moments_bytes(n_rows: int, sources: Sequence[Widths], *, norms: bool = False) -> int:
    """Bytes of the tensors in files of moments of all sources, with the norm of each sample or without."""
    factors = sum(moments_bytes(*widths, n_rows) for widths in sources)
    return factors + _DOUBLE * len(sources) * (1 + n_rows * norms)  # and the number of samples


@checked
def stream_widths(n_layers: int, width: int, pairs: PairsToFit) -> list[Widths]:
    """Widths of each layer of a stream and of its targets: the last layer, or all later ones."""
    check_choice(pairs, ("last", "all"), "pairs")
    counts = [1] * n_layers if pairs == "last" else range(n_layers, 0, -1)
    return [(width, n * width) for n in counts]


@checked
def collected_fit_bytes(n_rows: int, width: int, *, n_sites: int, most_targets: int) -> int:
    """Most bytes of arrays that a fit on collected vectors makes, source by source, besides the vectors.

    Parameters
    ----------
    n_rows, width
        Samples, and the coordinates of each.
    n_sites
        How many sites the maps lie between.
    most_targets
        The most targets that a source has; all of its maps are written together.
    """
    d, most = width, chunk_size(width)
    kept = n_rows * n_sites * d
    beside_each_other = kept * _DOUBLE <= fitting.KEPT
    moments = (d + 1) * (d + 1 + most_targets * d)
    first, later = min(n_rows, most), min(n_rows - most, most)
    peaks = [_update(first, d, most_targets * d, made=0 if beside_each_other else first * d)]
    if later > 0:
        passing = (most_targets if beside_each_other else 1) * (d + 1) * d
        made = 0 if beside_each_other else later * d
        peaks.append(moments + _update(later, d, most_targets * d, made=made, passing=passing, held=True))
    solved = moments + d * most_targets * d
    peaks.append(solved + 2 * most_targets * d * d * _SINGLE // _DOUBLE)  # and written
    peaks.append(moments + _solution(n_rows, d, most_targets * d))
    return _DOUBLE * (max(peaks) + (kept if beside_each_other else 0))


@checked
def streamed_fit_bytes(
    n_rows: int, sources: Sequence[Widths], *, of_sample: int, widest: int, written: bool = False
) -> int:
    """Most bytes of arrays that a fit holds while vectors pass by: all moments, and some samples.

    Samples are gathered until they are eight for each dimension, so it does not grow with their number.

    Parameters
    ----------
    n_rows, sources
        Samples, and the widths of each source and of its targets.
    of_sample, widest
        Coordinates of a sample at all sites together, and at the widest of them.
    written
        Whether the moments are written into files, whose bytes are made before, and not solved at once.
    """
    most = max(chunk_size(d) for d, _ in sources)
    sample = of_sample * _SINGLE
    left_out = 0 if written else min(n_rows, fitting.LEFT_OUT) * sample
    kept = [moments_bytes(*widths, n_rows) for widths in sources]
    first, later = min(n_rows, most), min(n_rows - most, most)
    # Site by site the batches are put together, and what is needed no more is gone.
    joining = widest * _SINGLE
    left = [sample - _SINGLE * sum(d for d, _ in sources[:i]) for i in range(len(sources))]
    peaks = [first * (sample + joining)]
    peaks += [
        first * left[i]
        + sum(kept[:i])
        + _DOUBLE * _update(first, d_in, d_out, made=first * min(widest, d_out))
        for i, (d_in, d_out) in enumerate(sources)
    ]
    if later > 0:
        peaks.append(sum(kept) + later * (sample + joining))
        for i, (d_in, d_out) in enumerate(sources):
            block = min(widest, d_out)
            update = _update(later, d_in, d_out, made=later * block, passing=(d_in + 1) * block, held=True)
            peaks.append(sum(kept) + later * left[i] + _DOUBLE * update)
    return left_out + max(*peaks, sum(kept) + (2 * max(kept) if written else _solving(sources, n_rows)))


@checked
def stored_fit_bytes(
    sources: Sequence[Widths], *, n_rows: int = _MOST, n_shards: int = 1, written: bool = False
) -> int:
    """Most bytes of arrays that moments in files take, which are read source by source.

    Parameters
    ----------
    sources
        The widths of each source and of its targets.
    n_rows
        Samples; of fewer than twice the width, maps are solved by singular values.
    n_shards
        How many folders they are joined from.
    written
        Whether they are written as one, and not solved.
    """
    kept = [moments_bytes(*widths) for widths in sources]
    peak = max(kept) + (2 * max(kept) if written else _solving(sources, n_rows))
    if n_shards == 1:
        return peak
    joined = [
        # The samples are the factor of a part, which is read already.
        2 * held
        + _DOUBLE
        * (_update(d_in + 1, d_in, d_out, made=0, passing=(d_in + 1) * d_out, held=True) - (d_in + 1) ** 2)
        for held, (d_in, d_out) in zip(kept, sources, strict=True)
    ]
    return max(peak, *joined)


def _solving(sources: Sequence[Widths], n_rows: int) -> int:
    """Bytes of the maps of the source that takes most, and of what they are solved with."""
    return _DOUBLE * max(_solution(n_rows, d_in, d_out) for d_in, d_out in sources)


def _solution(n_rows: int, d: int, d_out: int) -> int:
    """Most numbers that the solution of a source's maps makes, the maps among them.

    A triangle is inverted once, to see that no singular value counts as zero, and solved. Of few samples,
    as with a penalty or of samples that lie in fewer dimensions, the singular values are needed: LAPACK
    holds a copy, two matrices of vectors and room to work in, 6.5 times the triangle in all.
    """
    if not are_few(n_rows, d):
        return d * d_out + 3 * d * d
    rank = min(n_rows, d)
    return max(13 * rank * d // 2, 2 * rank * d + (rank + d) * d_out)


@checked
def update_bytes(n: int, width: int, n_targets: int, *, held: bool) -> int:
    """Peak bytes of `LeastSquares.update` with ``n`` samples, its factors included; targets in float64.

    Parameters
    ----------
    n, width, n_targets
        Samples of the update, coordinates of source and targets, and the targets.
    held
        Whether the moments hold samples already, whose factors are there in addition to the new ones.
    """
    n, width = (check_int(number, "A size", min=1, max=_MOST) for number in (n, width))
    n_targets = check_int(n_targets, "The number of targets", min=1, max=_MOST)
    old = moments_bytes(width, n_targets * width) if held else 0
    passing = (width + 1) * n_targets * width if held else 0
    return old + _DOUBLE * _update(n, width, n_targets * width, made=0, passing=passing, held=held)


def _update(n: int, d: int, d_out: int, *, made: int, passing: int = 0, held: bool = False) -> int:
    """Most numbers that an update of `LeastSquares` by ``n`` samples makes, the new moments among them.

    ``made`` are those of the targets in float64, ``passing`` the product that is added to what was held.
    """
    factor, product = (d + 1) ** 2, (d + 1) * d_out
    samples = n * (d + 1)
    stacked = samples + factor if held else 0  # the factor of before stands on top of the samples
    q = stacked or n * min(n, d + 1)
    factorising = samples + stacked + max(q, samples) + 2 * factor
    multiplying = samples + q + factor + product + max(passing, made)
    return max(factorising, multiplying)
