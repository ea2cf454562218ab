"""Lenses and the atlas of several processes are those of one, also where some have nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import WORDS, make_sentences
from sentences import corpus_of
from several import run_ranks

import matlens
from matlens import linearity
from matlens.activations import collecting, find_sinks
from matlens.data import make_windows
from matlens.data.corpus import Corpus
from matlens.data.examples import Batch
from matlens.lens import Lens, LensConfig
from matlens.lens.closed_forms import fit_closed_forms
from matlens.lens.trained import fit_jacobian, fit_on_vectors
from matlens.linearity import atlas

BATCH = 40
CONFIGS = [
    LensConfig(**options)
    for options in (
        {}, {"weighted": True}, {"standardise": True, "intercept": True}, {"rank": 4},
        {"ridge": "loo", "sinks": "exclude"}, {"shared_map": True, "intercept": True, "sinks": "exclude"},
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def model(small_model):
    """A model two of whose tokens are sinks."""
    return small_model("llama-sinks")


@pytest.fixture(scope="module")
def examples(model):
    return matlens.make_examples(model, make_sentences())


def text(seed: int, n: int) -> Corpus:
    generator = np.random.default_rng(seed)
    return Corpus("text", tuple(" ".join(generator.choice(WORDS, 16)) for _ in range(n)), n, 0, 0, 0)


def outcomes(n: int, work: Callable[[], Any], folder: Path) -> list[Any]:
    made = run_ranks(n, work, folder)
    assert [outcome.get("trace") for outcome in made] == [None] * n
    return [outcome["result"] for outcome in made]


def numbers_of(linear: matlens.LinearMap | None) -> dict[str, torch.Tensor]:
    """The matrix as a whole, whose factors are determined but for signs, and the bias."""
    assert linear is not None
    return {"matrix": linear.matrix} | ({} if linear.bias is None else {"bias": linear.bias})


def sums_of(model: Any, data: Any, **options: Any) -> dict[str, Any]:
    """What is summed up for lenses, and what comes of it."""
    solved = fit_closed_forms(
        model, data, CONFIGS, layers=range(3), batch_tokens=BATCH, progress=False, **options
    )
    return {
        "maps": {
            (name, layer): numbers_of(of)
            for name, parts in solved.items()
            for layer, of in parts.maps.items()
        },
        "details": {name: dict(parts.provenance.details) for name, parts in solved.items()},
    }


def check_same_sums(made: dict[str, Any], whole: dict[str, Any]) -> None:
    assert made["details"] == whole["details"]
    assert made["maps"].keys() == whole["maps"].keys()
    for at, parts in whole["maps"].items():
        assert parts.keys() == made["maps"][at].keys()
        for name, part in parts.items():
            assert float((made["maps"][at][name] - part).norm()) <= 1e-4 * float(part.norm()), (at, name)


def test_closed_forms_and_sinks_of_several_processes_are_those_of_one(model, examples, tmp_path, monkeypatch):
    """Also of vectors that are collected, and of chosen rows with weights; every batch is run once."""
    n_tokens = len(examples.tokens)
    rows = torch.from_numpy(np.random.default_rng(5).random(n_tokens) < 0.8)
    weights = torch.rand(n_tokens, generator=torch.Generator().manual_seed(2))
    inputs, batches = Batch.inputs, []

    def noted(*arguments: Any) -> Any:
        batches.append(arguments[0].index.tolist())
        return inputs(*arguments)

    monkeypatch.setattr(Batch, "inputs", noted)

    def work() -> Any:
        batches.clear()
        collected = matlens.collect(model, examples, positions="all", progress=False)
        sums = [
            sums_of(model, examples),
            sums_of(model, collected),
            sums_of(model, examples, rows=rows, weights=weights),
            sums_of(model, examples.head(3)),
        ]
        sinks = [
            find_sinks(model, of, batch_tokens=BATCH, progress=False) for of in (examples, examples.head(2))
        ]
        return sums, sinks, list(batches)

    sums, sinks, run = work()
    assert sums[0]["details"]["ridge=loo+sinks=exclude"]["n_sinks"] > 0
    assert int(sinks[0].sum()) > 0
    made = outcomes(3, work, tmp_path / "outcomes")
    assert sorted(batch for _, _, own in made for batch in own) == sorted(run)
    for of_process, found, own in made:
        assert own
        for ours, theirs in zip(of_process[:3], sums[:3], strict=True):
            check_same_sums(ours, theirs)
        assert of_process[3]["details"] == sums[3]["details"]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, sinks, strict=True))


def test_layers_are_trained_by_one_process_each(model, examples, tmp_path, monkeypatch):
    """Bit by bit what one process trains; of four processes one has no layer to train."""
    from matlens.lens import trained

    layers: list[int] = []
    monkeypatch.setattr(trained, "Bar", lambda wanted, **_: layers.extend(wanted) or wanted)

    def work() -> Any:
        layers.clear()
        collected = matlens.collect(model, examples, positions="all", progress=False)
        lenses = Lens.fit(model, collected, method=["scaled", "affine"], progress=False)
        tuned = fit_on_vectors(
            "tuned", matlens.Readout(model), model, collected, layers=range(3), progress=False
        )
        numbers = {
            (lens.method, layer): (numbers_of(linear), lens.scales.get(layer, 1.0))
            for lens in (*lenses.values(), tuned)
            for layer, linear in lens.maps.items()
        }
        return numbers, list(layers), [lens.layers for lens in (*lenses.values(), tuned)]

    whole, all_layers, order = work()
    made = outcomes(4, work, tmp_path / "outcomes")
    assert sorted(layer for _, of_process, _ in made for layer in of_process) == sorted(all_layers)
    assert made[3][1] == []
    assert len({scale for _, scale in whole.values()}) > 2
    for numbers, _, of_process in made:
        assert of_process == order
        assert numbers.keys() == whole.keys()
        for at, (parts, scale) in whole.items():
            exact = "tuned" in at
            assert numbers[at][1] == pytest.approx(scale, rel=0 if exact else 1e-4)
            for name, part in parts.items():
                torch.testing.assert_close(
                    numbers[at][0][name], part, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5
                )


def test_prompts_of_a_jacobian_lens_are_divided(model, tmp_path):
    """Every prompt counts as often as another; of three prompts the fourth process has none."""
    texts = [" ".join(WORDS[start : start + 9]) for start in (3, 11, 20, 28, 35)]

    def work() -> Any:
        few, many = (
            fit_jacobian(model, corpus_of([*prompts, "w1 w2"]), layers=[1, 2], skip=1, progress=False)
            for prompts in (texts[:3], texts)
        )
        return [
            ({layer: parts.matrix(layer) for layer in parts.layers}, dict(parts.provenance.details))
            for parts in (few, many)
        ]

    whole = work()
    assert [details["n_fitted"] for _, details in whole] == [3, 5]
    for made in outcomes(4, work, tmp_path / "outcomes"):
        for (ours, details), (theirs, expected) in zip(made, whole, strict=True):
            assert details == expected
            assert list(ours) == list(theirs)
            for layer, jacobian in theirs.items():
                torch.testing.assert_close(ours[layer], jacobian, rtol=1e-5, atol=1e-6)


def test_an_atlas_of_several_processes_is_that_of_one(model, tmp_path, monkeypatch):
    """In a folder it resumes, whatever the number of processes was."""
    texts = [make_windows(model, text(seed, n), size=16, targets=True) for seed, n in ((1, 12), (2, 4))]
    options: dict[str, Any] = {"jumps": [2], "every": 2, "progress": False}
    whole = linearity.linearity_atlas(model, *texts, **options)
    assert set(whole["tokens"]) == {"all", "no sinks"}
    monkeypatch.setattr(collecting, "_CPU_TOKENS", BATCH)
    folder = tmp_path / "atlas"
    with monkeypatch.context() as patch:
        patch.setattr(atlas._Atlas, "_together_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            linearity.linearity_atlas(model, *texts, folder=folder, **options)

    def work() -> Any:
        return linearity.linearity_atlas(model, *texts, folder=folder, **options)

    for made in outcomes(3, work, tmp_path / "outcomes"):
        pd.testing.assert_frame_equal(made, whole, rtol=2e-4, atol=1e-5)
