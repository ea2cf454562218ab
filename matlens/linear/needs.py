"""Memory that fits hold at their peak, counted in the arrays that they make, before they make them."""

from __future__ import annotations

from typing import Literal

from matlens.arguments import require_choice, require_whole
from matlens.linear import fitting
from matlens.linear.sums import samples_together
from matlens.signatures import checked

_DOUBLE, _SINGLE = 8, 4
_MOST = 2**60
PairsToFit = Literal["last", "all"]


@checked
def moments_bytes(d_in: int, d_out: int) -> int:
    """Bytes that the moments of samples ``(x, y)`` keep, however many there are: `Moments`' two factors."""
    d_in = require_whole(d_in, "d_in", least=1, most=_MOST)
    return _DOUBLE * (d_in + 1) * (d_in + 1 + require_whole(d_out, "d_out", least=1, most=_MOST))


@checked
def model_moments_bytes(n_layers: int, width: int, pairs: PairsToFit) -> int:
    """Bytes of the moments of all layers of a stream while its vectors pass by, onto the last or onto all."""
    targets = target_counts(n_layers, pairs)
    return sum(moments_bytes(width, n * width) for n in targets)


def target_counts(n_layers: int, pairs: PairsToFit) -> list[int]:
    """How many targets each layer of a stream has, from the first."""
    require_choice(pairs, ("last", "all"), "pairs")
    return [1] * n_layers if pairs == "last" else list(range(n_layers, 0, -1))


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
    d, most = width, samples_together(width)
    kept = n_rows * n_sites * d
    beside_each_other = kept * _DOUBLE <= fitting.KEPT
    moments = (d + 1) * (d + 1 + most_targets * d)
    first, later = min(n_rows, most), min(n_rows - most, most)
    peaks = [_update(first, d, most_targets, made=0 if beside_each_other else first * d)]
    if later > 0:
        passing = (most_targets if beside_each_other else 1) * (d + 1) * d
        made = 0 if beside_each_other else later * d
        peaks.append(moments + _update(later, d, most_targets, made=made, passing=passing, held=True))
    solved = moments + d * most_targets * d
    peaks += [solved + 3 * d * d, solved + 2 * most_targets * d * d * _SINGLE // _DOUBLE]  # and written
    return _DOUBLE * (max(peaks) + (kept if beside_each_other else 0))


@checked
def streamed_fit_bytes(n_rows: int, width: int, *, n_layers: int, pairs: PairsToFit) -> int:
    """Most bytes of arrays that a fit holds while vectors pass by: moments of all layers, and some samples.

    Samples are gathered until they are eight for each dimension, so it does not grow with their number.
    """
    d, most, targets = width, samples_together(width), target_counts(n_layers, pairs)
    of_sample = (n_layers + 1) * d * _SINGLE
    of_sources = [moments_bytes(d, n * d) for n in targets]
    first, later = min(n_rows, most), min(n_rows - most, most)
    # Where samples are put together, they are there twice for a moment.
    peaks = [2 * first * of_sample]
    peaks += [
        first * of_sample + sum(of_sources[:i]) + _DOUBLE * _update(first, d, n, made=first * d)
        for i, n in enumerate(targets)
    ]
    if later > 0:
        update = _DOUBLE * _update(later, d, max(targets), made=later * d, passing=(d + 1) * d, held=True)
        peaks.append(sum(of_sources) + max(2 * later * of_sample, later * of_sample + update))
    return max(*peaks, sum(of_sources) + _DOUBLE * (d * max(targets) * d + 3 * d * d))


@checked
def update_bytes(n: int, width: int, n_targets: int, *, held: bool) -> int:
    """Most bytes that an update of `Moments` by ``n`` samples holds, with the moments; targets in float64.

    Parameters
    ----------
    n, width, n_targets
        Samples of the update, coordinates of source and targets, and the targets.
    held
        Whether the moments hold samples already, whose factors are there beside the new ones.
    """
    n, width = (require_whole(number, "A size", least=1, most=_MOST) for number in (n, width))
    n_targets = require_whole(n_targets, "The number of targets", least=1, most=_MOST)
    old = moments_bytes(width, n_targets * width) if held else 0
    passing = (width + 1) * n_targets * width if held else 0
    return old + _DOUBLE * _update(n, width, n_targets, made=0, passing=passing, held=held)


def _update(n: int, d: int, n_targets: int, *, made: int, passing: int = 0, held: bool = False) -> int:
    """Most numbers that an update of `Moments` by ``n`` samples makes, the new moments among them.

    ``made`` are those of the targets in float64, ``passing`` the product that is added to what was held.
    """
    factor, product = (d + 1) ** 2, (d + 1) * n_targets * d
    samples = n * (d + 1)
    stacked = samples + factor if held else 0  # the factor of before stands on top of the samples
    q = stacked or n * min(n, d + 1)
    factorising = samples + stacked + max(q, samples) + 2 * factor
    multiplying = samples + q + factor + product + max(passing, made)
    return max(factorising, multiplying)
