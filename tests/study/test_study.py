"""A study: its steps, results and tables, and what is reused."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_LAYERS, assert_near
from sklearn.metrics import r2_score
from studies import Study
from studies.study import head_outputs
from studying import collect_parts
from torch import Tensor

import matlens
from matlens import InputError, collect, load_corpus, make_examples
from matlens.activations.activations import Activations
from matlens.data.examples import Batch
from matlens.ffn.trace import Trace
from matlens.models.weights import fingerprint
from matlens.study.steps import evaluate_maps, fit_maps, plot_results, read_results, typical_penalty

N_TRAIN, N_VALIDATION = 26, 12
STREAM = [f"h.{layer}" for layer in range(N_LAYERS + 1)]
PAIRS = [
    (f"{name}_in.{layer}", f"{name}_out.{layer}")
    for layer in range(N_LAYERS)
    for name in ("attn", "ffn", "ln1", "ln2")
]
ENDS = {site for pair in PAIRS for site in pair}


@pytest.fixture
def corpus(sentences, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(sentences.sentences))
    return path


@pytest.fixture
def study(small_model, corpus, tmp_path):
    """A study as a script begins it: nothing is known but the folder."""

    def begin(model: str = "gpt2", **options: Any) -> Study:
        sizes = {"n_train": N_TRAIN, "n_validation": N_VALIDATION}
        sizes = {name: options.pop(name, size) for name, size in sizes.items()}
        sentences, seed = load_corpus(str(options.pop("corpus", corpus))), options.get("seed", 0)
        return Study(
            load_model=lambda: small_model(model), load_corpus=lambda: sentences,
            load_parts=lambda: sentences.split(**sizes, seed=seed), out=tmp_path / "out", **options,
        )  # fmt: skip

    return begin


@pytest.fixture
def runs(monkeypatch):
    """Number of sentences of every run of the model that collects."""
    seen: list[int] = []
    inputs = Batch.inputs

    def counting(batch: Batch, model: Any) -> Any:
        seen.append(len(batch.index))
        return inputs(batch, model)

    monkeypatch.setattr(Batch, "inputs", counting)
    return seen


def folders(study: Study) -> set[str]:
    return {path.name for path in study.folder.iterdir()}


def test_two_analyses_of_one_folder_collect_and_fit_once(study, runs, monkeypatch):
    first = study()
    maps, validation = first.maps, first.validation
    assert sum(runs) == N_TRAIN + N_VALIDATION
    assert re.fullmatch(r"gpt2-\w{8}--words\.txt-\w{8}", first.folder.name)
    assert folders(first) == {"train", "validation", "maps"}

    def fits(*_: object, **__: object) -> None:
        raise AssertionError("the maps are fitted again")

    monkeypatch.setattr("matlens.study.steps.fit_samples", fits)
    second = study()
    for pair, linear in second.maps.items():
        assert torch.equal(linear.weight, maps[pair].weight)
    assert torch.equal(second.validation[1], validation[1])
    assert second.origin == first.origin
    assert sum(runs) == N_TRAIN + N_VALIDATION


def test_a_study_is_the_stream_of_both_parts_and_least_squares_between_its_layers(study, small_model):
    fitted, model = study(), small_model("gpt2")
    parts = fitted.corpus.split(n_train=N_TRAIN, n_validation=N_VALIDATION)
    for ours, part in zip(fitted.stream, parts, strict=True):
        alone = collect(model, make_examples(model, part), progress=False)
        assert set(ours) == set(alone) == set(STREAM)
        assert ours.examples.fingerprint == alone.examples.fingerprint
        for layer in range(N_LAYERS + 1):
            assert_near(ours[layer], alone[layer])
    assert fitted.n_layers == N_LAYERS
    assert set(fitted.maps) == {(a, b) for a in STREAM for b in STREAM if a < b}
    x, y = (fitted.stream[0][layer].double().numpy() for layer in (1, N_LAYERS))
    expected = torch.from_numpy(np.linalg.lstsq(x, y, rcond=None)[0].T)
    assert_near(fitted.maps[1, N_LAYERS].weight, expected, 1e-4)
    assert fitted.origin["maps"] == fitted.maps.provenance.to_json()
    assert fitted.origin["validation"]["n"] == N_VALIDATION
    h = fitted.validation[N_LAYERS]
    assert_near(fitted.readout.logits(h), model.unembed(model.ln_final(h)).detach())


def test_submodules_before_the_stream_are_collected_in_one_pass_with_it(study, runs):
    first = study()
    samples = first.submodule_samples
    assert sum(runs) == N_TRAIN
    heads = set(head_outputs(matlens.models.ModelLayout.from_model(first.model)))
    assert len(heads) == N_LAYERS
    assert set(samples) == ENDS | set(STREAM) | heads
    _ = first.stream, first.maps
    assert sum(runs) == N_TRAIN + N_VALIDATION
    assert folders(first) == {"train", "validation", "maps"}
    again = study()
    _ = again.submodule_samples, again.maps
    assert sum(runs) == N_TRAIN + N_VALIDATION
    train, validation = again.head_samples  # of the training sentences all is there
    assert sum(runs) == N_TRAIN + 2 * N_VALIDATION
    assert heads < set(train)
    assert heads < set(validation)
    kept = {site: train[site].clone() for site in heads}
    shutil.rmtree(first.folder / "train")
    alone = study().head_samples[0]
    assert all(torch.equal(alone[site], vectors) for site, vectors in kept.items())


def upper_half(data: Activations) -> Tensor:
    return data[1][:, 0] > data[1][:, 0].median()


def test_maps_are_fitted_on_the_samples_that_are_asked_for(study, monkeypatch):
    # Small models have no sinks, so half of the samples are taken for some.
    monkeypatch.setattr("studies.study.sink_rows", upper_half)
    tested = study()
    samples = tested.submodule_samples
    rows = {
        "all": torch.ones(N_TRAIN, dtype=torch.bool),
        "not-first": torch.from_numpy(samples.examples.positions > 0),
        "not-sink": ~upper_half(tested.stream[0]),
    }
    assert len({int(chosen.sum()) for chosen in rows.values()}) == 3
    for fitted, maps in tested.submodule_maps(*rows).items():
        assert (tested.folder / f"submodule-maps-{fitted}" / "config.json").is_file()
        assert maps.provenance.details["fitted"] == fitted
        assert maps.provenance.n_samples == int(rows[fitted].sum())
        x, y = (samples[site][rows[fitted]].double() for site in ("ffn_in.1", "ffn_out.1"))
        expected = torch.linalg.lstsq(x, y, driver="gelsd").solution.T
        assert_near(maps["ffn_in.1", "ffn_out.1"].weight, expected, 1e-3)
    x, y = (tested.stream[0][layer][rows["not-sink"]].double() for layer in (1, 2))
    expected = torch.linalg.lstsq(x, y, driver="gelsd").solution.T
    assert_near(tested.maps_without_sinks[1, 2].weight, expected, 1e-3)


def test_positions_are_the_same_for_all_that_a_study_collects(study):
    tested = study("bert", sample_special=False)
    train = [tested.head_samples[0], tested.submodule_samples, tested.stream[0]]
    assert len({samples.examples.fingerprint for samples in train}) == 1
    assert tested.validation_examples.fingerprint == tested.stream[1].examples.fingerprint
    places, lengths = train[0].places, train[0].examples.lengths
    assert bool(((places > 0) & (places < lengths - 1)).all())  # neither [CLS] nor [SEP]


def test_another_seed_or_size_in_the_same_folder_is_refused(study, runs):
    first = study()
    _ = first.maps, first.submodule_samples
    runs.clear()
    for other in ({"seed": 1}, {"n_train": N_TRAIN + 1}, {"n_validation": N_VALIDATION - 2}):
        for part in ("maps", "submodule_samples"):
            with pytest.raises(InputError, match="belongs to another job"):
                getattr(study(**other), part)
    assert runs == []


def test_models_and_corpora_have_folders_of_their_own(study, corpus):
    other = corpus.with_name("other words.txt")
    shutil.copy(corpus, other)
    names = [each.folder.name for each in (study(), study("bert"), study(corpus=other))]
    assert len(set(names)) == 3
    stems = [re.sub(r"-[0-9a-f]{8}", "", name) for name in names]
    assert stems == ["gpt2--words.txt", "bert--words.txt", "gpt2--other words.txt"]


# The trace and the clusters


def test_the_trace_is_of_the_validation_part_in_a_folder_of_the_jobs_name(study, tmp_path, monkeypatch):
    def traced(k: int = 2, **options: Any) -> Trace:
        return study(**{"n_train": 1, "n_validation": 20, "seed": 3} | options).trace(k)

    trace, begun = traced(), study()
    _, part = begun.corpus.split(n_train=1, n_validation=20, seed=3)
    examples = make_examples(begun.model, part, seed=3)
    expected = Trace.run(begun.model, examples, k=2, seed=3, progress=False)
    assert trace.examples.fingerprint == expected.examples.fingerprint
    for key, scores in expected.score.items():
        assert torch.equal(trace.score[key], scores)
    (folder,) = (tmp_path / "out" / "traces").iterdir()
    assert folder.name.startswith("gpt2-")
    assert folder.name.endswith("--20-seed3-k2")
    assert "words.txt" in folder.name
    with monkeypatch.context() as patch:
        patch.setattr("matlens.ffn.trace.stream", None)  # nothing is run again
        traced()
    for other in ({"n_validation": 10}, {"n_train": 2}, {"seed": 4}, {"k": 3}):
        traced(**other)
    assert len(list((tmp_path / "out" / "traces").iterdir())) == 5


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


@pytest.mark.parametrize("options", [{}, {"sample_special": False}])
def test_all_positions_of_a_masked_model_are_refused(options, small_model, sentences, tmp_path):
    model = small_model("llama" if options else "bert")
    with pytest.raises(matlens.InputError, match=r"masked|sample_special"):
        collect_parts(model, sentences, tmp_path, positions="all", **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "positions"), [("gpt2", "all"), ("bert", "sampled")])
def test_few_sentences_take_all_positions(name, positions, small_model, collect, tmp_path):
    train, validation = collect(small_model(name), tmp_path, positions="auto")
    assert (train.positions, validation.positions) == (positions, "sampled")
