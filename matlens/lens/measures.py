"""What lenses are measured by: the scores that they read out, and the variance that they explain."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from matlens import metrics
from matlens.errors import InputError, check_rows, checked
from matlens.lens.judgement import Scores
from matlens.lens.lens import Lens
from matlens.numerics.precision import in_float64


@checked
def lens_scores(lens: Lens, h: Float[Tensor, "n d_model"], layer: int) -> Scores:
    """What a lens reads out of vectors of a layer, slice by slice."""
    return lambda part: lens.logits(h[part].to(lens.on_readout.device), layer)


@checked
def lens_r2(
    lens: Lens,
    h: Float[Tensor, "n d_model"],
    last: Float[Tensor, "n d_model"],
    layer: int,
    *,
    rows: Bool[Tensor, " n"] | None = None,
) -> metrics.Estimate:
    """Share of the variance of what a lens stands in for: of ``h^L``, or of ``h^L`` standardised.

    Parameters
    ----------
    lens
        The lens. One that maps standardised vectors is held to standardised ones.
    h, last, layer
        ``h^l`` and ``h^L``, row by row, and ``l``.
    rows
        True for the rows that count, by default all.

    Raises
    ------
    InputError
        Fewer than two rows are left.
    """
    if len(h) != len(last):
        raise InputError(
            f"There are {len(h)} vectors of the layer and {len(last)} of the last. Expected pairs."
        )
    check_rows(rows, len(h), min=2)
    counted: Any = slice(None) if rows is None else rows
    h, last = h[counted], last[counted]
    truth = last if lens.norm is None else lens.norm(in_float64(last))
    score = metrics.r2(lens(h, layer), truth)
    return metrics.Estimate.without_interval(score, len(last))
