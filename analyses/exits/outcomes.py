"""Accuracy and layers saved of early-exit methods, on the same examples.

A method is evaluated by the share of examples for which its exit layer gives the model's own prediction, and
by the layers saved on these. An exit at layer ``l`` reads the prediction from the residual stream after its
FFN, so ``n_layers - 1 - l`` layers are not run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int

from matlens import InputError

SUMMARY = (
    "method", "accuracy", "accuracy_sd", "saved", "saved_sd", "saved_share", "exited", "chance", "above",
    "above_sd", "seeds",
)  # fmt: skip
FEWEST_EXAMPLES = 10  # that can be split into three parts, or tested in ten


class ExampleSplit(NamedTuple):
    """Rows of the examples to train on, to calibrate on, and to test on."""

    train: Int[np.ndarray, " n_train"]
    calibration: Int[np.ndarray, " n_calibration"]
    test: Int[np.ndarray, " n_test"]


def split_examples(n: int, *, seed: int = 0) -> ExampleSplit:
    """Split ``n`` examples at random: 80%, 10% and 10%, as in the paper (section 6.2)."""
    if n < FEWEST_EXAMPLES:
        raise InputError(
            f"{n} examples cannot be split into training, calibration and test. Expected "
            f"{FEWEST_EXAMPLES} or more."
        )
    order, tenth = np.random.default_rng(seed).permutation(n), n // 10
    return ExampleSplit(order[2 * tenth :], order[tenth : 2 * tenth], order[:tenth])


def first_exit(signals: Bool[np.ndarray, "n n_layers"]) -> Int[np.ndarray, " n"]:
    """The first layer of each example with a signal, or the last layer."""
    return np.where(signals.any(1), signals.argmax(1), signals.shape[1] - 1)


class EvaluatedExits(NamedTuple):
    """Evaluation of one early-exit method (section 6.2).

    Attributes
    ----------
    accuracy
        Share of examples whose exit layer gives the model's prediction.
    saved
        Mean number of layers that are not run, over these examples; NaN if there are none.
    exited
        Share of examples, right or not, that exit before the last layer.
    chance
        Expected accuracy if the same exit layers are assigned to the examples at random. Accuracy above it
        comes from choosing the right examples.
    chance_sd
        Standard deviation of the accuracy over random assignments.
    """

    accuracy: float
    saved: float
    exited: float
    chance: float
    chance_sd: float


def evaluate_exits(layers: Int[np.ndarray, " n"], right: Bool[np.ndarray, "n n_layers"]) -> EvaluatedExits:
    """Evaluate exit layers, given the layers that agree with the last one."""
    n, n_layers = right.shape
    hits, saved = right[np.arange(n), layers], n_layers - 1 - layers
    return EvaluatedExits(
        accuracy=float(hits.mean()),
        saved=float(saved[hits].mean()) if hits.any() else float("nan"),
        exited=float((saved > 0).mean()),
        chance=float(right.mean(0)[layers].mean()),
        chance_sd=_deviation_of_chance(layers, right),
    )


def _deviation_of_chance(layers: Int[np.ndarray, " n"], right: Bool[np.ndarray, "n n_layers"]) -> float:
    """Standard deviation of the accuracy of randomly assigned layers (Hoeffding 1951)."""
    n, n_layers = right.shape
    if n == 1:
        return 0.0
    counts = np.bincount(layers, minlength=n_layers)
    interaction = right - right.mean(0) - ((right @ counts) / n)[:, None] + (right.mean(0) @ counts) / n
    return math.sqrt(float(np.square(interaction).sum(0) @ counts) / (n - 1)) / n


def summarize_exits(evaluated: Mapping[str, Sequence[EvaluatedExits]], n_layers: int) -> pd.DataFrame:
    """Accuracy and layers saved of each method over the seeds (Table 6), one row each.

    Columns are `SUMMARY`; ``sd`` is the standard deviation over the seeds, NaN for one; ``saved_share`` is a
    share of all layers; ``above`` is the accuracy minus chance. Seeds without a right example do not count
    for layers saved.
    """
    rows = []
    for method, of_seeds in evaluated.items():
        per_seed = pd.DataFrame(of_seeds)
        per_seed["above"] = per_seed["accuracy"] - per_seed["chance"]
        mean, sd = per_seed.mean(), per_seed.std()
        deviations = {f"{name}_sd": sd[name] for name in ("accuracy", "saved", "above")}
        shares = {"saved_share": mean["saved"] / n_layers, "seeds": len(of_seeds)}
        rows.append({"method": method, **mean, **deviations, **shares})
    return pd.DataFrame(rows)[list(SUMMARY)]
