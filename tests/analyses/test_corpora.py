"""Maps of several fits are least squares on what each was fitted on, evaluated on what each is tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from paper_a_sec5_corpora import fit_equally_many
from plain_streams import corpus, plain_stream

from matlens import collect, make_examples

Models = Callable[[str], Any]


def test_at_all_positions_as_many_tokens_of_each_corpus_count(
    small_model: Models, plain_model: Models
) -> None:
    model, plain = small_model("llama"), plain_model("llama")
    examples = {name: make_examples(model, corpus(name, n, n)) for name, n in (("long", 40), ("short", 12))}
    collected = {
        name: collect(model, part, positions="all", progress=False) for name, part in examples.items()
    }
    equal = len(examples["short"].tokens)
    assert 40 < equal < len(examples["long"].tokens)
    maps = fit_equally_many(collected, every=2)
    for name, part in examples.items():
        assert list(maps[name]) == [("h.0", "h.3"), ("h.2", "h.3")]
        assert maps[name].provenance.to_json()["n_fitted"] == equal
        stream = [h[:equal] for h in plain_stream("llama", plain, part, "all")]
        for layer in (0, 2):
            weight = torch.linalg.lstsq(stream[layer], stream[-1], driver="gelsd").solution.T
            assert torch.allclose(maps[name][layer, 3].weight.double(), weight, rtol=1e-3, atol=1e-3)
