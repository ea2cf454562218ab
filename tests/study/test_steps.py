"""The four steps as functions: which pairs are meant, what is done again, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import N_LAYERS

import matlens
from matlens.linear.maps import LinearMap
from matlens.linear.mapsets import MapSet
from matlens.models.weights import unembed_hash
from matlens.study import steps

N_TRAIN, N_VALIDATION = 25, 15


@pytest.fixture
def collected(small_model: Callable[[str], Any], sentences: matlens.corpora.Corpus, tmp_path: Path) -> Path:
    """A folder with both parts, on the first model."""
    collect(small_model("gpt2"), sentences, tmp_path / "collected")
    return tmp_path / "collected"


def collect(model: Any, sentences: matlens.corpora.Corpus, folder: Path, **options: Any) -> Any:
    sizes = {"n_train": N_TRAIN, "n_validation": N_VALIDATION}
    sizes |= {name: options.pop(name) for name in sizes if name in options}
    parts = sentences.split(**sizes, seed=options.get("seed", 0))
    return steps.collect_parts(model, parts, folder, progress=False, **options)


def test_the_parts_share_no_sentence_and_are_those_of_the_corpus(
    small_model: Callable[[str], Any], sentences: matlens.corpora.Corpus, collected: Path
) -> None:
    tokenizer = small_model("gpt2").tokenizer
    read: dict[str, list[str]] = {}
    for part, size in (("train", N_TRAIN), ("validation", N_VALIDATION)):
        examples = matlens.activations.Activations.load(collected / part).examples
        pieces = np.split(examples.tokens, examples.offsets[1:-1])
        read[part] = [tokenizer.decode(piece) for piece in pieces]
        assert len(read[part]) == size
    assert sorted(read["train"] + read["validation"]) == sorted(sentences.sentences)


def test_collecting_again_gives_what_is_there(
    small_model: Callable[[str], Any],
    sentences: matlens.corpora.Corpus,
    collected: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ran(*_: object, **__: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("matlens.activations.collecting._run", ran)
    train, validation = collect(small_model("gpt2"), sentences, collected)
    assert (train.n_rows, validation.n_rows) == (N_TRAIN, N_VALIDATION)
    with pytest.raises(AssertionError, match="the model was run"):
        collect(small_model("gpt2"), sentences, collected.parent / "other")


def test_a_failed_collection_leaves_nothing_and_a_finished_part_stays(
    small_model: Callable[[str], Any],
    sentences: matlens.corpora.Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = matlens.activations.collecting._run
    n_calls = 0

    def fails_late(*arguments: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == fails_at:
            raise RuntimeError("out of memory")
        return run(*arguments)

    monkeypatch.setattr("matlens.activations.collecting._run", fails_late)
    fails_at = 4
    with pytest.raises(RuntimeError, match="out of memory"):
        collect(small_model("gpt2"), sentences, tmp_path / "out", batch_tokens=40)
    assert not list(tmp_path.iterdir())

    train, _ = sentences.split(n_train=N_TRAIN, n_validation=N_VALIDATION)
    read = matlens.make_examples(small_model("gpt2"), train).up_to_positions()
    n_calls, fails_at = 0, len(list(read.batches(40))) + 2  # the second batch of the validation part
    with pytest.raises(RuntimeError, match="out of memory"):
        collect(small_model("gpt2"), sentences, tmp_path / "out", batch_tokens=40)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]
    assert matlens.activations.Activations.load(tmp_path / "out" / "train").n_rows == N_TRAIN


def test_fit_is_least_squares_on_the_training_part(collected: Path) -> None:
    maps = steps.fit_maps(collected, progress=False)
    assert len(maps) == N_LAYERS * (N_LAYERS + 1) // 2
    train = matlens.activations.Activations.load(collected / "train")
    for (source, target), linear in maps.items():
        x, y = train[source].double().numpy(), train[target].double().numpy()
        expected = np.linalg.lstsq(x, y, rcond=None)[0].T
        scale = np.abs(expected).max()
        np.testing.assert_allclose(linear.weight.numpy() / scale, expected / scale, atol=1e-4)


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf")])
def test_a_penalty_that_makes_no_sense(collected: Path, ridge: float) -> None:
    with pytest.raises(matlens.InputError, match=r"[Rr]idge .*is .* Expected a (finite )?number"):
        steps.fit_maps(collected, ridge=ridge, progress=False)
    assert not (collected / "maps").exists()


def test_a_failed_fit_leaves_nothing(collected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = steps.fit_samples

    def fails_late(*arguments: Any, **options: Any) -> Any:
        for n, linear in enumerate(fit(*arguments, **options)):
            if n == 4:
                assert (collected / "maps" / "h.0.safetensors").is_file()
                raise RuntimeError("out of memory")
            yield linear

    with monkeypatch.context() as patch:
        patch.setattr(steps, "fit_samples", fails_late)
        with pytest.raises(RuntimeError, match="out of memory"):
            steps.fit_maps(collected, progress=False)
    assert not (collected / "maps").exists()
    assert len(steps.fit_maps(collected, progress=False)) == N_LAYERS * (N_LAYERS + 1) // 2


def test_evaluate_returns_what_it_writes(small_model: Callable[[str], Any], collected: Path) -> None:
    steps.fit_maps(collected, pairs="last", progress=False)
    results = steps.evaluate_maps(small_model("gpt2"), collected, progress=False)
    assert results.to_csv(index=False) == (collected / "results.csv").read_text()
    again = steps.read_results(collected)
    assert list(again.columns) == list(results.columns)
    assert again.to_csv(index=False) == results.to_csv(index=False)
    origin = json.loads((collected / "results.json").read_text())
    assert origin["maps"]["model"]["fingerprint"] == matlens.models.fingerprint(small_model("gpt2"))
    assert origin["maps"]["model"]["unembed_hash"] == unembed_hash(small_model("gpt2"))


def test_evaluate_refuses_another_model(small_model: Callable[[str], Any], collected: Path) -> None:
    steps.fit_maps(collected, pairs="last", progress=False)
    with pytest.raises(matlens.InputError, match="The maps and this model do not belong together"):
        steps.evaluate_maps(small_model("gptj"), collected, progress=False)
    assert not (collected / "results.csv").exists()


def test_evaluate_refuses_vectors_of_another_model(
    small_model: Callable[[str], Any], sentences: matlens.corpora.Corpus, collected: Path, tmp_path: Path
) -> None:
    steps.fit_maps(collected, pairs="last", progress=False)
    collect(small_model("gptj"), sentences, tmp_path / "other")
    shutil.rmtree(collected / "validation")
    shutil.copytree(tmp_path / "other" / "validation", collected / "validation")
    with pytest.raises(matlens.InputError, match="The maps and the activations do not belong together"):
        steps.evaluate_maps(small_model("gpt2"), collected, progress=False)
    assert not (collected / "results.csv").exists()


def test_maps_are_saved_whatever_their_order(tmp_path: Path) -> None:
    pairs = [("h.0", "h.3"), ("h.1", "h.3"), ("h.0", "h.2"), ("h.1", "h.2")]
    maps = MapSet([LinearMap(torch.eye(2) * n, None, *pair) for n, pair in enumerate(pairs)])
    maps.save(tmp_path / "maps")
    loaded = MapSet.load(tmp_path / "maps")
    assert list(loaded) == pairs
    for n, pair in enumerate(pairs):
        assert torch.equal(loaded[pair].weight, torch.eye(2) * n)


def test_without_maps_onto_the_last_layer_only_the_fit_is_evaluated(
    small_model: Callable[[str], Any], sentences: matlens.corpora.Corpus, tmp_path: Path
) -> None:
    model = small_model("llama")
    steps.collect_parts(model, sentences.split(n_train=30, n_validation=10), tmp_path, progress=False)
    steps.fit_maps(tmp_path, pairs=[(0, 1), (0, 2)], progress=False)
    results = steps.evaluate_maps(model, tmp_path, progress=False)
    assert set(results["metric"]) == {"r2"}
    assert sorted(path.name for path in steps.plot_results(tmp_path)) == ["r2.pdf", "r2.png"]


def test_maps_of_other_samples_are_not_evaluated(
    small_model: Callable[[str], Any], sentences: matlens.corpora.Corpus, tmp_path: Path
) -> None:
    """Collected again with another seed, validation may hold sentences that the maps were fitted on."""
    model = small_model("llama")
    collect(model, sentences, tmp_path)
    steps.fit_maps(tmp_path, progress=False)
    for part in ("train", "validation"):
        shutil.rmtree(tmp_path / part)
    collect(model, sentences, tmp_path, seed=1)
    with pytest.raises(matlens.InputError, match="fitted on other samples"):
        steps.evaluate_maps(model, tmp_path, progress=False)


def test_a_figure_of_an_earlier_table_does_not_stay(
    small_model: Callable[[str], Any], sentences: matlens.corpora.Corpus, tmp_path: Path
) -> None:
    model = small_model("llama")
    steps.collect_parts(model, sentences.split(n_train=30, n_validation=10), tmp_path, progress=False)
    for pairs, figures in (("all", ["prediction.png", "r2.png"]), ([(0, 1)], ["r2.png"])):
        shutil.rmtree(tmp_path / "maps", ignore_errors=True)
        steps.fit_maps(tmp_path, pairs=pairs, progress=False)
        steps.evaluate_maps(model, tmp_path, progress=False)
        steps.plot_results(tmp_path)
        assert sorted(path.name for path in tmp_path.glob("*.png")) == figures


@pytest.mark.parametrize("options", [{}, {"draw_special": False}])
def test_all_positions_of_a_masked_model_are_no_predictions(
    options: dict[str, Any],
    small_model: Callable[[str], Any],
    sentences: matlens.corpora.Corpus,
    tmp_path: Path,
) -> None:
    name = "llama" if options else "bert"
    with pytest.raises(matlens.InputError, match=r"masked|special tokens"):
        steps.collect_parts(
            small_model(name),
            sentences.split(n_train=30, n_validation=10),
            tmp_path,
            positions="all",
            **options,
        )
    assert not any(tmp_path.iterdir())


def test_negative_layers_are_those_of_the_model(
    small_model: Callable[[str], Any], sentences: matlens.corpora.Corpus
) -> None:
    model = small_model("llama")
    vectors = matlens.collect(model, matlens.make_examples(model, sentences), progress=False)
    (linear,) = matlens.linear.fit_samples(vectors, [(0, -1)])
    assert (linear.source, linear.target) == ("h.0", f"h.{N_LAYERS}")
    assert torch.equal(vectors[-1], vectors[N_LAYERS])


def test_a_typical_penalty_is_the_squared_norm_of_a_typical_sample(collected: Path) -> None:
    train = matlens.activations.Activations.load(collected / "train")
    norms = [np.median((train[layer].double().numpy() ** 2).sum(1)) for layer in (0, 2)]
    penalty = steps.typical_penalty(train, ["h.0", "h.2"])
    assert penalty == pytest.approx(min(norms), rel=0.06)  # torch's median of two is the lower
    assert penalty == float(f"{penalty:.1e}")


def test_few_samples_are_met_with_a_ridge_where_none_is_given(collected: Path) -> None:
    maps = steps.fit_maps(collected, pairs="last", ridge=None, progress=False)
    train = matlens.activations.Activations.load(collected / "train")
    ridge = steps.typical_penalty(train, ["h.0", "h.1", "h.2"])
    assert maps.provenance.details["ridge"] == ridge > 0
    x, y = (train[layer].double().numpy() for layer in (1, 3))
    expected = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y).T
    np.testing.assert_allclose(maps[1, 3].weight, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "free", "positions"),
    [
        ("gpt2", {}, 1 << 40, "all"),
        ("gpt2", {}, 40_000, "drawn"),
        ("gpt2", {"draw_special": False}, 1 << 40, "drawn"),
        ("bert", {}, 1 << 40, "drawn"),
    ],
    ids=["room", "no room", "special tokens", "masked"],
)
def test_all_positions_are_taken_where_sentences_are_few_and_it_can_be(
    name: str,
    options: dict[str, Any],
    free: int,
    positions: str,
    small_model: Callable[[str], Any],
    sentences: matlens.corpora.Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    train, validation = collect(small_model(name), sentences, tmp_path, positions="auto", **options)
    assert (train.positions, validation.positions) == (positions, "drawn")
    if free == 1 << 40:  # what has been begun goes on, whatever room is left
        monkeypatch.setattr(steps.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        again, _ = collect(small_model(name), sentences, tmp_path, positions="auto", **options)
        assert again.positions == positions
