"""Maps fitted on what was collected: least squares, penalties, what a failure leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import matlens
from matlens.study.steps import fit_maps, typical_penalty


def test_few_samples_are_met_with_a_ridge_where_none_is_given(collected: Path) -> None:
    maps = fit_maps(collected, pairs="last", ridge=None, progress=False)
    train = matlens.activations.Activations.load(collected / "train")
    norms = [np.median((train[layer].double().numpy() ** 2).sum(1)) for layer in range(3)]
    ridge = typical_penalty(train, ["h.0", "h.1", "h.2"])
    assert ridge == float(f"{np.median(norms):.1e}")
    assert maps.provenance.details["ridge"] == ridge > 0
    x, y = (train[layer].double().numpy() for layer in (1, 3))
    expected = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y).T
    np.testing.assert_allclose(maps[1, 3].weight, expected, rtol=1e-3, atol=1e-4)
