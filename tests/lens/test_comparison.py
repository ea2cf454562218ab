"""Lenses compared on tokens that nothing was fitted on, and what each took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import SINK_TOKENS, make_sentences
from sklearn.metrics import r2_score

from matlens import Lens, LensConfig, collect, make_examples
from matlens.lens import summarize
from matlens.lens.comparison import compare_lenses, default_methods
from matlens.lens.config import parse_methods
from matlens.lens.open_sets import EvaluationItem
from matlens.plots import plot_report

Models = Callable[[str], Any]
NO_SINKS = LensConfig(sinks="exclude")


def test_a_decoder_is_compared_with_jacobians_fitted_lenses_and_open_sets(small_model, tmp_path):
    model, parts = small_model("gpt2"), make_sentences().split(n_train=30, n_validation=10, seed=0)
    items = {"own": [EvaluationItem("a", "w1 w2 w3", (("w4",),)), EvaluationItem("b", "w5", (("w6",),))]}
    methods = ["id", "mat", NO_SINKS, "polished", "jacobian"]
    mine = Lens.fit(model, parts[0], method=LensConfig(ridge=0.1), layers=[1, 2], progress=False)
    made = compare_lenses(
        model, parts, tmp_path, methods=methods, fitted={"mine": (mine, 6.0)}, layers=[1, 2], n_prompts=2,
        evaluations=items, seed=3, progress=False,
    )  # fmt: skip
    names = ["id", "mat", "sinks=exclude", "polished", "jacobian", "mine"]
    assert list(dict.fromkeys(made.report["method"])) == list(made.lenses) == names
    assert set(made.report["against"]) == {"", "mat"}
    assert set(made.report["layer"].dropna()) == {1, 2}
    assert (made.report.loc[made.report["metric"] == "kl", "n"] == 10).all()
    assert set(made.exits["method"]) == set(names)
    assert made.evaluations is not None
    assert set(made.evaluations["method"]) == set(names)
    together = Lens.fit(model, parts[0], method=methods, layers=[1, 2], n_prompts=2, seed=3, progress=False)
    assert {name: lens.digest for name, lens in together.items()} == {
        name: made.lenses[name].digest for name in together
    }
    assert made.origin["n_rows"] == sum(len(text.split()) for text in parts[0].sentences)
    assert made.origin["n_prompts"] == 2
    wide = summarize(made.report, made.exits)
    assert wide.loc["mine", "seconds"] == 6.0 / 2
    plain = made.report[(made.report["method"] == "mat") & (made.report["against"] == "")]
    assert wide.loc["mat", "kl"] == pytest.approx(plain.loc[plain["metric"] == "kl", "value"].mean())
    assert plot_report(made.report).axes


def test_a_masked_model_is_compared_at_its_masks(small_model, tmp_path):
    model, parts = small_model("bert"), make_sentences().split(n_train=30, n_validation=10, seed=0)
    made = compare_lenses(model, parts, tmp_path, methods=["id", "affine", "polished"], progress=False)
    assert made.origin["n_rows"] == 30
    assert made.origin["layers"] == [1, 2]
    assert made.evaluations is None
    again = compare_lenses(model, parts, tmp_path, methods=["affine"], progress=False)
    seeded = compare_lenses(model, parts, tmp_path / "3", methods=["affine"], seed=3, progress=False)
    alone = Lens.fit(
        model, parts[0], method="affine", layers=[1, 2], positions="sampled", seed=3, progress=False
    )
    assert seeded.lenses["affine"].digest == alone.digest != made.lenses["affine"].digest
    rows = [
        t[(t["method"] == "affine") & t["layer"].notna()].reset_index(drop=True)
        for t in (made.report, again.report)
    ]
    assert rows[0].equals(rows[1])
    assert not any(isinstance(it, LensConfig) and it.standardise for it in default_methods(model))
    assert list(parse_methods(default_methods(small_model("llama")))) == [
        "id", "mat", "affine", "ridge=loo+toward=identity", "weighted", "standardise",
        "standardise+intercept", "scaled", "polished",
    ]  # fmt: skip


def test_sinks_are_those_of_the_validation_sentences(small_model, tmp_path):
    """Each lens is fitted with or without sinks, and r2 is given with and without those of validation."""
    model, parts = small_model("llama-sinks"), make_sentences().split(n_train=25, n_validation=15, seed=0)

    def at_sinks(seed: int) -> np.ndarray:
        examples = make_examples(model, parts[1], seed=seed)
        return np.isin(examples.tokens[examples.offsets[:-1] + examples.positions], SINK_TOKENS)

    seed = next(seed for seed in range(1, 99) if at_sinks(seed).sum() > 1)
    made = compare_lenses(
        model, parts, tmp_path, methods=["mat", NO_SINKS, "id"], layers=[1], seed=seed, progress=False
    )
    train = collect(model, make_examples(model, parts[0], seed=seed), positions="all", progress=False)
    validation = collect(model, make_examples(model, parts[1], seed=seed), progress=False)
    fitted_sinks, sinks = np.isin(train.examples.tokens, SINK_TOKENS), at_sinks(seed)
    assert 1 < sinks.sum() < len(sinks) - 3
    assert made.origin["n_sinks"] == sinks.sum()
    truth, h = (validation[layer].double().numpy() for layer in (3, 1))
    found = made.report.set_index(["method", "metric", "against", "layer"])["value"]
    for name in ("mat", NO_SINKS.name, "id"):
        mapped = h
        if name != "id":
            rows = ~fitted_sinks if name == NO_SINKS.name else slice(None)
            x, y = (train[layer].double().numpy()[rows] for layer in (1, 3))
            mapped = h @ np.linalg.lstsq(x, y, rcond=None)[0]
        for metric, used in (("r2", slice(None)), ("r2 without sinks", ~sinks)):
            expected = r2_score(truth[used], mapped[used])
            assert found[name, metric, "", 1] == pytest.approx(expected, rel=1e-3, abs=1e-4)
