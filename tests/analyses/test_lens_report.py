"""The report of lenses on a small model: its tables are there, and `id` is what it is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from analysing import LENSES, assert_figure, run
from conftest import D_MODEL, N_LAYERS
from lenses import (
    closed_form_flops,
    cosine_table,
    fit_flops,
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
    words = corpora / "words.txt"
    run(
        LENSES, "--model", model_folder("llama"), "--corpus", words, "--train", 90, "--val", 30, "--layer", 1,
        "--layer", 2, "--no-tuned", "--device", "cpu", "--out", tmp_path,
    )  # fmt: skip
    table = pd.read_csv(tmp_path / f"{LENSES}.csv", keep_default_na=False)
    assert_figure(tmp_path, LENSES)
    flops = table[table["metric"] == "flops"].set_index("method")["value"]
    assert set(flops.index) == set(table["method"])
    assert flops["polished"] > flops["scaled"] > flops["mat"] == flops["weighted"] > flops["id"] == 0
    assert (tmp_path / f"{LENSES}_exits.csv").exists()
    model = small_model("llama")
    _, part = matlens.load_corpus(str(words)).split(n_train=90, n_validation=30)
    validation = matlens.collect(model, matlens.make_examples(model, part), progress=False)
    expected = evaluate_lenses({"id": Lens.identity(model)}, validation, layers=[1, 2], progress=False)
    ours = table[(table["method"] == "id") & (table["against"] == "")]
    both = (each[each["metric"].isin(["precision", "surprisal", "kl"])] for each in (ours, expected))
    first, second = (each["value"].astype(float).tolist() for each in both)
    assert first == pytest.approx(second, rel=1e-4)
    assert len(first) >= 2 * 5


# Cosines and operations


def matrix(seed: int) -> torch.Tensor:
    return numbers(D_MODEL, D_MODEL, seed=seed)


def test_the_ceiling_is_what_noise_of_that_size_leaves(small_model):
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
    a, b = matrix(0), matrix(0) + matrix(1)
    assert matrix_cosine(a, b) == pytest.approx(float(np.corrcoef(a.flatten(), b.flatten())[0, 1]), abs=0.01)
    assert matrix_cosine(a, -3 * a) == pytest.approx(-1)


def test_halves_are_fits_on_halves_and_their_mean_is_the_lens(small_model, sentences):
    model = small_model("gpt2")
    (first, second), mean, _ = fit_jacobians(model, sentences, [2], 4, 48)
    torch.testing.assert_close(mean.matrix(2), (first.matrix(2) + second.matrix(2)) / 2)
    longest = sorted(sentences.sentences, key=lambda text: (-len(text.split()), text))[:4]
    half = replace(sentences, sentences=tuple(longest[1::2]))
    alone = Lens.fit(model, half, method="jacobian", layers=[2], progress=False)
    torch.testing.assert_close(second.matrix(2), alone.matrix(2))
    assert mean.n_samples == 4
    examples = matlens.make_examples(model, sentences)
    rows = matlens.collect(model, examples, [2, 3], positions="all", progress=False)
    x, y, n = rows[2].double().numpy(), rows[3].double().numpy(), rows.n_rows // 2
    halves = fit_halves(model, sentences, ["mat"], [2], 0)["mat"]
    for lens, part in zip(halves, (slice(n), slice(n, None)), strict=True):
        expected = np.linalg.lstsq(x[part], y[part], rcond=None)[0].T
        assert matrix_cosine(lens.matrix(2), torch.from_numpy(expected)) == pytest.approx(1, abs=1e-4)


def counted(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_operations_are_those_that_are_done(small_model):
    model = small_model("llama")
    readout, h = matlens.Readout(model), numbers(64, D_MODEL)
    training = LayerTraining(readout, h, h + 1)
    seen = counted(lambda: training.tune(steps=4))
    assert training_flops(2 * 64, D_MODEL, 60) == seen
    training = LayerTraining(readout, h, h + 1)
    seen = counted(lambda: training.polish(steps=2, batch=32, tokens=60))
    pilot = training_flops(2 * 32, D_MODEL, 60, pilot=64, d_vocab=60)
    orthogonal = 2 * 5 * 3 * 2 * D_MODEL**3  # of a step's matrix, which does not grow with rows or tokens
    assert seen == pilot + orthogonal
    tokens = torch.arange(2, 22)[None]
    with torch.no_grad():
        seen = counted(lambda: model(tokens))
    parameters = sum(weight.numel() for weight in model.blocks.parameters() if weight.ndim == 2)
    # Back through the blocks to activations alone is as much work as forward. Of a pass, the unembedding and
    # attention's own products, which grow with the square of the length, are not counted.
    others = 2 * 20 * D_MODEL * 60 + 2 * 2 * 20**2 * D_MODEL * N_LAYERS
    assert jacobian_flops(20, D_MODEL, parameters, at_once=1) == (seen - others) * (D_MODEL + 1)
    assert closed_form_flops(20_000, 100) == pytest.approx(10 * closed_form_flops(2_000, 100), rel=0.01)
    assert closed_form_flops(100_000, 200) == pytest.approx(4 * closed_form_flops(100_000, 100), rel=0.01)
    assert 0 < closed_form_flops(3, 100) < closed_form_flops(100, 100)
    assert fit_flops(Lens.identity(model), 100) == 0
