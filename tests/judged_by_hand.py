"""Tables of predictions compared with what plain models predict, without any of matlens' code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest
import torch
from independent import make_readout, prediction_quality
from torch import Tensor


def judged_by_hand(plain: Any, truth: Tensor, substitutes: Mapping[Any, Tensor]) -> dict[Any, list[float]]:
    """Precision@1, 5, 10 and surprisal of each substitute for ``h^L``."""
    stacked = torch.stack([h.float() for h in substitutes.values()])
    precision, surprisal = prediction_quality(make_readout(plain), stacked, truth.float())
    numbers = zip(precision.tolist(), surprisal.tolist(), strict=True)
    return {key: [*shares, nats] for key, (shares, nats) in zip(substitutes, numbers, strict=True)}


def in_table(table: pd.DataFrame, method: str, layer: float) -> list[float]:
    """The same four numbers of a table's method at a layer."""
    rows = table[(table["method"] == method) & (table["layer"] == layer)]
    assert rows["metric"].tolist() == ["precision"] * 3 + ["surprisal"], (method, layer)
    assert rows["k"].tolist()[:3] == [1, 5, 10]
    return [float(value) for value in rows["value"]]


def assert_judged(
    table: pd.DataFrame, expected: Mapping[tuple[str, int], list[float]], *, nats: float = 1e-4
) -> None:
    """The table's numbers are the expected ones, by method and layer, and each method has its own."""
    for (method, layer), numbers in expected.items():
        assert in_table(table, method, layer) == pytest.approx(numbers, abs=nats), (method, layer)
