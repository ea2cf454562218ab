"""Maps fitted on what was collected: least squares, penalties, what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_LAYERS

import matlens
from matlens.linear.fitting import fit_samples
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
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


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf")])
def test_a_penalty_that_makes_no_sense(collected: Path, ridge: float) -> None:
    with pytest.raises(matlens.InputError, match=r"^ridge must be"):
        fit_maps(collected, ridge=ridge, progress=False)
    assert not (collected / "maps").exists()


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


def test_maps_are_saved_whatever_their_order(tmp_path: Path) -> None:
    pairs = [("h.0", "h.3"), ("h.1", "h.3"), ("h.0", "h.2"), ("h.1", "h.2")]
    maps = MapSet([LinearMap(torch.eye(2) * n, None, *pair) for n, pair in enumerate(pairs)])
    maps.save(tmp_path / "maps")
    loaded = MapSet.load(tmp_path / "maps")
    assert list(loaded) == pairs
    for n, pair in enumerate(pairs):
        assert torch.equal(loaded[pair].weight, torch.eye(2) * n)


def test_negative_layers_are_those_of_the_model(
    small_model: Callable[[str], Any], sentences: matlens.data.Corpus
) -> None:
    model = small_model("llama")
    vectors = matlens.collect(model, matlens.make_examples(model, sentences), progress=False)
    (linear,) = matlens.linear.fit_samples(vectors, [(0, -1)])
    assert (linear.source, linear.target) == ("h.0", f"h.{N_LAYERS}")
    assert torch.equal(vectors[-1], vectors[N_LAYERS])


def test_a_typical_penalty_is_the_squared_norm_of_a_typical_sample(collected: Path) -> None:
    train = matlens.activations.Activations.load(collected / "train")
    norms = [np.median((train[layer].double().numpy() ** 2).sum(1)) for layer in (0, 2)]
    penalty = typical_penalty(train, ["h.0", "h.2"])
    assert penalty == pytest.approx(min(norms), rel=0.06)  # torch's median of two is the lower
    assert penalty == float(f"{penalty:.1e}")


def test_few_samples_are_met_with_a_ridge_where_none_is_given(collected: Path) -> None:
    maps = fit_maps(collected, pairs="last", ridge=None, progress=False)
    train = matlens.activations.Activations.load(collected / "train")
    ridge = typical_penalty(train, ["h.0", "h.1", "h.2"])
    assert maps.provenance.details["ridge"] == ridge > 0
    x, y = (train[layer].double().numpy() for layer in (1, 3))
    expected = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y).T
    np.testing.assert_allclose(maps[1, 3].weight, expected, rtol=1e-3, atol=1e-4)
