"""The report of lenses on a small model: its tables are there, and `id` is what it is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from analysing import LENSES, assert_figure, run, sizes
from conftest import D_MODEL, N_LAYERS
from lenses import (
    closed_form_flops,
    cosine_table,
    fit_halves,
    fit_jacobians,
    jacobian_flops,
    matrix_cosine,
    training_flops,
)
from small_lenses import linear, numbers
from torch.utils.flop_counter import FlopCounterMode

import matlens
from matlens import Lens
from matlens.lens import evaluate_lenses
from matlens.lens.trained import LayerTraining


def test_the_logit_lens_is_that_of_the_main_job(corpora, model_folder, small_model, tmp_path):
    words, layers = corpora / "words.txt", ["--layer", 1, "--layer", 2]
    options = ["--corpus", words, *sizes(), *layers, "--no-tuned", "--out", tmp_path]
    run(LENSES, "--model", model_folder("llama"), *options)
    table, model = pd.read_csv(tmp_path / f"{LENSES}.csv", keep_default_na=False), small_model("llama")
    assert_figure(tmp_path, LENSES)
    flops = table[table["metric"] == "flops"].set_index("method")["value"]
    assert set(flops.index) == set(table["method"])
    assert flops["polished"] > flops["scaled"] > flops["mat"] == flops["weighted"] > flops["id"] == 0
    _, part = matlens.load_corpus(str(words)).split(n_train=90, n_validation=30)
    validation = matlens.collect(model, matlens.make_examples(model, part), progress=False)
    expected = evaluate_lenses({"id": Lens.identity(model)}, validation, layers=[1, 2], progress=False)
    ours = table[(table["method"] == "id") & (table["against"] == "")]
    first, second = (
        each[each["metric"].isin(["precision", "surprisal", "kl"])]["value"].astype(float).tolist()
        for each in (ours, expected)
    )
    assert first == pytest.approx(second, rel=1e-4)
    assert len(first) >= 2 * 5


# Cosines and operations


def test_the_ceiling_is_what_noise_of_that_size_leaves(small_model):
    identity, truth = Lens.identity(small_model("llama")), numbers(D_MODEL, D_MODEL)

    def lens(*noise: tuple[int, float]) -> Lens:
        maps = {
            n: truth + sum(size * numbers(D_MODEL, D_MODEL, seed=100 * n + seed) for seed, size in noise)
            for n in (1, 2)
        }
        return replace(identity, maps={layer: linear(layer, weight) for layer, weight in maps.items()})

    lenses = {
        "mat": lens((1, 0.25), (2, 0.25)),
        "jacobian": lens((3, 0.5), (4, 0.5)),
    }  # means of their halves
    halves = {"mat": (lens((1, 0.5)), lens((2, 0.5))), "jacobian": (lens((3, 1.0)), lens((4, 1.0)))}
    values = cosine_table(lenses, halves).set_index(["method", "layer"])["value"]
    for layer in (1, 2):
        assert values["halves of jacobian", layer] == pytest.approx(0.5, abs=0.05)
        # Both are the same matrix and noise, so the cosine is as high as noise lets it be.
        ceiling = values["ceiling of mat and jacobian", layer]
        assert values["mat and jacobian", layer] == pytest.approx(ceiling, abs=0.03)
        assert ceiling == pytest.approx((1 / 1.125 / 1.5) ** 0.5, abs=0.03)
    a, b = truth, truth + numbers(D_MODEL, D_MODEL, seed=1)
    expected = (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()
    assert [matrix_cosine(a, b), matrix_cosine(a, -3 * a)] == pytest.approx([float(expected), -1])


def test_halves_are_fits_on_halves_and_their_mean_is_the_lens(small_model, sentences):
    model = small_model("gpt2")
    (first, second), mean, _ = fit_jacobians(model, sentences, [2], 4, 48)
    torch.testing.assert_close(mean.matrix(2), (first.matrix(2) + second.matrix(2)) / 2)
    longest = sorted(sentences.sentences, key=lambda text: (-len(text.split()), text))[:4]
    half = replace(sentences, sentences=tuple(longest[1::2]))
    alone = Lens.fit(model, half, method="jacobian", layers=[2], progress=False)
    torch.testing.assert_close(second.matrix(2), alone.matrix(2))
    assert mean.n_samples == 4
    rows = matlens.collect(
        model, matlens.make_examples(model, sentences), [2, 3], positions="all", progress=False
    )
    x, y, n = rows[2].double(), rows[3].double(), rows.n_rows // 2
    for lens, part in zip(
        fit_halves(model, sentences, ["mat"], [2], 0)["mat"], (slice(n), slice(n, None)), strict=True
    ):
        expected = torch.linalg.lstsq(x[part], y[part], driver="gelsd").solution.T
        assert matrix_cosine(lens.matrix(2), expected) == pytest.approx(1, abs=1e-4)


def counted(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_operations_are_those_that_are_done(small_model):
    model = small_model("llama")
    readout, h = matlens.Readout(model), numbers(64, D_MODEL)
    training = LayerTraining(readout, h, h + 1)
    assert training_flops(2 * 64, D_MODEL, 60) == counted(lambda: training.tune(steps=4))
    training = LayerTraining(readout, h, h + 1)
    pilot = training_flops(2 * 32, D_MODEL, 60, pilot=64, d_vocab=60)
    orthogonal = 2 * 5 * 3 * 2 * D_MODEL**3  # of a step's matrix, which does not grow with rows or tokens
    assert counted(lambda: training.polish(steps=2, batch=32, tokens=60)) == pilot + orthogonal
    tokens = torch.arange(2, 22)[None]
    with torch.no_grad():
        seen = counted(lambda: model(tokens))
    parameters = sum(weight.numel() for weight in model.blocks.parameters() if weight.ndim == 2)
    # Back through the blocks to activations alone is as much work as forward. Of a pass, the unembedding and
    # attention's own products, which grow with the square of the length, are not counted.
    others = 2 * 20 * D_MODEL * 60 + 2 * 2 * 20**2 * D_MODEL * N_LAYERS
    assert jacobian_flops(20, D_MODEL, parameters, at_once=1) == (seen - others) * (D_MODEL + 1)
    for (n, d), (more, wider), factor in (
        ((2_000, 100), (20_000, 100), 10), ((100_000, 100), (100_000, 200), 4)
    ):  # fmt: skip
        assert closed_form_flops(more, wider) == pytest.approx(factor * closed_form_flops(n, d), rel=0.01)
    assert 0 < closed_form_flops(3, 100) < closed_form_flops(100, 100)
