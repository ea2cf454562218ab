"""Small models that scripts train are saved whole, go on where they were, and can be analysed."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
from analysing import assert_figure, run
from training.tables import NgramModel

import matlens
from matlens.models import ModelLayout

SIZES: dict[str, list[object]] = {
    "small_wikilm": ["--words", 64, "--layers", 2, "--width", 16],
    "small_gpts": ["--pieces", 280, "--size", 2],
}
MODELS = {"small_wikilm": "small-wikilm/checkpoint.pt", "small_gpts": "small-gpt-2"}


@pytest.mark.parametrize("name", SIZES)
def test_a_small_model_is_trained_and_compared_with_ngrams(name, corpora, tmp_path):
    out, words = tmp_path / "out", corpora / "words.txt"
    options = ["--corpus", words, "--train", 80, "--val", 20, "--updates", 4, "--out", out]
    run(name, *options, *SIZES[name])
    table = pd.read_csv(out / f"{name}.csv")
    assert_figure(out, name)
    model = matlens.load(out / MODELS[name], device="cpu")
    assert ModelLayout.from_model(model).wiring.name == "pre-norm"
    parts = matlens.load_corpus(words).split(n_train=80, n_validation=20)
    end, logs = model.tokenizer.eos_token_id, []
    for sentence in parts[1].sentences:
        ids = [end, *model.tokenizer(sentence, add_special_tokens=False)["input_ids"], end]
        with torch.no_grad():
            log_p = model(torch.tensor([ids]))[0].log_softmax(-1)
        logs += [float(log_p[i - 1, ids[i]]) for i in range(1, len(ids))]
    (row,) = table[(table["metric"] == "perplexity") & (table["method"] == "model")].to_dict("records")
    assert row["n"] == len(logs)
    assert row["value"] == pytest.approx(math.exp(-sum(logs) / len(logs)), rel=1e-4)
    assert {"training", "held-out"} <= set(table["method"])
    texts = [
        [[end, *model.tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in part.sentences]
        for part in parts
    ]
    for order, method in enumerate(("unigrams", "bigrams", "trigrams"), start=1):
        ngrams = NgramModel(texts[0], d_vocab=len(model.tokenizer), order=order)
        (row,) = table[table["method"] == method].to_dict("records")
        assert (row["value"], row["n"]) == pytest.approx(ngrams.perplexity(texts[1]))
    before = (out / f"{name}.csv").read_bytes()
    run(name, *options, *SIZES[name])  # it is finished
    assert (out / f"{name}.csv").read_bytes() == before
