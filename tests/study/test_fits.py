"""Maps fitted on what was collected: least squares, penalties, what a failure leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import N_LAYERS

import matlens
from matlens.linear.fitting import fit_samples
from matlens.study.steps import fit_maps, typical_penalty


def test_fit_is_least_squares_on_the_training_part(collected: Path) -> None:
    maps = fit_maps(collected, progress=False)
    assert len(maps) == N_LAYERS * (N_LAYERS + 1) // 2
    train = matlens.activations.Activations.load(collected / "train")
    for (source, target), linear in maps.items():
        x, y = train[source].double().numpy(), train[target].double().numpy()
        expected = np.linalg.lstsq(x, y, rcond=None)[0].T
        scale = np.abs(expected).max()
        np.testing.assert_allclose(linear.weight.numpy() / scale, expected / scale, atol=1e-4)


def test_a_failed_fit_leaves_nothing(collected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fit_samples

    def fails_late(*arguments: Any, **options: Any) -> Any:
        for n, linear in enumerate(fit(*arguments, **options)):
            if n == 4:
                assert (collected / "maps" / "h.0.safetensors").is_file()
                raise RuntimeError("out of memory")
            yield linear

    with monkeypatch.context() as patch:
        patch.setattr("matlens.study.steps.fit_samples", fails_late)
        with pytest.raises(RuntimeError, match="out of memory"):
            fit_maps(collected, progress=False)
    assert not (collected / "maps").exists()
    assert len(fit_maps(collected, progress=False)) == N_LAYERS * (N_LAYERS + 1) // 2


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
