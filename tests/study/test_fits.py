"""The ridge of a study with few samples."""

from __future__ import annotations

import numpy as np

from matlens.study.steps import fit_maps, typical_penalty


def test_few_samples_have_a_ridge_of_their_median_squared_norm(small_model, collect, tmp_path):
    train, _ = collect(small_model("llama-sinks"), tmp_path)  # whose mean norm is far from the median
    maps = fit_maps(tmp_path, pairs="last", ridge=None, progress=False)
    norms = [(train[layer].double().numpy() ** 2).sum(1) for layer in range(3)]
    ridge = typical_penalty(train, ["h.0", "h.1", "h.2"])
    assert ridge == float(f"{np.median(np.median(norms, axis=1)):.1e}")
    assert maps.provenance.details["ridge"] == ridge > 0
    x, y = (train[layer].double().numpy() for layer in (1, 3))
    expected = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y).T
    np.testing.assert_allclose(maps[1, 3].weight, expected, rtol=1e-3, atol=1e-4)
