"""Early exit: how many layers can be saved if a confident layer's prediction is taken (paper A, section 6).

Everything is decided from stored representations, for all thresholds at once: the model is not run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from matlens import metrics
from matlens.activations.activations import Activations
from matlens.errors import Fraction, InputError, checked, short
from matlens.io.tables import check_columns, result_table
from matlens.lens.judgement import Substitute, chunks
from matlens.lens.quality import validation_row
from matlens.linear.mapsets import MapSet
from matlens.models.readout import Readout
from matlens.models.sites import check_finite
from matlens.numerics.precision import in_float64
from matlens.numerics.probabilities import log_softmax
from matlens.parallel import Bar

EXIT = "early_exit"
SWEEP = (-1.112, *(i / 10 for i in range(11)), 1.112)
SWEEP_ID = tuple(sorted({*SWEEP, *np.linspace(1, 1.112, 12)[1:-1].round(6).tolist()}))
_STEPS = np.linspace(-0.112, 1.112, 613)  # from where all examples exit at once to where none does
_METHODS = {"mat": SWEEP, "id": SWEEP_ID}


@checked
def thresholds(
    positions: Int[Tensor, " n"], lam: float, mean_length: float | None = None
) -> Float[Tensor, " n"]:
    """``0.9 lam + 0.1 exp(-4 i / N)``: the confidence that a position has to pass.

    Parameters
    ----------
    positions
        ``i``, counted from 0.
    lam
        The threshold's parameter: 0 and less exits nearly at once, more than 1.11 never.
    mean_length
        ``N``, by default the mean of ``i + 1`` over the positions.

    Raises
    ------
    InputError
        The mean length is not positive, a position is negative, or there is none.
    """
    if not len(positions) or int(positions.min()) < 0:
        raise InputError("Expected one position or more, each counted from 0.")
    if mean_length is not None and mean_length <= 0:
        raise InputError(f"The mean length is {mean_length}. Expected a positive number.")
    i = in_float64(positions)
    n = float((i + 1).mean()) if mean_length is None else mean_length
    return 0.9 * lam + 0.1 * torch.exp(-4 * i / n)


@checked
def exit_layers(confidence: Float[Tensor, "n n_layers"], threshold: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The first layer, from 1, whose confidence passes the threshold; the last layer where none does.

    Column ``l - 1`` of ``confidence`` is ``p1 - p2`` after layer ``l``.

    Raises
    ------
    InputError
        There is not one threshold for each row, or no layer, or a number is none.
    """
    if not confidence.shape[1] or len(confidence) != len(threshold):
        raise InputError(
            f"Confidences of the shape {tuple(confidence.shape)} with {len(threshold)} thresholds. Expected "
            "a threshold for each row, and one layer or more."
        )
    if not bool(confidence.isfinite().all()) or bool(threshold.isnan().any()):
        raise InputError("A confidence is not finite, or a threshold is NaN. Expected numbers.")
    passed: Bool[Tensor, "n n_layers"] = in_float64(confidence) > in_float64(threshold)[:, None]
    passed[:, -1] = True
    return passed.to(torch.uint8).argmax(1) + 1


def confidence_in_top(logits: Float[Tensor, "n d_vocab"]) -> Float[Tensor, " n"]:
    """``p1 - p2`` of each row's distribution, in float64."""
    p1, p2 = in_float64(log_softmax(logits).topk(2).values).exp().unbind(-1)
    return p1 - p2


class ExitConfidence(NamedTuple):
    """How confident every layer is of its prediction, and whether the prediction is right.

    Attributes
    ----------
    difference
        ``p1 - p2`` of each layer's distribution.
    right
        Whether its most probable token is that of the last layer.
    """

    difference: Float[Tensor, "n n_layers"]
    right: Bool[Tensor, "n n_layers"]


@checked
def exit_confidences(
    readout: Readout,
    truth: Float[Tensor, "n d_model"],
    substitutes: Sequence[Substitute],
    *,
    name: str,
    progress: bool = True,
) -> ExitConfidence:
    """Read out what stands in for ``h^L`` at every layer.

    Parameters
    ----------
    readout
        The read-out of the model.
    truth
        ``h^L`` itself.
    substitutes
        What stands in for ``h^L`` at each layer where the model can be left, from the first to the last.
    name
        The name of the method, for the progress bar.
    progress
        Whether to show a progress bar.

    Raises
    ------
    InputError
        There is no layer, or the truth is not finite.
    """
    n, n_layers = len(truth), len(substitutes)
    if not n_layers:
        raise InputError("There is nothing to leave the model by. Expected a substitute for each layer.")
    check_finite(truth, "the truth")
    confidence = ExitConfidence(torch.empty(n, n_layers), torch.empty(n, n_layers, dtype=torch.bool))
    with readout.weights.constant():
        for part in Bar(list(chunks(n)), desc=f"confidence of {name}", disable=not progress):
            true = readout.log_probs(truth[part])
            for i, substitute in enumerate(substitutes):
                logits = readout.logits(substitute(part))
                confidence.difference[part, i] = confidence_in_top(logits).float().cpu()
                confidence.right[part, i] = (metrics.rank(true, logits.argmax(-1)) == 1).cpu()
    return confidence


@checked
def least_lam(
    confidence: ExitConfidence, positions: Int[Tensor, " n"], mean_length: float, wanted: float
) -> float:
    """The least ``lam``, in steps of 0.002, at which early exit has at least the wanted Precision@1."""
    for lam in _STEPS:
        left = exit_layers(confidence.difference, thresholds(positions, lam, mean_length))
        if float(confidence.right.gather(1, left[:, None] - 1).double().mean()) >= wanted:
            return float(lam)
    return float(_STEPS[-1])  # all layers are run, and all examples right


@checked
def exit_sweep(
    readout: Readout, maps: MapSet, validation: Activations, *, progress: bool = True
) -> pd.DataFrame:
    """Precision@1 and mean number of layers run, for the sweep over ``lam``, of ``mat`` and ``id``.

    A tidy table with one more column, ``lam``. Rows with a ``lam`` are early exit: ``layer`` is the mean
    number of layers run and ``low`` and ``high`` belong to the precision. Rows without are fixed exit:
    all examples leave after ``layer``.
    """
    return sweep_and_reaching(readout, maps, validation, progress=progress)[0]


def sweep_and_reaching(
    readout: Readout, maps: MapSet, validation: Activations, *, progress: bool = True
) -> tuple[pd.DataFrame, dict[str, tuple[list[float], list[float]]]]:
    """The table of `exit_sweep`, and by method the mean numbers of layers and the shares that run all."""
    last = validation.provenance.identity.n_layers
    maps.provenance.check_same(validation.provenance, ours="the maps", theirs="the activations")
    readout.check_same(validation.provenance)
    absent = [layer for layer in range(1, last) if (layer, last) not in maps]
    if absent:
        raise InputError(f"There is no map from layer {absent[0]} to the last layer {last}.")
    positions = torch.from_numpy(validation.examples.positions)
    rows: list[dict[str, Any]] = []
    reaching: dict[str, tuple[list[float], list[float]]] = {}
    for method, sweep in _METHODS.items():
        substitutes = [_substitute(readout, maps, validation, method, layer) for layer in range(1, last + 1)]
        confidence = exit_confidences(readout, validation[last], substitutes, name=method, progress=progress)
        for layer in range(1, last + 1):
            fixed = metrics.proportion(confidence.right[:, layer - 1])
            rows.append(
                validation_row(EXIT, validation, method, layer, last, "precision", 1, fixed) | {"lam": np.nan}
            )
        layers, shares = reaching.setdefault(method, ([], []))
        for lam in sweep:
            left = exit_layers(confidence.difference, thresholds(positions, lam))
            precision = metrics.proportion(confidence.right.gather(1, left[:, None] - 1))
            mean = float(left.double().mean())
            layers.append(mean)
            shares.append(float((left == last).double().mean()))
            rows.append(
                validation_row(EXIT, validation, method, mean, last, "precision", 1, precision) | {"lam": lam}
            )
    return result_table(rows, "lam"), reaching


def _substitute(
    readout: Readout, maps: MapSet, validation: Activations, method: str, layer: int
) -> Substitute:
    last = validation.provenance.identity.n_layers
    mapped = maps[layer, last] if method == "mat" and layer < last else None

    def substitute(part: slice) -> Tensor:
        h = validation[layer][part].to(readout.device)
        return h if mapped is None else mapped(h)

    return substitute


@checked
def layers_saved(table: pd.DataFrame, method: str, precision: Fraction = 0.95) -> float:
    """Layers saved at a given Precision@1 by early exit.

    The points of the sweep, ordered by the number of layers, are joined by straight lines; the answer is
    the last layer less the fewest layers at which these lines reach the precision. 0 if only the full
    model does.

    Raises
    ------
    InputError
        The table has no early exit by this method, or it nowhere reaches the precision; or the precision is
        no share.
    """
    check_columns(table, ("method", "layer", "target", "value", "lam"), what="the table of lens.exit_sweep")
    part = table[(table["method"] == method) & table["lam"].notna()]
    if part.empty:
        raise InputError(
            f"The table has no early exit by {short(method)}. Expected a method that it has: "
            f"{short(sorted(set(table['method'])))}."
        )
    return float(table["target"].max()) - _crossing(
        part["layer"].to_list(), part["value"].to_list(), precision
    )


@checked
def savings(table: pd.DataFrame, precision: float = 0.95) -> pd.DataFrame:
    """Layers saved by each method at a given Precision@1, see `layers_saved`.

    Columns are ``method, saved, n_layers, share``, where ``share`` is that of all layers.
    """
    check_columns(table, ["target"], what="the table of lens.exit_sweep")
    n_layers = int(table["target"].max())
    rows = [(method, layers_saved(table, method, precision)) for method in _METHODS]
    return pd.DataFrame(
        [(method, saved, n_layers, saved / n_layers) for method, saved in rows],
        columns=["method", "saved", "n_layers", "share"],
    )


def _crossing(layers: Sequence[float], values: Sequence[float], wanted: float) -> float:
    points = sorted(zip(layers, values, strict=True))
    if points[0][1] >= wanted:
        return points[0][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y0 < wanted <= y1:
            return x0 + (x1 - x0) * (wanted - y0) / (y1 - y0)
    raise InputError(f"No threshold of the sweep reaches a precision of {wanted}.")
