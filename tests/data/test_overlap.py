"""Evaluations on sentences of the fit are warned of, whichever objects the sentences come in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from calibration_texts import running_text
from conftest import make_sentences
from sentences import corpus_of, examples_of, many

from matlens import (
    Activations,
    Lens,
    LensConfig,
    MapSet,
    collect,
    exit_sweep,
    fit_stream,
    linearity_atlas,
    make_examples,
    make_token_examples,
    prune,
    stream,
)
from matlens.data import load_corpus, make_windows
from matlens.data.overlap import OverlapWarning, sentence_keys
from matlens.lens.evaluation import evaluate_lenses, fit_quality, prediction_quality
from matlens.linear import stream_least_squares
from matlens.models.readout import Readout
from matlens.pruning import compare_pruned, prune_attention
from matlens.study.steps import evaluate_maps, fit_maps

RIDGE = LensConfig(ridge="loo")


@contextmanager
def overlap(count: int, of: int = 0) -> Iterator[None]:
    """One warning that names how many sentences were fitted on, or none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(each.message) for each in caught if issubclass(each.category, OverlapWarning)]
    assert [f"{count} of {of} " in message for message in messages] == [True] * (count > 0), messages


@pytest.fixture(scope="module")
def model(small_model):
    return small_model("gpt2")


@pytest.fixture(scope="module")
def parts():
    return make_sentences().split(n_train=30, n_validation=10, seed=0)


@pytest.fixture(scope="module")
def mixed(parts):
    """Seven new sentences, and three of the training part in another corpus object."""
    train, validation = parts
    return corpus_of([*validation.sentences[:7], *train.sentences[:3]])


def of(model, texts, positions="sampled", **options) -> Activations:
    examples = make_examples(model, texts, **options)
    return collect(model, examples, positions=positions, progress=False)


def evaluate_all(model, maps, validation, count, total):
    """Every evaluation of maps and of a lens of them, each of which warns once or not at all."""
    lenses = {"id": Lens.identity(model), "mat": Lens.from_maps(maps, model=model)}
    with overlap(count, total):
        fit_quality(maps, validation, progress=False)
    with overlap(count, total):
        prediction_quality(Readout(model), maps, validation, progress=False)
    with overlap(count, total):
        evaluate_lenses(lenses, validation, progress=False)
    with overlap(count, total):
        exit_sweep(lenses, validation, progress=False)


def test_sentences_are_found_in_another_corpus_and_at_other_positions(model, parts, mixed, tmp_path):
    maps = MapSet.fit(of(model, parts[0]), ridge=1.0, progress=False)
    maps.save(tmp_path / "maps")
    for known in (maps, MapSet.load(tmp_path / "maps"), MapSet(list(maps.values())[:2])):
        evaluate_all(model, known, of(model, parts[1], seed=1), 0, 10)
        evaluate_all(model, known, of(model, mixed, seed=1), 3, 10)
    evaluate_all(model, maps, of(model, mixed, "all"), 3, 10)


def test_token_examples_count_as_the_sentences_of_their_tokens(model, parts, mixed):
    def tokens_of(corpus):
        examples = make_examples(model, corpus)
        ids = np.split(examples.tokens, examples.offsets[1:-1])
        return collect(model, make_token_examples(model, ids), progress=False)

    given = MapSet.fit(tokens_of(parts[0]), ridge=1.0, progress=False)
    read = MapSet.fit(of(model, parts[0]), ridge=1.0, progress=False)
    evaluate_all(model, given, tokens_of(mixed), 3, 10)
    evaluate_all(model, given, of(model, mixed), 3, 10)
    evaluate_all(model, read, tokens_of(mixed), 3, 10)
    evaluate_all(model, given, tokens_of(parts[1]), 0, 10)


def test_a_file_read_in_part_and_read_in_whole_share_sentences(model, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(many(12, 6)))
    first, whole = (load_corpus(tmp_path / "texts.txt", limit=limit) for limit in (5, None))
    maps = MapSet.fit(of(model, first), ridge=1.0, progress=False)
    evaluate_all(model, maps, of(model, whole), 5, 12)


@pytest.mark.parametrize("positions", ["sampled", "all"])
def test_rows_of_a_fit_are_compared_with_the_rows_evaluated(model, parts, positions):
    data = of(model, parts[0], positions)
    rows = torch.arange(data.n_rows) < data.n_rows // 2
    n = len(set(data.at_rows.sentences[rows.numpy()]))
    maps = MapSet.fit(data, rows=rows, ridge=1.0, progress=False)
    weighted = MapSet.fit(data, weights=rows.float(), ridge=1.0, progress=False)
    streamed = MapSet(
        fit_stream(
            stream(model, data.examples, ["h.0", "h.3"], positions=positions, progress=False),
            [(0, 3)], rows=rows, ridge=1.0,
        )
    )  # fmt: skip
    for fitted in (maps, weighted, streamed):
        with overlap(n, n):
            fit_quality(fitted, data, rows=rows, progress=False)
        with overlap(0):
            fit_quality(fitted, data, rows=~rows, progress=False)
        with overlap(n, 30):
            fit_quality(fitted, data, progress=False)
    lens = Lens.fit(model, data, method=RIDGE, rows=rows, progress=False)
    with overlap(n, 30):
        evaluate_lenses({"a": Lens.identity(model), "b": lens}, data, progress=False)


@pytest.mark.parametrize("method", [RIDGE, "scaled", "tuned", "jacobian"])
def test_lenses_of_every_method_record_their_sentences(method, model, parts, mixed, tmp_path):
    texts = corpus_of([f"{text} {text}" for text in parts[0].sentences])  # long enough for Jacobians
    seen = corpus_of([*mixed.sentences[:7], *sorted(texts.sentences, key=len)[-3:]])
    lens = Lens.fit(model, texts, method=method, layers=[1, 2], n_prompts=30, progress=False)
    lens.save(tmp_path / "lens")
    for known in (lens, Lens.load(tmp_path / "lens", model)):
        with overlap(3, 10):
            evaluate_lenses({"lens": known}, of(model, seen), progress=False)
        with overlap(0):
            evaluate_lenses({"lens": known}, of(model, parts[1]), progress=False)


def test_maps_of_several_fits_record_the_sentences_of_all(model, parts):
    first, second = (
        MapSet.fit(of(model, parts[0].sentences[start : start + 10]), pairs=[pair], ridge=1.0, progress=False)
        for start, pair in ((0, (1, 3)), (10, (2, 3)))
    )
    evaluate_all(model, MapSet([*first.values(), *second.values()]), of(model, parts[0]), 20, 30)


def test_some_sentences_of_one_corpus_are_not_the_others(model, parts):
    examples = make_examples(model, parts[0])
    first, second = (
        collect(model, examples.select(np.arange(start, 30, 2)), progress=False) for start in (0, 1)
    )
    evaluate_all(model, MapSet.fit(first, ridge=1.0, progress=False), second, 0, 15)


def test_sentences_masked_at_other_tokens_are_the_same(small_model, parts):
    model = small_model("bert")
    maps = MapSet.fit(of(model, parts[0]), ridge=1.0, progress=False)
    for seed in (0, 1):
        with overlap(30, 30):
            fit_quality(maps, of(model, parts[0], seed=seed), progress=False)
        with overlap(0):
            fit_quality(maps, of(model, parts[1], seed=seed), progress=False)


def test_folders_of_a_study_are_compared_once(model, parts, mixed, tmp_path):
    for name, corpus in (("train", parts[0]), ("validation", mixed)):
        collect(model, make_examples(model, corpus), folder=tmp_path / "rows" / name, progress=False)
    stream_least_squares(
        model, make_examples(model, parts[0]), tmp_path / "sums" / "statistics", progress=False
    )
    collect(model, make_examples(model, mixed), folder=tmp_path / "sums" / "validation", progress=False)
    for folder in (tmp_path / "rows", tmp_path / "sums"):
        fit_maps(folder, ridge=1.0, progress=False)
        with overlap(3, 10):
            evaluate_maps(model, folder, progress=False)


def test_pruning_is_not_evaluated_on_its_calibration_text(small_model):
    model, words = small_model("llama"), running_text(600).sentences[0].split()
    text, new = ([" ".join(part)] for part in (words[:300], words[300:]))
    calibration, other = (make_windows(model, part, size=24) for part in (text, new))
    longer = make_windows(model, text, size=32)
    pruned = prune(model, calibration, [1], progress=False)
    chosen = prune(model, calibration, 1, method="out", progress=False)
    quiet = prune_attention(model, calibration, [1], progress=False)
    for made in (pruned, chosen, quiet):
        with overlap(len(calibration), len(calibration)):
            compare_pruned(model, made, calibration, progress=False)
        with overlap(len(longer), len(longer)):
            compare_pruned(model, made, longer, progress=False)
        with overlap(0):
            compare_pruned(model, made, other, progress=False)
    with overlap(0):  # the text decides nothing here
        compare_pruned(
            model, prune(model, calibration, [1], method="out", progress=False), calibration, progress=False
        )


def test_the_atlas_is_not_evaluated_on_the_text_of_its_maps(small_model):
    model = small_model("gpt2")
    windows = [make_windows(model, many(20, 15, seed=seed), size=24, targets=True) for seed in (0, 1)]
    options = {"jumps": [], "every": 4, "progress": False}
    with overlap(len(windows[0]), len(windows[0])):
        linearity_atlas(model, windows[0], windows[0], **options)
    with overlap(0):
        linearity_atlas(model, windows[0], windows[1], **options)


def test_keys_differ_with_sources_and_images():
    examples = examples_of([3, 3])
    same = replace(examples, tokens=np.array([1, 2, 3, 1, 2, 3]))
    assert len(set(sentence_keys(same))) == 1
    sources = replace(same, source_tokens=np.array([4, 5]), source_offsets=np.array([0, 1, 2]))
    images = replace(same, images=np.stack([np.zeros((1, 2, 2), "f4"), np.ones((1, 2, 2), "f4")]))
    for given in (sources, images):
        assert len({*sentence_keys(given), *sentence_keys(same)}) == 3
