"""The table of a training holds its curve and its perplexities, each number where it belongs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from figures.paper_a import training_curves
from training import NgramModel, TrainingRun, compare_with_ngrams, training_table
from transformers import GPT2Config, GPT2LMHeadModel

SEQUENCES = [[2, 5, 6, 2], [2, 5, 7, 6, 2], [2, 8, 2]]
HELD_OUT = [[2, 5, 6, 7, 2], [2, 8, 5]]
NAMED: dict[str, Any] = {"model": "small", "corpus": "words", "n_held_out": 2}


def test_perplexities_are_of_held_out_tokens() -> None:
    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 2)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=8, **ends))
    table = compare_with_ngrams(model, SEQUENCES, HELD_OUT)
    logs = []
    with torch.no_grad():
        for tokens in HELD_OUT:
            log_p = model.eval()(torch.tensor([tokens])).logits[0].log_softmax(-1)
            logs += [float(log_p[i - 1, tokens[i]]) for i in range(1, len(tokens))]
    assert table["model"].value == pytest.approx(math.exp(-sum(logs) / len(logs)), rel=1e-5)
    assert table["model"].low < table["model"].value < table["model"].high
    for order, name in enumerate(("unigrams", "bigrams", "trigrams"), start=1):
        expected = NgramModel(SEQUENCES, d_vocab=9, order=order).perplexity(HELD_OUT)
        assert (table[name].value, table[name].n) == expected
        assert table[name].n == 6


def test_a_table_holds_the_curve_and_the_perplexities() -> None:
    run = TrainingRun(20, 3.0, [(10, 2.5, 2.75), (20, 2.0, 2.25)])
    perplexities = {"trigrams": NgramModel(SEQUENCES, d_vocab=9).perplexity(HELD_OUT)}
    from matlens.metrics import Estimate

    estimates = {name: Estimate.without_interval(*number) for name, number in perplexities.items()}
    table = training_table(run, estimates, **NAMED)
    losses = table[table["metric"] == "loss"]
    assert losses[["method", "k", "value"]].values.tolist() == [
        ["training", 10, 2.5], ["held-out", 10, 2.75], ["training", 20, 2.0], ["held-out", 20, 2.25],
    ]  # fmt: skip
    (row,) = table[table["metric"] == "perplexity"].to_dict("records")
    assert (row["method"], row["value"], row["n"]) == ("trigrams", *perplexities["trigrams"])
    figure = training_curves(table)
    drawn = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert drawn == {
        "small, training": [[10, 2.5], [20, 2.0]], "small, held-out": [[10, 2.75], [20, 2.25]],
    }  # fmt: skip
