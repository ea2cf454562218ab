"""Maps of several fits are least squares on what each was fitted on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import N_LAYERS
from plain_streams import corpus
from sample_sizes import fit_quality_by_size
from sklearn.metrics import r2_score

from matlens import collect, make_examples

Models = Callable[[str], Any]


def test_fewer_and_fewer_sentences_are_the_first_ones(small_model: Models) -> None:
    model = small_model("llama")
    train, validation = (
        collect(model, make_examples(model, corpus(name, n, seed)), progress=False)
        for name, n, seed in (("train", 181, 0), ("validation", 30, 1))
    )
    table = fit_quality_by_size(train, validation, halvings=2)
    assert set(zip(table["n_fitted"], table["layer"], strict=True)) == {
        (n, layer) for n in (181, 90, 45) for layer in range(N_LAYERS)
    }
    assert set(table["method"]) == {"mat"}
    for row in table.itertuples():
        x, y = (train[layer][: row.n_fitted].double().numpy() for layer in (row.layer, N_LAYERS))
        weight = np.linalg.lstsq(x, y, rcond=None)[0]
        expected = r2_score(validation[N_LAYERS], validation[row.layer].double().numpy() @ weight)
        assert row.value == pytest.approx(expected, abs=1e-4)
