"""What is no error but would mislead is warned of once a call, and what is right is not warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_sentences
from sentences import corpus_of

from matlens import InputWarning, Lens, LensConfig, MapSet, collect, make_examples, make_prompts
from matlens.lens.comparison import compare_lenses
from matlens.lens.evaluation import evaluate_lenses, fit_quality, prediction_quality
from matlens.metrics import r2
from matlens.models.readout import Readout

Models = Callable[[str], Any]
RIDGE = [LensConfig(ridge="loo")]


@contextmanager
def warned(count: int, match: str = "") -> Iterator[None]:
    """Just so many warnings with such words in them, whatever the filters have shown before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(each.message) for each in caught if issubclass(each.category, InputWarning)]
    assert [match in message for message in messages] == [True] * count, messages


@pytest.fixture
def fitted(small_model):
    """A model, vectors of training and of validation sentences, and maps fitted on the former."""
    model, parts = small_model("gpt2"), make_sentences().split(n_train=30, n_validation=10, seed=0)
    train, validation = (
        collect(model, make_examples(model, part), positions="all", progress=False) for part in parts
    )
    return model, train, validation, MapSet.fit(train, pairs="all", ridge=1.0, progress=False)


def test_maps_judged_on_their_own_sentences(fitted):
    model, train, validation, maps = fitted
    readout = Readout(model)
    with warned(0):
        fit_quality(maps, validation, progress=False)
        prediction_quality(readout, maps, validation, progress=False)
        evaluate_lenses({"id": Lens.identity(model)}, validation, progress=False)
    # Other positions of the same sentences, and fewer of the sentences, are no new text either.
    drawn = collect(model, replace(train.examples), positions="sampled", progress=False)
    for seen in (train, drawn, train.head(7)):
        with warned(1, "Use other sentences"):
            fit_quality(maps, seen, progress=False)
        with warned(1, "Use other sentences"):
            prediction_quality(readout, maps, seen, progress=False)
        with warned(1, "Use other sentences"):
            lenses = {"id": Lens.identity(model), "mat": Lens.from_maps(maps, model=model)}
            evaluate_lenses(lenses, seen, progress=False)


def test_some_rows_may_be_judged_by_maps_of_others(fitted):
    _, train, _, maps = fitted
    half = torch.arange(train.n_rows) % 2 == 0
    of_half = MapSet.fit(train, pairs="last", rows=half, ridge=1.0, progress=False)
    with warned(0):
        fit_quality(of_half, train, rows=~half, progress=False)
    with warned(1, "Use other sentences"):
        fit_quality(of_half, train, progress=False)
    with warned(1, "Use other sentences"):
        fit_quality(maps, train, rows=half, progress=False)


def test_parts_that_share_sentences(small_model, tmp_path):
    model, (train, validation) = (
        small_model("gpt2"),
        make_sentences().split(n_train=30, n_validation=10, seed=0),
    )
    shared = corpus_of([*validation.sentences[:7], *train.sentences[:3]])
    with warned(1, "3 of 10 validation sentences"):
        compare_lenses(model, (train, shared), tmp_path / "a", methods=RIDGE, layers=[1], progress=False)
    with warned(0):
        compare_lenses(model, (train, validation), tmp_path / "b", methods=RIDGE, layers=[1], progress=False)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_texts_of_which_the_tokenizer_knows_nothing(name, small_model):
    model = small_model(name)
    with warned(0):
        make_examples(model, ["w1 w2", "w1 мир"])
    with warned(1, "2 of 3 texts, such as 'Привет мир'"):
        make_examples(model, ["w1 w2", "Привет мир", "世界"])
    mask = " [MASK]" if name == "bert" else ""
    with warned(1, "1 of 2 texts"):
        make_prompts(model, [f"w1{mask}", f"мир{mask}"])


def test_r2_that_coordinates_of_no_variance_decide(fitted):
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(50, 8, generator=generator)
    prediction = truth + torch.randn(50, 8, generator=generator)
    with warned(0):
        r2(prediction, truth)
        r2(prediction * 1e4, truth)  # far below zero in all coordinates: that is what it is
    truth[:, 3] *= 1e-6
    with warned(1, "1 coordinate that hardly varies in the truth"):
        assert r2(prediction, truth) < -1e9
    with warned(0):
        r2(truth + 1e-9, truth)
    _, _, validation, maps = fitted
    for target in (2, 3):
        validation[target][:, [4, 5]] *= 1e-6
    with warned(1, "2 coordinates that hardly vary in h."):
        fit_quality(maps, validation, progress=False)
