"""Maps evaluated and drawn: what is written, and which models and samples are refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from sklearn.metrics import r2_score
from studying import collect_parts

import matlens
from matlens.activations.activations import Activations
from matlens.models.weights import fingerprint
from matlens.study.steps import evaluate_maps, fit_maps, plot_results, read_results


def test_evaluate_returns_what_it_writes(small_model, collected):
    fit_maps(collected, pairs="last", progress=False)
    results = evaluate_maps(small_model("gpt2"), collected, progress=False)
    assert results.to_csv(index=False) == (collected / "results.csv").read_text()
    again = read_results(collected)
    assert list(again.columns) == list(results.columns)
    assert again.to_csv(index=False) == results.to_csv(index=False)
    origin = json.loads((collected / "results.json").read_text())
    assert origin["maps"]["model"]["fingerprint"] == fingerprint(small_model("gpt2"))


def test_maps_are_fitted_on_one_part_and_evaluated_on_the_other(small_model, collected):
    fit_maps(collected, pairs="last", ridge=2.0, progress=False)
    results = evaluate_maps(small_model("gpt2"), collected, progress=False)
    train, validation = (Activations.load(collected / part) for part in ("train", "validation"))
    assert (train.n_rows, validation.n_rows) == (25, 15)
    assert set(results["n"]) == {15}
    fit = results[results["metric"] == "r2"].set_index(["layer", "method"])["value"]
    truth = validation[3].double().numpy()
    for layer in range(3):
        x, h = train[layer].double().numpy(), validation[layer].double().numpy()
        weight = np.linalg.solve(x.T @ x + 2 * np.eye(x.shape[1]), x.T @ train[3].double().numpy())
        assert fit[layer, "mat"] == pytest.approx(r2_score(truth, h @ weight), rel=1e-3, abs=1e-4)
        assert fit[layer, "id"] == pytest.approx(r2_score(truth, h), rel=1e-4)
        assert fit[layer, "mat"] != pytest.approx(fit[layer, "id"], abs=0.01)


def test_maps_of_other_samples_are_not_evaluated(small_model, collect, tmp_path):
    """Collected again with another seed, validation may hold sentences that the maps were fitted on."""
    model = small_model("llama")
    collect(model, tmp_path)
    fit_maps(tmp_path, progress=False)
    for part in ("train", "validation"):
        shutil.rmtree(tmp_path / part)
    collect(model, tmp_path, seed=1)
    with pytest.raises(matlens.InputError, match="fitted on other samples"):
        evaluate_maps(model, tmp_path, progress=False)


def test_a_figure_of_an_earlier_table_is_removed(small_model, sentences, tmp_path):
    model = small_model("llama")
    collect_parts(model, sentences, tmp_path)
    for pairs, figures in (("all", ["prediction.png", "r2.png"]), ([(0, 1)], ["r2.png"])):
        shutil.rmtree(tmp_path / "maps", ignore_errors=True)
        fit_maps(tmp_path, pairs=pairs, progress=False)
        evaluate_maps(model, tmp_path, progress=False)
        plot_results(tmp_path)
        assert sorted(path.name for path in tmp_path.glob("*.png")) == figures
