"""Maps of several fits are least squares on what each was fitted on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_LAYERS, WORDS, plain_vectors
from judged_by_hand import assert_judged, judged_by_hand
from paper_a.fits import compare_fits, fit_drawn_and_all, fit_quality_by_size, fits_side_by_side
from sklearn.metrics import r2_score
from torch import Tensor

from matlens import InputError, Readout, collect, make_examples
from matlens.data.corpus import Corpus
from matlens.data.examples import Examples

Models = Callable[[str], Any]


def corpus(name: str, n: int, seed: int) -> Corpus:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, int(rng.integers(4, 9)))) for _ in range(n)]
    return Corpus(name, tuple(texts), n, 0, 0, 0)


def plain_stream(name: str, plain: Any, examples: Examples, positions: str = "drawn") -> list[Tensor]:
    """The stream layer by layer, in float64, sentence by sentence."""
    layers: list[list[Tensor]] = [[] for _ in range(N_LAYERS + 1)]
    ends = zip(examples.offsets[:-1], examples.offsets[1:], examples.positions, strict=True)
    for start, end, position in ends:
        seen = plain_vectors(name, plain, torch.from_numpy(examples.tokens[start:end]))
        chosen = [position] if positions == "drawn" else list(range(end - start))
        for layer, rows in enumerate(layers):
            rows.append(seen[f"h.{layer}"][0, chosen].double())
    return [torch.cat(rows) for rows in layers]


def mapped(train: list[Tensor], test: list[Tensor], layer: int) -> Tensor:
    return test[layer] @ torch.linalg.lstsq(train[layer], train[-1], driver="gelsd").solution


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
