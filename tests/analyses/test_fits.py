"""Maps of several fits are least squares on what each was fitted on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import N_LAYERS
from judged_by_hand import assert_judged, judged_by_hand
from paper_a.fits import compare_fits, fit_drawn_and_all, fit_quality_by_size, fits_side_by_side
from plain_streams import corpus, mapped, plain_stream
from sklearn.metrics import r2_score

from matlens import InputError, Readout, collect, make_examples

Models = Callable[[str], Any]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_both_fits_are_least_squares_on_their_positions(
    name: str, small_model: Models, plain_model: Models
) -> None:
    model, plain = small_model(name), plain_model(name)
    examples = make_examples(model, corpus("train", 90, 0), seed=1)
    tested = make_examples(model, corpus("validation", 30, 1), seed=1)
    maps = fit_drawn_and_all(model, examples, progress=False)
    assert list(maps) == ["drawn", "all"]
    validation = collect(model, tested, progress=False)
    table = compare_fits(Readout(model), maps, validation)
    test = plain_stream(name, plain, tested)
    substitutes = {}
    for positions, fits in maps.items():
        train = plain_stream(name, plain, examples, positions)
        assert fits.provenance.positions == positions
        r2 = table[(table["method"] == f"mat, {positions}") & (table["metric"] == "r2")]
        assert r2[["layer", "target"]].to_numpy().tolist() == [[layer, N_LAYERS] for layer in range(3)]
        for layer, value in zip(range(N_LAYERS), r2["value"], strict=True):
            h = mapped(train, test, layer)
            assert value == pytest.approx(r2_score(test[-1].numpy(), h.numpy()), abs=1e-4)
            substitutes[f"mat, {positions}", layer] = h
        substitutes[f"mat, {positions}", N_LAYERS] = test[-1]
    judged = judged_by_hand(plain, test[-1], substitutes)
    assert_judged(table[table["metric"] != "r2"], judged)
    assert set(table["method"]) == {"mat, drawn", "mat, all"}
    wide = fits_side_by_side(table)
    assert wide.columns.tolist() == ["P@1 mat, all", "P@1 mat, drawn", "r2 mat, all", "r2 mat, drawn"]
    for (method, layer), (first, *_) in judged.items():
        assert wide.loc[layer, f"P@1 {method}"] == pytest.approx(first)
    for row in table[table["metric"] == "r2"].itertuples():
        assert wide.loc[row.layer, f"r2 {row.method}"] == row.value


def test_a_masked_model_has_no_predictions_at_all_positions(small_model: Models) -> None:
    examples = make_examples(small_model("bert"), corpus("train", 9, 0))
    with pytest.raises(InputError, match="only the drawn token of each sentence is masked"):
        fit_drawn_and_all(small_model("bert"), examples)


def test_fewer_and_fewer_sentences_are_the_first_ones(small_model: Models) -> None:
    model = small_model("llama")
    train, validation = (
        collect(model, make_examples(model, corpus(name, n, seed)), progress=False)
        for name, n, seed in (("train", 181, 0), ("validation", 30, 1))
    )
    table = fit_quality_by_size(train, validation, halvings=2, progress=False)
    assert set(zip(table["n_fitted"], table["layer"], strict=True)) == {
        (n, layer) for n in (181, 90, 45) for layer in range(N_LAYERS)
    }
    assert set(table["method"]) == {"mat"}
    for row in table.itertuples():
        x, y = (train[layer][: row.n_fitted].double().numpy() for layer in (row.layer, N_LAYERS))
        weight = np.linalg.lstsq(x, y, rcond=None)[0]
        expected = r2_score(validation[N_LAYERS], validation[row.layer].double().numpy() @ weight)
        assert row.value == pytest.approx(expected, abs=1e-4)
    with pytest.raises(InputError, match="181 sentences cannot be halved 8 times"):
        fit_quality_by_size(train, validation, halvings=8, progress=False)
