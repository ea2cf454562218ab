"""Maps of several fits are least squares on what each was fitted on, evaluated on what each is tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from conftest import WORDS, plain_vectors
from paper_a_sec5_corpora import fit_equally_many

from matlens import Corpus, collect, make_examples

Models = Callable[[str], Any]


def corpus(name: str, n: int) -> Corpus:
    rng = np.random.default_rng(n)
    texts = [" ".join(rng.choice(WORDS, int(rng.integers(4, 9)))) for _ in range(n)]
    return Corpus(name, tuple(texts), n, 0, 0, 0)


def test_at_all_positions_as_many_tokens_of_each_corpus_count(
    small_model: Models, plain_model: Models
) -> None:
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
