"""Results do not depend on the settings of torch that a notebook begins with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from calibration_texts import running_text
from conftest import make_sentences
from torch import Tensor

import matlens
from matlens import ffn, lens, linearity, pruning
from matlens.data import make_windows
from matlens.lens.trained import LayerTraining

LENSES = [
    "id", "mat", "affine", "scaled", "polished", "tuned", matlens.LensConfig(standardise=True, rank=4),
    matlens.LensConfig(ridge="loo", toward="identity"), matlens.LensConfig(weighted=True),
]  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "no gradients": lambda: torch.set_grad_enabled(False),
    "inference mode": torch.inference_mode,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


def numbers_of(table: pd.DataFrame) -> Tensor:
    seconds = table["metric"].astype(str).str.contains("second") if "metric" in table else False
    return torch.from_numpy(table[~pd.Series(seconds, table.index)].select_dtypes("number").to_numpy(float))


def vectors_and_fits(model: Any) -> dict[str, Any]:
    train, validation = make_sentences().split(n_train=28, n_validation=12, seed=0)
    vectors = matlens.collect(model, matlens.make_examples(model, train), positions="all", progress=False)
    held_out = matlens.collect(model, matlens.make_examples(model, validation), progress=False)
    maps, readout = matlens.MapSet.fit(vectors, pairs="all", progress=False), matlens.Readout(model)
    last, truth = vectors["h.3"], held_out["h.3"]
    return {
        "vectors": last,
        "map": maps[1, 3].weight,
        "log-probabilities": readout.log_probs(last),
        "r2": numbers_of(lens.fit_quality(maps, held_out)),
        "predictions": numbers_of(lens.prediction_quality(readout, maps, held_out)),
        "kl": lens.evaluate(readout, truth, {"id": held_out["h.1"]}, kl=True, confidence=True)["id"].kl,
        "sinks": matlens.find_sinks(model, matlens.make_examples(model, train), progress=False),
    }


def lenses(model: Any) -> dict[str, Any]:
    train, validation = make_sentences().split(n_train=9, n_validation=5, seed=0)
    fitted = matlens.Lens.fit(model, train, method=LENSES, layers=[1], progress=False)
    fitted["jacobian"] = matlens.Lens.fit(
        model, make_sentences(), method="jacobian", layers=[1], n_prompts=1, longest=20, progress=False
    )
    held_out = matlens.collect(model, matlens.make_examples(model, validation), progress=False)
    report = lens.evaluate_lenses(fitted, held_out, progress=False)
    trajectory = fitted["polished"].trajectory("w1 w2 w6").to_dataframe()
    matrices = {name: one.matrix(1) * one.scales.get(1, 1) for name, one in fitted.items()}
    return matrices | {"report": numbers_of(report), "trajectory": numbers_of(trajectory)}


def sub_updates(model: Any) -> dict[str, Any]:
    examples = matlens.make_examples(model, make_sentences()).head(10)
    trace, values = matlens.Trace.run(model, examples, k=3, progress=False), matlens.ValueVectors(model)
    updates = matlens.Updates.run(model, examples, progress=False)
    scores = {f"{key}": score for key, score in trace.score.items()}
    losses = ffn.text_losses(model, examples, progress=False)
    return scores | {
        "norms": trace.norm,
        "relative": ffn.relative_scores(trace, model, "mean")["dominant", "before"],
        "shares": updates.shares(1),
        "random vectors": values.random(1, 3),
        "projected": matlens.Projection.from_model(model).scores(values.layer(1)),
        "losses": torch.from_numpy(losses.total),
        "perplexity": torch.tensor(losses.perplexity(), dtype=torch.float64),
    }


def pruned(model: Any) -> dict[str, Any]:
    windows = make_windows(model, running_text(600), size=24)
    made = pruning.prune(model, windows, 1, heal=2000, progress=False)
    report = pruning.compare_pruned(model, made, make_windows(model, running_text(100, 4), size=24))
    return {name: weight for name, weight in made.model.named_parameters() if "down_proj" in name} | {
        "report": numbers_of(report)
    }


def atlas(model: Any) -> dict[str, Any]:
    fitted, evaluated = (
        make_windows(model, running_text(n, seed), size=16, targets=True) for n, seed in ((200, 3), (64, 4))
    )
    return {"atlas": numbers_of(linearity.linearity_atlas(model, fitted, evaluated, every=2, progress=False))}


CORES = {core.__name__: core for core in (vectors_and_fits, lenses, sub_updates, pruned, atlas)}


@pytest.fixture(scope="module")
def plain(small_model):
    known: dict[str, dict[str, Any]] = {}

    def results(core: str) -> dict[str, Any]:
        if core not in known:
            known[core] = CORES[core](small_model("llama"))
        return known[core]

    return results


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore::matlens.InputWarning")
def test_results_do_not_depend_on_settings_of_torch(setting, core, plain, model_folder):
    expected = plain(core)
    with SETTINGS[setting]():
        found = CORES[core](matlens.load(str(model_folder("llama")), device="cpu"))
    for name, numbers in expected.items():
        assert found[name].dtype == numbers.dtype, name
        torch.testing.assert_close(found[name], numbers, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


@pytest.mark.filterwarnings("ignore::matlens.InputWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_made_in_inference_mode_can_be_trained_on(dtype, model_folder):
    train = make_sentences().split(n_train=9, n_validation=2, seed=0)[0]
    with torch.inference_mode():
        model = matlens.load(str(model_folder("llama")), device="cpu", dtype=dtype)
        examples = matlens.make_examples(model, train)
        vectors = matlens.collect(model, examples, positions="all", progress=False)
        readout = matlens.Readout(model)
    training = LayerTraining(readout, vectors["h.1"], vectors["h.3"])
    training.tune(steps=2)
    training.polish(steps=2)
    assert training.result()["weight"].isfinite().all()
    made = pruning.prune(model, make_windows(model, running_text(600), size=24), 1, heal=500, progress=False)
    assert made.provenance.details["healed"]["n_tokens"] >= 500


def test_vectors_are_tensors_that_a_probe_can_be_trained_on(small_model):
    examples = matlens.make_examples(small_model("llama"), make_sentences()).head(3)
    h = matlens.collect(small_model("llama"), examples, progress=False)["h.1"]
    probe = torch.zeros(h.shape[1], 1, requires_grad=True)
    (h @ probe - 1).square().mean().backward()
    assert probe.grad is not None
