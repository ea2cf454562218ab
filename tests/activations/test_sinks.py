"""Sinks are the tokens whose norm stands out at some layer, found the same from rows and from sentences."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import plain_vectors

from matlens import InputError, collect, make_examples
from matlens.activations import sinks as sinks_module
from matlens.activations import stream
from matlens.activations.sinks import SinkWarning, find_sinks, outlying_rows, sink_counts, sink_rows


def by_hand(norms: torch.Tensor) -> torch.Tensor:
    """How far each token stands out: its largest norm as a multiple of that layer's median."""
    medians = [sorted(norms[:, layer].tolist())[(len(norms) - 1) // 2] for layer in range(norms.shape[1])]
    return torch.tensor([max(x / m for x, m in zip(row, medians, strict=True)) for row in norms.tolist()])


@pytest.mark.parametrize("name", ["llama", "neox", "bert"])
def test_the_rule_is_the_same_for_rows_and_for_sentences(
    name, sentences, small_model, plain_model, monkeypatch
):
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
    monkeypatch.setattr(sinks_module, "_FACTOR", factor)
    mask = find_sinks(model, examples, batch_tokens=64, progress=False)
    assert mask.shape == (len(examples), examples.lengths.max())
    own = torch.cat([row[:length] for row, length in zip(mask, examples.lengths, strict=True)])
    assert torch.equal(own, expected)
    assert int(mask.sum()) == int(expected.sum())  # nothing past a sentence's end
    rows = collect(model, examples, positions="all", progress=False)
    assert torch.equal(sink_rows(rows), expected)


@pytest.mark.parametrize(
    ("ratio", "known"), [(27.5, True), (16.0, True), (6.0, True), (3.0, False), (1.0, False)]
)
def test_first_tokens_are_sinks_together_by_less_than_twenty_times_the_median(ratio, known):
    """As in Gemma 3, whose first tokens pass twenty at one layer alone and reach 8 to 16 at the others."""
    generator, places = torch.Generator().manual_seed(0), np.arange(300) % 10
    norms = 1 + 0.2 * torch.rand(300, 3, generator=generator)
    norms[places == 0, 1] *= ratio
    norms[7, 1] = 1.5
    sinks = outlying_rows(norms, places=places)
    assert sinks.tolist() == ((places == 0) & known).tolist()
    counts = sink_counts(sinks | torch.from_numpy(places == 7), places)
    assert list(counts.values()) == [30 * known + 30, 30 * known, 30, 30]
    assert outlying_rows(norms, np.ones_like(places)).any() == (ratio > 20)


def at_the_limits(
    first: tuple[float, ...] = (4, 2, 9, 4, 4), longest: tuple[float, float] = (2, 3)
) -> tuple[torch.Tensor, np.ndarray]:
    """Norms at one layer whose median is 1: five first tokens of median 4, and 100 others.

    Of the others 98 are 1, so that one in a hundred is longer than the first of the longest two.
    """
    norms = torch.tensor([*first, *[1.0] * 98, *longest])[:, None]
    return norms, np.array([0] * len(first) + [3] * 100)


def first_sinks(norms: torch.Tensor, places: np.ndarray) -> list[int]:
    return outlying_rows(norms, places=places).nonzero()[:, 0].tolist()


def test_the_limits_themselves_belong_to_where_they_are_said_to():
    norms, places = at_the_limits()
    assert float(norms.median()) == 1
    # Four times the median and twice the others, which is enough; half of the first tokens' median is not.
    assert first_sinks(norms, places) == [0, 2, 3, 4]
    assert first_sinks(*at_the_limits((3.99, 2, 9, 3.99, 3.99))) == []
    assert first_sinks(*at_the_limits(longest=(2.01, 3))) == []
    assert first_sinks(*at_the_limits((4, 2.01, 9, 4, 4))) == [0, 1, 2, 3, 4]
    # A row of twenty times the median is none, one of more is.
    assert first_sinks(*at_the_limits(longest=(20, 20.01))) == [0, 2, 3, 4, 104]


@pytest.mark.parametrize(
    ("first", "n_others", "sinks"),
    [((8, 8, 8), 100, [0, 1, 2]), ((8, 8), 100, []), ((1, 8, 8), 3, [1, 2]), ((1, 8, 8), 2, [])],
)
def test_three_first_tokens_and_three_others_are_enough(first, n_others, sinks):
    norms = torch.tensor([*first, *[1.0] * n_others])[:, None]
    assert first_sinks(norms, np.array([0] * len(first) + [3] * n_others)) == sinks


@pytest.mark.refused
@pytest.mark.parametrize(
    ("norms", "options"),
    [
        (torch.tensor([[1.0, torch.nan]]), {}), (torch.tensor([[1.0, torch.inf]]), {}),
        (-torch.ones(3, 2), {}), (torch.ones(3, 0), {}), (torch.ones(3, 2), {"places": np.arange(4)}),
    ],
)  # fmt: skip
def test_what_are_no_norms_is_refused(norms, options):
    with pytest.raises(InputError, match=r"^(norms|places) must be"):
        outlying_rows(norms, **{"places": np.arange(len(norms)), **options})


def test_a_warning_names_missing_layers(sentences, small_model):
    model = small_model("llama")
    examples = make_examples(model, sentences)
    rows = collect(model, examples, ["h.1", "h.3"], progress=False)
    with pytest.warns(SinkWarning, match=r"0 sinks are found at h\.1, h\.3.*collect all layers"):
        sink_rows(rows)
    rows["h.3"][examples.positions == 0] *= 30
    rows["h.3"][torch.from_numpy(examples.positions).argmax()] *= 30
    expected = int((examples.positions == 0).sum())
    with pytest.warns(
        SinkWarning, match=rf"{expected + 1} sinks are found .*, {expected} of them first tokens"
    ):
        assert int(sink_rows(rows).sum()) == expected + 1


@pytest.mark.parametrize(
    ("n", "factor", "known", "warned"),
    [(2, 9.0, 0, 1), (2, 1.0, 0, 1), (1, 1.0, 0, 1), (2, 60.0, 2, 0), (3, 9.0, 3, 0), (3, 1.0, 0, 0)],
)
def test_too_few_first_tokens_are_warned_of(n, factor, known, warned, sentences, small_model, monkeypatch):
    """First tokens that are so many times as long as they are at layer 2."""

    def longer(*arguments: Any, **options: Any) -> Any:
        for rows in stream(*arguments, **options):
            with torch.inference_mode():
                rows.vectors["h.2"][torch.from_numpy(rows.places == 0)] *= factor
            yield rows

    monkeypatch.setattr(sinks_module, "stream", longer)
    model = small_model("llama")
    examples = make_examples(model, replace(sentences, sentences=sentences.sentences[:n]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert int(find_sinks(model, examples, progress=False).sum()) == known
    words = [str(warning.message) for warning in caught if warning.category is SinkWarning]
    assert len(words) == warned
    assert all("first tokens stand out" in text and "more sentences" in text for text in words)
