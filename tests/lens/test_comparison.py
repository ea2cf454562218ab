"""Lenses compared on tokens that nothing was fitted on, their matrices, and what each took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, SINK_TOKENS, make_sentences
from sklearn.metrics import r2_score
from small_lenses import linear, numbers
from torch.utils.flop_counter import FlopCounterMode

from matlens import InputError, Lens, Readout, collect, make_examples
from matlens.data import Corpus
from matlens.lens.comparison import (
    METHODS,
    closed_form_flops,
    compare_lenses,
    cosine_table,
    default_methods,
    fit_members,
    jacobian_flops,
    matrix_cosine,
    training_flops,
)
from matlens.lens.config import LensConfig, parse_methods
from matlens.lens.maps import Standardisation
from matlens.lens.open_sets import EvaluationItem
from matlens.lens.trained import LayerTraining, fit_jacobian
from matlens.plots import plot_cosines, plot_report

Models = Callable[[str], Any]
Settings = Callable[[str], Any]


def test_a_decoder_is_reported_on_with_jacobians_and_evaluations(small_model: Models, tmp_path: Path) -> None:
    model, parts = small_model("gpt2"), make_sentences().split(n_train=30, n_validation=10, seed=0)
    items = {"own": [EvaluationItem("a", "w1 w2 w3", (("w4",),)), EvaluationItem("b", "w5", (("w6",),))]}
    methods = ["mat", LensConfig(intercept=True, sinks="exclude"), "polished", "jacobian"]
    names = ["mat", "affine without sinks", "polished", "jacobian"]
    made = compare_lenses(
        model, parts, tmp_path, methods=methods, layers=[1, 2], n_prompts=4, evaluations=items, progress=False
    )
    report = made.report
    assert list(dict.fromkeys(report["method"])) == names
    assert set(report["against"]) == {"", "mat"}
    assert set(report["layer"].dropna()) == {1, 2}
    assert (report.loc[report["metric"] == "kl", "n"] == 10).all()
    assert set(made.exits["method"]) == set(names)
    assert made.evaluations is not None
    assert set(made.evaluations["method"]) == set(names)
    assert made.cosines is not None
    longest = sorted(parts[0].sentences, key=lambda text: (-len(text.split()), text))[:4]
    halves = [fit_jacobian(model, longest[i::2], layers=[1, 2], progress=False) for i in (0, 1)]
    cosine = made.cosines.set_index(["method", "layer"])["value"]
    first, second = (half.matrix(2) for half in halves)
    assert cosine["halves of jacobian", 2] == pytest.approx(matrix_cosine(first, second))
    mat = Lens.fit(model, parts[0], method="mat", progress=False)
    expected = matrix_cosine(mat.matrix(2), (first + second) / 2)
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
    for figure in (plot_report(report), plot_cosines(made.cosines)):
        assert figure.axes


def test_a_masked_model_is_reported_on_at_its_masks(small_model: Models, tmp_path: Path) -> None:
    model, parts = small_model("bert"), make_sentences().split(n_train=30, n_validation=10, seed=0)
    made = compare_lenses(model, parts, tmp_path, methods=["id", "affine", "polished"], progress=False)
    assert made.origin["n_rows"] == 30
    assert made.origin["layers"] == [1, 2]
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
    methods = ["mat", LensConfig(sinks="exclude"), "id"]

    def at_sinks(seed: int) -> np.ndarray:
        examples = make_examples(model, parts[1], seed=seed)
        return np.isin(examples.tokens[examples.offsets[:-1] + examples.positions], SINK_TOKENS)

    seed = next(seed for seed in range(1, 99) if at_sinks(seed).sum() > 1)
    made = compare_lenses(model, parts, tmp_path, methods=methods, layers=[1], seed=seed, progress=False)
    train = collect(model, make_examples(model, parts[0], seed=seed), positions="all", progress=False)
    validation = collect(model, make_examples(model, parts[1], seed=seed), progress=False)
    fitted_sinks, sinks = np.isin(train.examples.tokens, SINK_TOKENS), at_sinks(seed)
    assert 1 < sinks.sum() < len(sinks) - 3
    assert made.origin["n_sinks"] == sinks.sum()
    truth, h = (validation[layer].double().numpy() for layer in (3, 1))
    found = made.report.set_index(["method", "metric", "against", "layer"])["value"]
    for name in ("mat", "mat without sinks", "id"):
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
    with pytest.raises(InputError, match="against must be one of"):
        compare_lenses(model, parts, tmp_path, methods=["mat"], against="tuned")
    with pytest.raises(InputError, match="n_prompts"):
        compare_lenses(model, parts, tmp_path, n_prompts=1)
    one = Corpus("one", parts[0].sentences[:1], 1, 0, 0, 0)
    with pytest.raises(InputError, match="two halves"):
        compare_lenses(model, (one, parts[1]), tmp_path, methods=["jacobian"], layers=[1])


# Lenses fitted one by one


def test_lenses_fitted_one_by_one_are_those_of_one_call(setting: Settings) -> None:
    model, train, _ = setting("llama")
    names = ["id", "mat", "scaled", "polished", "tuned"]
    members = fit_members(model, train, parse_methods(names), [1], progress=False)
    assert sorted(members) == sorted(names)
    for name, lens in Lens.fit(model, train, method=names, layers=[1], progress=False).items():
        assert members[name].lens.digest == lens.digest
        assert members[name].lens.method == name
    assert members["id"].seconds == members["id"].flops == 0
    assert all(members[name].seconds > 0 for name in names[1:])
    assert members["polished"].flops > members["scaled"].flops > members["mat"].flops > 0


def test_a_masked_model_has_no_standardised_lenses(setting: Settings) -> None:
    assert default_methods(setting("bert").model) == [name for name in METHODS if "normed" not in name]
    assert default_methods(setting("llama").model) == list(METHODS)


# Cosines


def matrix(seed: int) -> torch.Tensor:
    return numbers(D_MODEL, D_MODEL, seed=seed)


def test_the_cosine_is_that_of_all_numbers() -> None:
    a, b = matrix(0), matrix(0) + matrix(1)
    assert matrix_cosine(a, b) == pytest.approx(float(np.corrcoef(a.flatten(), b.flatten())[0, 1]), abs=0.01)
    assert matrix_cosine(a, -3 * a) == pytest.approx(-1)
    assert np.isnan(matrix_cosine(a, 0 * a))


def test_the_ceiling_is_what_noise_of_that_size_leaves(small_model: Models) -> None:
    identity = Lens.identity(small_model("llama"))
    truth = matrix(0)

    def noisy(seed: int, size: float) -> Lens:
        maps = {layer: linear(layer, truth + size * matrix(100 * layer + seed)) for layer in (1, 2)}
        return replace(identity, maps=maps)

    def mean(halves: tuple[Lens, Lens]) -> Lens:
        maps = {n: linear(n, (halves[0].matrix(n) + halves[1].matrix(n)) / 2) for n in (1, 2)}
        return replace(identity, maps=maps)

    halves = {"mat": (noisy(1, 0.5), noisy(2, 0.5)), "jacobian": (noisy(3, 1.0), noisy(4, 1.0))}
    table = cosine_table({name: mean(pair) for name, pair in halves.items()}, halves)
    values = table.set_index(["method", "layer"])["value"]
    for layer in (1, 2):
        assert values["halves of jacobian", layer] == pytest.approx(0.5, abs=0.05)
        # Both are the same matrix and noise, so the cosine is as high as noise lets it be.
        ceiling = values["ceiling of mat and jacobian", layer]
        assert values["mat and jacobian", layer] == pytest.approx(ceiling, abs=0.03)
        assert ceiling == pytest.approx((1 / 1.125 / 1.5) ** 0.5, abs=0.03)
    apart = cosine_table({"a": noisy(1, 0), "b": replace(identity, maps={1: linear(1, matrix(9))})})
    assert set(apart["method"]) == {"a and b"}
    assert abs(apart["value"].item()) < 0.1


@pytest.mark.refused
def test_matrices_of_another_unit_are_refused(small_model: Models) -> None:
    lens = Lens.identity(small_model("llama"))
    with pytest.raises(InputError, match="two or more that"):
        cosine_table({"a": lens})
    with pytest.raises(InputError, match="norm before"):
        cosine_table({"a": lens, "b": replace(lens, norm=Standardisation("rms"))})
    with pytest.raises(InputError, match="must have one shape"):
        matrix_cosine(torch.zeros(2, 2), torch.zeros(2, 3))
    with pytest.raises(InputError, match="no layer in common"):
        cosine_table({"a": replace(lens, maps={0: None}), "b": replace(lens, maps={1: None})})


# Operations


def counted(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_operations_of_training_are_those_that_are_done(small_model: Models) -> None:
    readout, h = Readout(small_model("llama")), numbers(64, D_MODEL)
    training = LayerTraining(readout, h, h + 1)
    seen = counted(lambda: training.tune(steps=4))
    assert training_flops(2 * 64, D_MODEL, 60) == seen
    training = LayerTraining(readout, h, h + 1)
    seen = counted(lambda: training.polish(steps=2, batch=32, tokens=60))
    pilot = training_flops(2 * 32, D_MODEL, 60, pilot=64, d_vocab=60)
    orthogonal = 2 * 5 * 3 * 2 * D_MODEL**3  # of a step's matrix, which does not grow with rows or tokens
    assert seen == pilot + orthogonal


def test_operations_of_jacobians_are_those_of_as_many_passes(small_model: Models) -> None:
    model, tokens = small_model("llama"), torch.arange(2, 22)[None]
    with torch.no_grad():
        seen = counted(lambda: model(tokens))
    parameters = sum(weight.numel() for weight in model.blocks.parameters() if weight.ndim == 2)
    # Back through the blocks to activations alone is as much work as forward. Of a pass, the unembedding and
    # attention's own products, which grow with the square of the length, are not counted.
    others = 2 * 20 * D_MODEL * 60 + 2 * 2 * 20**2 * D_MODEL * N_LAYERS
    assert jacobian_flops(20, D_MODEL, parameters, at_once=1) == (seen - others) * (D_MODEL + 1)


def test_closed_forms_grow_with_rows_and_with_the_square_of_the_width() -> None:
    assert closed_form_flops(20_000, 100) == pytest.approx(10 * closed_form_flops(2_000, 100), rel=0.01)
    assert closed_form_flops(100_000, 200) == pytest.approx(4 * closed_form_flops(100_000, 100), rel=0.01)
    assert 0 < closed_form_flops(3, 100) < closed_form_flops(100, 100)
