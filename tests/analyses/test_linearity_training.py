"""Linearity over training: every value is of its checkpoint, layer and part, by Hugging Face and NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from analysing import assert_figure, run
from figures.beyond import over_training
from linearity_training import checkpoint_steps, checkpoint_updates, load_checkpoint
from sklearn.metrics import r2_score
from transformers import GPT2LMHeadModel

import matlens
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


def read_sites(gpt: GPT2LMHeadModel, texts: list[list[int]]) -> dict[str, np.ndarray]:
    """Vectors of all tokens at every layer, and at the ends of attention and FFN of each block."""
    sites: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, vectors: Any) -> None:
        sites.setdefault(name, []).append((vectors[0] if isinstance(vectors, tuple) else vectors)[0].double())

    for i, block in enumerate(gpt.transformer.h):
        block.register_forward_pre_hook(lambda _, x, i=i: keep(f"h{i}", x))
        block.register_forward_hook(lambda _, x, y, i=i: keep(f"after {i}", y))
        for name, norm, module in (("attn", block.ln_1, block.attn), ("ffn", block.ln_2, block.mlp)):
            norm.register_forward_hook(lambda _, x, y, key=f"{name}_in{i}": keep(key, y))
            module.register_forward_hook(lambda _, x, y, key=f"{name}_out{i}": keep(key, y))
    with torch.no_grad():
        for text in texts:
            gpt(torch.tensor([text]))
    return {name: torch.cat(parts).numpy() for name, parts in sites.items()}


def texts_of(examples: Any) -> list[list[int]]:
    return [part.tolist() for part in np.split(examples.tokens, examples.offsets[1:-1])]


@pytest.mark.parametrize("step", [0, 2])
def test_values_are_those_of_a_checkpoint_by_hand(step, out, table, letters):
    folder = out / FOLDER / f"step{step}"
    model, rows = matlens.load(folder, device="cpu"), table[table["step"] == step]
    parts = matlens.load_corpus(letters).split(n_train=N_TRAIN, n_validation=N_VALIDATION)

    def gpt() -> GPT2LMHeadModel:
        return GPT2LMHeadModel.from_pretrained(folder).eval()

    def value(**cells: Any) -> float:
        (found,) = rows[(rows[list(cells)] == pd.Series(cells)).all(axis=1)]["value"]
        return float(found)

    windows = [
        make_windows(model, part, size=64, max_windows=n, targets=True)
        for part, n in zip(parts, (24, 6), strict=True)
    ]
    x, y = (read_sites(gpt(), texts_of(each)) for each in windows)
    for i in range(2):
        for kind, ends in {
            "attn": (f"attn_in{i}", f"attn_out{i}"), "ffn": (f"ffn_in{i}", f"ffn_out{i}"),
            "block": (f"h{i}", f"after {i}"),
        }.items():  # fmt: skip
            ones = [np.hstack([each[ends[0]], np.ones((len(each[ends[0]]), 1))]) for each in (x, y)]
            # Outputs of a norm sum to a constant but for rounding, which the atlas damps and this cuts off.
            weight = np.linalg.lstsq(ones[0], x[ends[1]], rcond=1e-5)[0]
            expected = r2_score(y[ends[1]], ones[1] @ weight)
            assert value(kind=kind, layer=i, metric="r2", tokens="all") == pytest.approx(expected, abs=2e-4)
    examples = [make_examples(model, part) for part in parts]
    x, y = (read_sites(gpt(), texts_of(each)) for each in examples)
    places = [each.offsets[:-1] + each.positions for each in examples]
    head = gpt()

    def top(h: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return head.lm_head(head.transformer.ln_f(torch.from_numpy(h).float())).argmax(-1).numpy()

    predicted = top(y["after 1"][places[1]])
    assert value(method="constant", k=1) == np.bincount(predicted).max() / N_VALIDATION
    for i in range(2):
        h, last = x[f"h{i}"][places[0]], x["after 1"][places[0]]
        mapped = y[f"h{i}"][places[1]] @ np.linalg.lstsq(h, last, rcond=None)[0]
        for method, guess in (("mat", mapped), ("id", y[f"h{i}"][places[1]])):
            hits = (top(guess) == predicted).mean()
            assert value(method=method, layer=i, metric="precision", k=1) == pytest.approx(hits)
    losses = []
    for text in texts_of(examples[1]):
        with torch.no_grad():
            log_p = head(torch.tensor([text])).logits[0].log_softmax(-1)
        losses += [-float(log_p[i - 1, text[i]]) for i in range(1, len(text))]
    assert value(method="model", metric="loss") == pytest.approx(np.mean(losses), rel=1e-5)


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
    assert load_checkpoint(Path("EleutherAI/pythia-70m"), "step512") == (
        "EleutherAI/pythia-70m",
        {"revision": "step512"},
    )
    assert load_checkpoint(out / FOLDER, "step2") == (out / FOLDER / "step2", {})


def test_checkpoints_are_spaced_evenly_on_a_logarithmic_scale_and_ordered():
    assert list(checkpoint_updates(2048).values()) == [0, *(2**i for i in range(1, 12))]
    assert list(checkpoint_steps("step143000, step0,checkpoint-500").items()) == [
        ("step0", 0), ("checkpoint-500", 500), ("step143000", 143000),
    ]  # fmt: skip
    with pytest.raises(matlens.InputError, match="main"):
        checkpoint_steps("step0,main")


def test_the_figure_has_the_means_of_layers(table):
    lines = [{line.get_label(): line for line in ax.get_lines()} for ax in over_training(table).axes]
    assert [set(names) for names in lines] == [
        {"model"}, {"mat", "id", "constant"}, {"attn", "ffn", "block"}, {"attn", "ffn", "block"},
    ]  # fmt: skip
    for panel, name, rows in (
        (1, "mat", table[(table["method"] == "mat") & (table["k"] == 1)]),
        (2, "ffn", table[(table["kind"] == "ffn") & (table["metric"] == "r2")]),
        (3, "attn", table.query("kind == 'attn' and method == 'map' and metric == 'loss increase'")),
    ):
        assert lines[panel][name].get_xdata().tolist() == [0, 1, 2]
        assert lines[panel][name].get_ydata() == pytest.approx(rows.groupby("step")["value"].mean())
