"""Sinks are the tokens whose norm stands out at some layer, found the same from rows and from sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, plain_vectors

from matlens import InputError, collect, make_examples
from matlens.activations.sinks import find_sinks, sink_rows
from matlens.corpora.corpus import Corpus


def by_hand(norms: torch.Tensor) -> torch.Tensor:
    """How far each token stands out: its largest norm as a multiple of that layer's median."""
    medians = [sorted(norms[:, layer].tolist())[(len(norms) - 1) // 2] for layer in range(norms.shape[1])]
    return torch.tensor([max(x / m for x, m in zip(row, medians, strict=True)) for row in norms.tolist()])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_rule_is_the_same_for_rows_and_for_sentences(
    name: str,
    sentences: Corpus,
    small_model: Callable[[str], Any],
    plain_model: Callable[[str], Any],
) -> None:
    model, examples = small_model(name), make_examples(small_model(name), sentences)
    norms = []
    for start, end in zip(examples.offsets[:-1], examples.offsets[1:], strict=True):
        found = plain_vectors(name, plain_model(name), torch.from_numpy(examples.tokens[start:end]))
        stream = [found[site][0] for site in found if site.startswith("h.")]
        norms.append(torch.stack([h.norm(dim=1) for h in stream], 1))
    ratios = by_hand(torch.cat(norms))
    top = ratios.sort().values[-20:]
    factor = float(top[top.diff().argmax() :][:2].mean())  # in the widest gap, where rounding tells nothing
    expected = ratios > factor
    assert 0 < expected.sum() < 20
    mask = find_sinks(model, examples, factor=factor, batch_tokens=64, progress=False)
    assert mask.shape == (len(examples), examples.lengths.max())
    own = torch.cat([row[:length] for row, length in zip(mask, examples.lengths, strict=True)])
    assert torch.equal(own, expected)
    assert int(mask.sum()) == int(expected.sum())  # nothing past a sentence's end
    rows = collect(model, examples, positions="all", progress=False)
    assert torch.equal(sink_rows(rows, factor=factor), expected)


def test_a_token_that_stands_out_at_one_layer_is_a_sink(
    sentences: Corpus, small_model: Callable[[str], Any]
) -> None:
    model = small_model("llama")
    rows = collect(model, make_examples(model, sentences), progress=False)
    assert not sink_rows(rows).any()
    rows["h.2"][5] *= 1000
    assert sink_rows(rows).nonzero().tolist() == [[5]]
    assert not sink_rows(rows, factor=1e6).any()


def test_rows_without_the_stream_are_refused(sentences: Corpus, small_model: Callable[[str], Any]) -> None:
    model = small_model("gpt2")
    rows = collect(model, make_examples(model, sentences), ["ffn_in.1"], progress=False)
    with pytest.raises(InputError, match="no layer of the stream"):
        sink_rows(rows)
