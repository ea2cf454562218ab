"""Linearity over training: every value is of its checkpoint, layer and part, by Hugging Face and NumPy."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import handpatched
import numpy as np
import pandas as pd
import pytest
import torch
from analysing import assert_figure, run
from figures.beyond import over_training
from independent import make_readout
from lenses_by_hand import value
from linearity_training import checkpoint_steps, checkpoint_updates, load_checkpoint
from paper_a_by_hand import Sentences, fitted
from sklearn.metrics import r2_score
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel

import matlens
from matlens import load_corpus
from matlens.data import make_examples, make_windows

NAME, FOLDER = "linearity_training", "small-gpt-2-checkpoints"
N_TRAIN, N_VALIDATION = 300, 60
SIZES = ["--train", N_TRAIN, "--val", N_VALIDATION, "--windows", 24, "--eval-windows", 6]


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """Sentences of random letters: enough tokens and places that maps follow from their samples."""
    generator, path = np.random.default_rng(0), tmp_path_factory.mktemp("corpus") / "letters.txt"
    words = ["".join(generator.choice([*"abcdefghijklmnopqrstuvwxyz"], 4)) for _ in range(400 * 9)]
    path.write_text("\n".join(" ".join(words[i : i + 9]) for i in range(0, len(words), 9)))
    return path


@pytest.fixture(scope="module")
def out(letters, tmp_path_factory):
    """A finished run that was killed at its second checkpoint and resumed there."""
    out = tmp_path_factory.mktemp("training") / "out"
    options = ["--corpus", letters, *SIZES, "--updates", 2, "--pieces", 280, "--layers", 2]
    calls, atlas = [0], matlens.linearity.linearity_atlas

    def killed(*arguments: Any, **more: Any) -> pd.DataFrame:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return atlas(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matlens.linearity.linearity_atlas", killed)
        with pytest.raises(SystemExit):
            run(NAME, *options, "--out", out)
        assert not (out / f"{NAME}.csv").exists()
        run(NAME, *options, "--out", out)
    assert calls[0] == 1 + 1 + 2  # the first checkpoint is not evaluated again
    return out


@pytest.fixture(scope="module")
def table(out):
    assert_figure(out, NAME)
    return pd.read_csv(out / f"{NAME}.csv")


def texts_of(examples: Any) -> list[list[int]]:
    return [part.tolist() for part in np.split(examples.tokens, examples.offsets[1:-1])]


@pytest.mark.parametrize("step", [0, 2])
def test_values_are_those_of_a_checkpoint_by_hand(step, out, table, letters):
    folder, parts = (
        out / FOLDER / f"step{step}",
        load_corpus(letters).split(n_train=N_TRAIN, n_validation=N_VALIDATION),
    )
    model, gpt = matlens.load(folder, device="cpu"), GPT2LMHeadModel.from_pretrained(folder).eval()
    read, head = partial(value, table[table["step"] == step], {}), make_readout(gpt)

    def sites(examples: Any) -> list[dict[str, Tensor]]:
        return [handpatched.run("gpt2", gpt, [], text) for text in texts_of(examples)]

    windows = [
        sites(make_windows(model, part, size=64, max_windows=n, targets=True))
        for part, n in zip(parts, (24, 6), strict=True)
    ]
    for i, kind in itertools.product(range(2), ("attn", "ffn", "block")):
        ends = (f"h.{i}", f"h.{i + 1}") if kind == "block" else (f"{kind}_in.{i}", f"{kind}_out.{i}")
        (x, y), (given, truth) = (
            [torch.cat([seen[end] for seen in each]) for end in ends] for each in windows
        )
        ones, others = (torch.cat([each, torch.ones(len(each), 1)], 1) for each in (x, given))
        # Outputs of a norm sum to a constant but for rounding, which the atlas damps and this cuts off.
        weight = torch.linalg.lstsq(ones, y, rcond=1e-5, driver="gelsd").solution
        found = read(kind=kind, layer=i, metric="r2", tokens="all")
        assert found == pytest.approx(r2_score(truth, others @ weight), abs=2e-4)
    train, validation = (Sentences("gpt2", gpt, make_examples(model, part)) for part in parts)
    last = validation.h(2)

    def top(h: Tensor) -> Tensor:
        with torch.no_grad():
            return head(h).argmax(-1)

    assert read(method="constant", k=1) == top(last).bincount().max() / N_VALIDATION
    for i in range(2):
        h = validation.h(i)
        for method, guess in (("mat", h @ fitted(train.h(i), train.h(2)).T), ("id", h)):
            hits = (top(guess) == top(last)).double().mean().item()
            assert read(method=method, layer=i, metric="precision", k=1) == pytest.approx(hits)
    losses = [
        cross_entropy(seen["logits"][:-1], torch.tensor(text[1:]), reduction="none")
        for seen, text in zip(validation.every, validation.tokens, strict=True)
    ]
    assert read(method="model", metric="loss") == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_revisions_are_the_checkpoints_that_they_name(out, table, letters, tmp_path, monkeypatch):
    options = ["--corpus", letters, *SIZES, "--out", tmp_path]
    run(NAME, "--model", out / FOLDER, "--revisions", "step2, step0", *options)
    again = pd.read_csv(tmp_path / f"{NAME}.csv")
    expected = table[table["step"] != 1].reset_index(drop=True)
    pd.testing.assert_frame_equal(again.drop(columns="model"), expected.drop(columns="model"))
    fingerprints = json.loads((tmp_path / f"{NAME}.json").read_text())["fingerprints"]
    assert fingerprints["step0"] != fingerprints["step2"]
    with pytest.raises(SystemExit):
        run(NAME, "--model", out / FOLDER, *options)
    monkeypatch.setattr(matlens, "load", lambda name, **options: (name, options))
    on_hub = load_checkpoint(Path("EleutherAI/pythia-70m"), "step512")
    assert on_hub == ("EleutherAI/pythia-70m", {"revision": "step512"})
    assert load_checkpoint(out / FOLDER, "step2") == (out / FOLDER / "step2", {})


def test_checkpoints_are_spaced_evenly_on_a_logarithmic_scale_and_ordered():
    assert list(checkpoint_updates(2048).values()) == [0, *(2**i for i in range(1, 12))]
    steps = checkpoint_steps("step143000, step0,checkpoint-500")
    assert list(steps.items()) == [("step0", 0), ("checkpoint-500", 500), ("step143000", 143000)]
    with pytest.raises(matlens.InputError, match="main"):
        checkpoint_steps("step0,main")


def test_the_figure_has_the_means_of_layers(table):
    lines = [{line.get_label(): line for line in ax.get_lines()} for ax in over_training(table).axes]
    parts = {"attn", "ffn", "block"}
    assert [set(names) for names in lines] == [{"model"}, {"mat", "id", "constant"}, parts, parts]
    for panel, name, rows in (
        (1, "mat", table[(table["method"] == "mat") & (table["k"] == 1)]),
        (2, "ffn", table[(table["kind"] == "ffn") & (table["metric"] == "r2")]),
        (3, "attn", table.query("kind == 'attn' and method == 'map' and metric == 'loss increase'")),
    ):
        assert lines[panel][name].get_xdata().tolist() == [0, 1, 2]
        assert lines[panel][name].get_ydata() == pytest.approx(rows.groupby("step")["value"].mean())
