"""Early exit at confident layers (paper A, section 6 and Figure 9).

Everything is decided from stored representations, for all thresholds at once: the model is not run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens import metrics
from matlens.activations.activations import Activations
from matlens.data.overlap import warn_of_overlap
from matlens.errors import Fraction, InputError, check_names, checked
from matlens.io.tables import check_columns, check_one, result_table
from matlens.lens.evaluation import Evaluation, evaluate_layers, shared_layers, validation_row
from matlens.lens.lens import Lens
from matlens.numerics import in_float64

EXIT = "early_exit"
SWEEP = (-1.112, *(i / 10 for i in range(11)), *np.linspace(1, 1.112, 12)[1:-1].round(6).tolist(), 1.112)


@checked
def thresholds(
    positions: Int[Tensor, " n"], lam: float, mean_length: float | None = None
) -> Float[Tensor, " n"]:
    """``0.9 lam + 0.1 exp(-4 i / N)``: the threshold at position ``i``.

    ``lam`` of 0 and less exits nearly at once, of more than 1.11 never. ``N`` is ``mean_length``, by default
    the mean of ``i + 1``.
    """
    if not len(positions) or int(positions.min()) < 0:
        raise InputError("positions must have at least one position, each at least 0.")
    i = in_float64(positions)
    n = float((i + 1).mean()) if mean_length is None else mean_length
    return 0.9 * lam + 0.1 * torch.exp(-4 * i / n)


@checked
def exit_layers(confidence: Float[Tensor, "n n_layers"], threshold: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The first layer, from 1, whose confidence exceeds the threshold, or the last.

    Column ``l - 1`` of ``confidence`` is ``p1 - p2`` after layer ``l``.
    """
    if len(threshold) != len(confidence):
        raise InputError(f"threshold must be one for each of {len(confidence)} tokens, got {len(threshold)}.")
    if not bool(confidence.isfinite().all()) or bool(threshold.isnan().any()):
        raise InputError("confidence must be finite, and threshold must not be NaN.")
    passed: Bool[Tensor, "n n_layers"] = in_float64(confidence) > in_float64(threshold)[:, None]
    passed[:, -1] = True
    return passed.to(torch.uint8).argmax(1) + 1


class ExitConfidence(NamedTuple):
    """``p1 - p2`` of each layer, and whether its top token is that of the last layer."""

    difference: Float[Tensor, "n n_layers"]
    right: Bool[Tensor, "n n_layers"]

    @classmethod
    def from_evaluations(cls, layers: Iterable[Evaluation]) -> ExitConfidence:
        """Those of evaluations with confidences, one for each exit layer."""
        evaluations = list(layers)
        for other in evaluations[1:]:
            evaluations[0].check_paired(other)
        ranks, confidences = zip(*((each.rank, each.confidence) for each in evaluations), strict=True)
        return cls(torch.stack(confidences, 1), torch.stack(ranks, 1) == 1)


@checked
def exit_sweep(
    lenses: Mapping[str, Lens],
    validation: Activations,
    *,
    layers: Sequence[int] | None = None,
    lams: Mapping[str, Sequence[float]] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Precision@1 and mean layers run of each lens, for a sweep over ``lam``.

    A table with one more column, ``lam``. Rows with a ``lam`` are early exit: ``layer`` is the mean number of
    layers run and ``low`` and ``high`` belong to the precision. Rows without are fixed exit: all tokens exit
    after ``layer``.

    Parameters
    ----------
    layers
        Layers to exit after, from 1, by default all that were collected.
    lams
        The values of ``lam`` by lens, by default `SWEEP`.
    """
    check_names(lams or (), lenses, "lams")
    last = validation.provenance.identity.n_layers
    exits = [layer for layer in shared_layers(lenses, validation, layers) if layer > 0]
    if not exits:
        raise InputError("layers must have at least one collected layer above 0.")
    exits.append(last)
    warn_of_overlap([lens.provenance for lens in lenses.values()], validation.at_rows, "The lenses")
    exits_at = torch.tensor(exits).double()
    positions = torch.from_numpy(validation.places).long()
    rows: list[dict[str, Any]] = []

    def add(name: str, layer: float, right: Tensor, lam: float) -> None:
        precision = metrics.proportion(right)
        row = validation_row(EXIT, validation, name, layer, last, "precision", 1, precision)
        rows.append(row | {"lam": lam})

    evaluated = evaluate_layers(lenses, validation, exits, confidence=True, progress=progress)
    for name in lenses:
        confidence, right = ExitConfidence.from_evaluations(evaluated[layer, name] for layer in exits)
        for column, layer in enumerate(exits):
            add(name, layer, right[:, column], np.nan)
        for lam in (lams or {}).get(name, SWEEP):
            left = exit_layers(confidence, thresholds(positions, lam)) - 1
            add(name, float(exits_at[left].mean()), right.gather(1, left[:, None])[:, 0], lam)
    return result_table(rows, "lam")


@checked
def savings(exits: pd.DataFrame, precision: Fraction = 0.95) -> pd.DataFrame:
    """Layers saved by early exit at a Precision@1: ``method, saved, n_layers, share``.

    From the table of `exit_sweep`; interpolated linearly between the points of the sweep.
    """
    check_columns(exits, ("method", "layer", "target", "value", "lam"), what="the table of lens.exit_sweep")
    check_one(exits)
    n_layers = int(exits["target"].max())
    rows = []
    for method, points in exits[exits["lam"].notna()].groupby("method", sort=False):
        saved = n_layers - _crossing(points["layer"].to_list(), points["value"].to_list(), precision)
        rows.append((method, saved, n_layers, saved / n_layers))
    return pd.DataFrame(rows, columns=["method", "saved", "n_layers", "share"])


def _crossing(layers: Sequence[float], values: Sequence[float], wanted: float) -> float:
    """Where the polyline through the points first reaches a value."""
    points = sorted(zip(layers, values, strict=True))
    if points[0][1] >= wanted:
        return points[0][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y0 < wanted <= y1:
            return x0 + (x1 - x0) * (wanted - y0) / (y1 - y0)
    raise InputError(f"No threshold of the sweep reaches a precision of {wanted}.")
