"""Peak memory of fits: upper bounds, at most a third too large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from matlens.linear import fitting
from matlens.linear.fitting import chunk_size
from matlens.linear.least_squares import are_few

_DOUBLE, _SINGLE = 8, 4
PairsToFit = Literal["last", "all"]
Widths = tuple[int, int]
"""Dimensions of a source, and of all of its targets side by side."""


def stream_widths(n_layers: int, width: int, pairs: PairsToFit) -> list[Widths]:
    """Widths of each layer of the residual stream and of its targets."""
    counts = [1] * n_layers if pairs == "last" else range(n_layers, 0, -1)
    return [(width, n * width) for n in counts]


def statistics_bytes(d_in: int, d_out: int, n_rows: int = 2**60) -> int:
    """Bytes of the two factors of `LeastSquares`, whose length is the width of ``x`` or the samples."""
    return _DOUBLE * min(n_rows, d_in + 1) * (d_in + 1 + d_out)


def written_statistics_bytes(n_rows: int, sources: Sequence[Widths], *, norms: bool = False) -> int:
    """Bytes of the tensors in files of statistics of all sources, with the norm of each sample or without."""
    factors = sum(statistics_bytes(*widths, n_rows) for widths in sources)
    return factors + _DOUBLE * len(sources) * (1 + n_rows * norms)  # and the number of samples


def collected_fit_bytes(n_rows: int, width: int, *, n_sites: int, most_targets: int) -> int:
    """Memory of a fit on collected vectors, source by source, excluding the vectors."""
    d_out = most_targets * width
    copies = _DOUBLE * n_rows * n_sites * width
    statistics = statistics_bytes(width, d_out, n_rows)
    solving = statistics + max(_DOUBLE * width * d_out * 2, _solve_bytes(n_rows, width, d_out))
    fit = max(_update_bytes(n_rows, width, d_out), solving)
    return fit + copies * (copies <= fitting.CONVERTED_BYTES)


def streamed_fit_bytes(
    n_rows: int, sources: Sequence[Widths], *, of_sample: int, widest: int, written: bool = False
) -> int:
    """Memory of a fit while streaming: statistics of all sources, and samples until they are a chunk.

    A sample has ``of_sample`` dimensions at all sites together. Statistics that are ``written`` into files,
    whose bytes are made before, are not solved at once.
    """
    chunk = min(n_rows, max(chunk_size(d) for d, _ in sources))
    statistics = [statistics_bytes(*widths, n_rows) for widths in sources]
    waiting = chunk * (of_sample + widest) * _SINGLE
    updating = max(
        waiting + _update_bytes(n_rows, *widths) - own
        for widths, own in zip(sources, statistics, strict=True)
    )
    ending = 2 * max(statistics) if written else max(_solve_bytes(n_rows, *widths) for widths in sources)
    return sum(statistics) + max(updating, ending)


def stored_fit_bytes(
    sources: Sequence[Widths], *, n_rows: int = 2**60, n_shards: int = 1, written: bool = False
) -> int:
    """Memory of a fit on stored statistics, read source by source, or ``written`` as one of ``n_shards``."""
    solving = max(_solve_bytes(n_rows, *widths) for widths in sources)
    statistics = max(statistics_bytes(*widths) for widths in sources)
    merging = max(_merge_bytes(*widths) for widths in sources) if n_shards > 1 else 0
    return max(statistics + (2 * statistics if written else solving), merging)


def _update_bytes(n_rows: int, d: int, d_out: int) -> int:
    """An update of `LeastSquares` by a chunk, the old and the new statistics included."""
    n, later = min(n_rows, chunk_size(d)), n_rows > chunk_size(d)
    factor, product, samples = (d + 1) ** 2, (d + 1) * d_out, n * (d + 1)
    q = samples + later * factor  # of the old factor on top of the samples
    factorising = samples + (1 + later) * q + 2 * factor
    multiplying = samples + q + 2 * factor + product + max(n * d, later * product)
    return _DOUBLE * (max(factorising, multiplying) + later * (factor + product))


def _merge_bytes(d: int, d_out: int) -> int:
    factor, product = (d + 1) ** 2, (d + 1) * d_out
    return _DOUBLE * (6 * factor + 4 * product)


def _solve_bytes(n_rows: int, d: int, d_out: int) -> int:
    """The maps of a source: a triangle is inverted and solved, or has its singular values (6.5 by LAPACK)."""
    if not are_few(n_rows, d):
        return _DOUBLE * (d * d_out + 3 * d * d)
    rank = min(n_rows, d)
    return _DOUBLE * max(13 * rank * d // 2, 2 * rank * d + (rank + d) * d_out)
