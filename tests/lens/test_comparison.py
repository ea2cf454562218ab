"""The whole report in one call: tables that belong together, made on tokens that nothing was fitted on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SINK_TOKENS, make_sentences
from sklearn.metrics import r2_score

from matlens import InputError, Lens, collect, make_examples
from matlens.data import Corpus
from matlens.lens.comparison import compare_lenses, default_layers
from matlens.lens.cosines import matrix_cosine
from matlens.lens.evaluations import EvaluationItem
from matlens.lens.jacobian import fit_jacobian
from matlens.plots import lens_cosines, lens_measures

Models = Callable[[str], Any]


def test_five_layers_are_spread_evenly() -> None:
    assert default_layers(30) == [5, 10, 15, 20, 25]
    assert default_layers(3) == [1, 2]
    assert default_layers(1) == [0]


def test_a_decoder_is_reported_on_with_jacobians_and_evaluations(small_model: Models, tmp_path: Path) -> None:
    model, parts = small_model("gpt2"), make_sentences().split(n_train=30, n_validation=10, seed=0)
    items = {"own": [EvaluationItem("a", "w1 w2 w3", (("w4",),)), EvaluationItem("b", "w5", (("w6",),))]}
    methods = ["mat", "normed+affine without sinks", "polished", "jacobian"]
    made = compare_lenses(
        model, parts, tmp_path, methods=methods, layers=[1, 2], n_prompts=4, evaluations=items, progress=False
    )
    report = made.report
    assert list(dict.fromkeys(report["method"])) == methods
    assert set(report["against"]) == {"", "mat"}
    assert set(report["layer"].dropna()) == {1, 2}
    assert (report.loc[report["metric"] == "kl", "n"] == 10).all()
    assert set(made.exits["method"]) == set(methods)
    assert made.evaluations is not None
    assert set(made.evaluations["method"]) == set(methods)
    assert made.cosines is not None
    longest = sorted(parts[0].sentences, key=lambda text: (-len(text.split()), text))[:4]
    halves = [fit_jacobian(model, longest[i::2], layers=[1, 2], progress=False) for i in (0, 1)]
    cosine = made.cosines.set_index(["method", "layer"])["value"]
    first, second = (half.maps[2].matrix(32) for half in halves)
    assert cosine["halves of jacobian", 2] == pytest.approx(matrix_cosine(first, second))
    mat = Lens.fit(model, parts[0], method="mat", progress=False)
    expected = matrix_cosine(mat.maps[2].matrix(32), (first + second) / 2)
    assert cosine["mat and jacobian", 2] == pytest.approx(expected, abs=1e-4)
    assert 0 < cosine["ceiling of mat and jacobian", 2] <= 1
    rows = collect(model, make_examples(model, parts[0]), [2, 3], positions="all", progress=False)
    x, y = rows[2].double().numpy(), rows[3].double().numpy()
    n = len(x) // 2
    a, b = (
        torch.from_numpy(np.linalg.lstsq(x[part], y[part], rcond=None)[0].T)
        for part in (slice(n), slice(n, None))
    )
    assert cosine["halves of mat", 2] == pytest.approx(matrix_cosine(a, b), abs=1e-4)
    assert made.origin["n_prompts"] == 4
    assert made.origin["n_rows"] == sum(len(text.split()) for text in parts[0].sentences)
    for figure in (lens_measures(report), lens_cosines(made.cosines)):
        assert figure.axes


def test_a_masked_model_is_reported_on_at_its_masks(small_model: Models, tmp_path: Path) -> None:
    model, parts = small_model("bert"), make_sentences().split(n_train=30, n_validation=10, seed=0)
    made = compare_lenses(model, parts, tmp_path, methods=["id", "affine", "polished"], progress=False)
    assert made.origin["n_rows"] == 30
    assert made.cosines is made.evaluations is None
    again = compare_lenses(model, parts, tmp_path, methods=["affine"], progress=False)
    rows = [
        t[(t["method"] == "affine") & t["layer"].notna()].reset_index(drop=True)
        for t in (made.report, again.report)
    ]
    assert rows[0].equals(rows[1])


def test_sinks_are_those_of_the_validation_sentences(small_model: Models, tmp_path: Path) -> None:
    """Each member is fitted with or without sinks, and r2 is given with and without those of validation."""
    model, parts = small_model("llama-sinks"), make_sentences().split(n_train=25, n_validation=15, seed=0)
    names = ["mat", "mat without sinks", "id"]

    def at_sinks(seed: int) -> np.ndarray:
        examples = make_examples(model, parts[1], seed=seed)
        return np.isin(examples.tokens[examples.offsets[:-1] + examples.positions], SINK_TOKENS)

    seed = next(seed for seed in range(1, 99) if at_sinks(seed).sum() > 1)
    made = compare_lenses(model, parts, tmp_path, methods=names, layers=[1], seed=seed, progress=False)
    train = collect(model, make_examples(model, parts[0], seed=seed), positions="all", progress=False)
    validation = collect(model, make_examples(model, parts[1], seed=seed), progress=False)
    fitted_sinks, sinks = np.isin(train.examples.tokens, SINK_TOKENS), at_sinks(seed)
    assert 1 < sinks.sum() < len(sinks) - 3
    assert made.origin["n_sinks"] == sinks.sum()
    truth, h = (validation[layer].double().numpy() for layer in (3, 1))
    found = made.report.set_index(["method", "metric", "against", "layer"])["value"]
    for name in names:
        mapped = h
        if name != "id":
            rows = ~fitted_sinks if "without" in name else slice(None)
            x, y = (train[layer].double().numpy()[rows] for layer in (1, 3))
            mapped = h @ np.linalg.lstsq(x, y, rcond=None)[0]
        for metric, kept in (("r2", slice(None)), ("r2 without sinks", ~sinks)):
            expected = r2_score(truth[kept], mapped[kept])
            assert found[name, metric, "", 1] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.refused
def test_a_report_that_cannot_be_made_is_refused_before_the_work(small_model: Models, tmp_path: Path) -> None:
    parts = make_sentences().split(n_train=30, n_validation=10, seed=0)
    with pytest.raises(InputError, match="without 'jacobian'"):
        compare_lenses(small_model("bert"), parts, tmp_path, methods=["jacobian"])
    model = small_model("gpt2")
    with pytest.raises(InputError, match="no member 'tuned'"):
        compare_lenses(model, parts, tmp_path, methods=["mat"], against="tuned")
    with pytest.raises(InputError, match="n_prompts"):
        compare_lenses(model, parts, tmp_path, n_prompts=1)
    one = Corpus("one", parts[0].sentences[:1], 1, 0, 0, 0)
    with pytest.raises(InputError, match="two halves"):
        compare_lenses(model, (one, parts[1]), tmp_path, methods=["jacobian"], layers=[1])
