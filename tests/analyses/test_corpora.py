"""Maps of several fits are least squares on what each was fitted on, evaluated on what each is tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import WORDS, plain_vectors
from paper_a_sec5_corpora import fit_equally_many, transfer_losses

from matlens import Corpus, collect, make_examples

Models = Callable[[str], Any]


def corpus(name: str, n: int) -> Corpus:
    rng = np.random.default_rng(n)
    texts = [" ".join(rng.choice(WORDS, int(rng.integers(4, 9)))) for _ in range(n)]
    return Corpus(name, tuple(texts), n, 0, 0, 0)


def test_at_all_positions_as_many_tokens_of_each_corpus_count(small_model, plain_model):
    model, plain = small_model("llama"), plain_model("llama")
    examples = {name: make_examples(model, corpus(name, n)) for name, n in (("long", 40), ("short", 12))}
    collected = {
        name: collect(model, part, positions="all", progress=False) for name, part in examples.items()
    }
    equal = len(examples["short"].tokens)
    assert 40 < equal < len(examples["long"].tokens)
    maps = fit_equally_many(collected, every=2)
    for name, part in examples.items():
        assert list(maps[name]) == [("h.0", "h.3"), ("h.2", "h.3")]
        assert maps[name].provenance.to_json()["n_fitted"] == equal
        spans = zip(part.offsets[:-1], part.offsets[1:], strict=True)
        seen = [
            plain_vectors("llama", plain, torch.from_numpy(part.tokens[start:end])) for start, end in spans
        ]
        x, y, last = (torch.cat([of[f"h.{i}"][0] for of in seen])[:equal].double() for i in (0, 2, 3))
        for layer, source in ((0, x), (2, y)):
            weight = torch.linalg.lstsq(source, last, driver="gelsd").solution.T
            assert torch.allclose(maps[name][layer, 3].weight.double(), weight, rtol=1e-3, atol=1e-3)


def test_losses_are_relative_to_the_maps_of_the_tested_corpus():
    """By layers, before the mean; other metrics and other k do not count."""
    precision = {
        ("a", "a"): (0.5, 0.8),
        ("a", "b"): (0.4, 0.8),
        ("b", "a"): (0.3, 0.2),
        ("b", "b"): (0.2, 0.4),
    }
    rows = [
        (tested, f"mat of {fitted}", layer, metric, k, value if metric == "precision" and k == 1 else 9.0)
        for (tested, fitted), values in precision.items()
        for layer, value in enumerate(values)
        for metric, k in (("precision", 1), ("precision", 10), ("surprisal", None))
    ]
    table = pd.DataFrame(rows, columns=["corpus", "method", "layer", "metric", "k", "value"])
    losses = transfer_losses(table).set_index(["corpus", "method"])
    assert losses.loc[("a", "mat of a")].tolist() == pytest.approx([0.65, 0, 0])
    assert losses.loc[("a", "mat of b")].tolist() == pytest.approx([0.6, -0.05, -0.1])
    assert losses.loc[("b", "mat of a")].tolist() == pytest.approx([0.25, -0.05, 0.0])
