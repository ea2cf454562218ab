"""Leaving the model early by any lens (paper A, section 6 and Figure 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from matlens import metrics
from matlens.activations.activations import Activations
from matlens.errors import InputError, checked
from matlens.io.tables import result_table
from matlens.lens.early_exit import (
    EXIT,
    SWEEP_ID,
    confidence_in_top,
    exit_layers,
    layers_saved,
    thresholds,
)
from matlens.lens.judgement import chunks
from matlens.lens.lens import Lens
from matlens.lens.quality import validation_row
from matlens.lens.report import shared_layers
from matlens.parallel import Bar


@checked
def lens_exit_sweep(
    lenses: Mapping[str, Lens],
    validation: Activations,
    *,
    layers: Sequence[int] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Precision@1 against the mean number of layers run, where the model is left by each lens's confidence.

    The table is such as `matlens.lens.exit_sweep` makes, with the lenses as methods. The model can be left
    after the layers that all lenses have, those from 1, and after the last.

    Parameters
    ----------
    lenses
        Lenses of one model, on it, by what they are called.
    validation
        Vectors of the layers and of the last one.
    layers
        Layers to leave after, by default all that there are.
    progress
        Whether to show a bar.

    Raises
    ------
    InputError
        There is no lens, one is of another model, or there is no layer to leave after.
    """
    if not lenses:
        raise InputError("There is nothing to leave the model by. Expected a lens or more.")
    for lens in lenses.values():
        lens.provenance.check_same(validation.provenance, ours="the lens", theirs="the activations")
    last = validation.provenance.identity.n_layers
    wanted = [layer for layer in shared_layers(lenses, validation, layers) if layer > 0]
    if not wanted:
        raise InputError(
            "There is no layer to leave the model after. Expected one from 1 that was collected."
        )
    numbers = torch.tensor([*wanted, last]).double()
    positions = torch.from_numpy(np.asarray(validation.places)).long()
    rows: list[dict[str, Any]] = []
    for name, lens in Bar(list(lenses.items()), desc="early exit", disable=not progress):
        confidence, right = _confidences(lens, validation, [*wanted, last])
        for column, layer in enumerate([*wanted, last]):
            fixed = metrics.proportion(right[:, column])
            rows.append(
                validation_row(EXIT, validation, name, layer, last, "precision", 1, fixed) | {"lam": np.nan}
            )
        for lam in SWEEP_ID:
            left = exit_layers(confidence, thresholds(positions, lam)) - 1
            share = metrics.proportion(right.gather(1, left[:, None]))
            mean = float(numbers[left].mean())
            rows.append(
                validation_row(EXIT, validation, name, mean, last, "precision", 1, share) | {"lam": lam}
            )
    return result_table(rows, "lam")


def _confidences(lens: Lens, validation: Activations, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``p1 - p2`` of each row and layer, and whether the first token is the model's own."""
    n, last = validation.n_rows, lens.n_layers
    confidence, right = torch.empty(n, len(layers)), torch.empty(n, len(layers), dtype=torch.bool)
    for part in chunks(n):
        true = lens.logits(validation[last][part], last)
        for column, layer in enumerate(layers):
            logits = lens.logits(validation[layer][part], layer)
            confidence[part, column] = confidence_in_top(logits).float().cpu()
            right[part, column] = (metrics.rank(true, logits.argmax(-1)) == 1).cpu()
    return confidence, right


@checked
def lens_savings(table: pd.DataFrame, precision: float = 0.95) -> pd.DataFrame:
    """Layers saved by each lens at a Precision@1, see `matlens.lens.layers_saved`.

    Columns are ``method, saved, n_layers, share``.

    Raises
    ------
    InputError
        It is no table of `lens_exit_sweep`.
    """
    if "method" not in table or "target" not in table or table.empty:
        raise InputError("This is no table of lens.lens_exit_sweep. Expected one.")
    n_layers = int(table["target"].max())
    saved = {str(name): layers_saved(table, str(name), precision) for name in table["method"].unique()}
    return pd.DataFrame(
        [(name, value, n_layers, value / n_layers) for name, value in saved.items()],
        columns=["method", "saved", "n_layers", "share"],
    )
