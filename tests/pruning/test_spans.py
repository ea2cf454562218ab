"""Which blocks are left out."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from calibration_texts import logits_without, running_text
from conftest import D_MODEL, N_LAYERS
from torch.nn.functional import cross_entropy

import matlens
from matlens import InputError
from matlens.data import make_windows
from matlens.pruning.choosing import choose_span, greedy_order, linearity_of, loss_without, no_sinks
from matlens.pruning.layouts import Layout, Streams, full_windows


def streams_of(model: Any) -> Streams:
    windows = full_windows(make_windows(model, running_text(200), size=20))
    return Streams(Layout.from_model(model), windows, progress=False)


@pytest.fixture(scope="module")
def streams(small_model):
    return streams_of(small_model("gpt2"))


def test_the_most_linear_span_is_that_of_least_squares_without_sinks(streams):
    """A token that is a hundred times as long as others would be all that counts."""
    marked = copy.copy(streams)
    marked.h = [h.clone() for h in streams.h]
    generator = torch.Generator().manual_seed(1)
    for h in marked.h[1:]:
        h[:, 7] = 300 * torch.randn(D_MODEL, generator=generator)
    sinks = torch.zeros(streams.tokens.shape, dtype=torch.bool)
    sinks[:, 7] = True
    assert torch.equal(no_sinks(marked), ~sinks)
    scores = {}
    for start in (1, 2):
        x, y = (marked.h[i][~sinks].double().numpy() for i in (start, start + 1))
        x = np.hstack([x, np.ones((len(x), 1))])
        rest = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
        scores[start] = float((1 - rest.var(0) / y.var(0)).mean())
        assert linearity_of(marked.h[start], marked.h[start + 1], ~sinks) == pytest.approx(scores[start])
    best = max(scores, key=scores.__getitem__)
    assert choose_span(marked, 1, "r2", progress=False) == (best,)
    few = streams.beginning(1)
    few.tokens, few.h = few.tokens[:1], [h[:1] for h in few.h]
    with pytest.raises(InputError, match="more than 33 tokens"):
        choose_span(few, 1, "r2", progress=False)


@pytest.mark.parametrize("seed", range(2))
def test_greedy_is_the_least_of_every_round_where_losses_rise(seed, streams, monkeypatch):
    """Blocks that cost more the more of the others are gone: the order changes from round to round."""
    n_layers, generator = 9, np.random.default_rng(seed)
    alone = generator.uniform(0, 1, n_layers)
    together = generator.uniform(0, 1, (n_layers, n_layers)) ** 6
    tried: list[frozenset[int]] = []

    def loss(gone: Any) -> float:
        tried.append(frozenset(gone))
        out = sorted(gone)
        return float(alone[out].sum() + together[np.ix_(out, out)].sum())

    monkeypatch.setattr("matlens.pruning.choosing.loss_without", lambda _, gone: loss(gone))
    deep = copy.copy(streams)
    deep.layout = SimpleNamespace(blocks=range(n_layers))  # type: ignore[assignment]
    order = greedy_order(deep, 6, progress=False)
    n_tried = len(tried)
    gone: list[int] = []
    for _ in range(6):  # every block that is left, tried in every round
        rest = [block for block in range(1, n_layers) if block not in gone]
        gone.append(min(rest, key=lambda block: loss([*gone, block])))
    assert order == gone
    assert n_tried < len(tried) - n_tried


@pytest.mark.parametrize(
    "choose",
    [
        lambda streams: choose_span(streams, 1, "loss", progress=False),
        lambda streams: tuple(greedy_order(streams, 1, progress=False)),
    ],
)
def test_a_loss_that_is_no_number_is_never_the_least(choose, streams, monkeypatch):
    losses = iter([float("nan"), 3.0, float("nan"), float("nan")])
    monkeypatch.setattr(Streams, "losses", lambda *_: torch.tensor([next(losses)]))
    assert choose(streams) == (2,)
    with pytest.raises(InputError, match="finite"):
        choose(streams)


def test_streams_that_overflow_are_refused(model_folder):
    half = matlens.load(str(model_folder("gpt2")), dtype=torch.float16, device="cpu")
    layout = Layout.from_model(half)
    with torch.no_grad():
        layout.blocks[1].mlp.c_proj.weight.fill_(6e4)
    with pytest.raises(InputError, match=r"h\.2 are not finite"):
        Streams(layout, torch.tensor([[3, 4, 5, 6]]), progress=False)


def test_losses_are_those_by_hand_and_choices_the_least_of_all(streams, plain_model):
    plain = plain_model("gpt2")

    def loss(*gone: int) -> float:
        logits = logits_without(plain, [plain.transformer.h[i] for i in gone], streams.tokens)[:, :-1]
        return float(cross_entropy(logits.flatten(0, 1), streams.tokens[:, 1:].flatten()))

    for gone in ((1,), (2,), (1, 2)):
        assert loss_without(streams, gone) == pytest.approx(loss(*gone), abs=1e-5)
    assert float(streams.losses(streams.h[N_LAYERS]).mean()) == pytest.approx(loss(), abs=1e-5)
    best = min((1, 2), key=loss)
    assert choose_span(streams, 1, "loss", progress=False) == (best,)
    assert greedy_order(streams, 1, progress=False) == [best]
    unit = [h.double() / h.double().norm(dim=-1, keepdim=True) for h in streams.h]
    turned = {i: float((unit[i] * unit[i + 1]).sum(-1).clamp(-1, 1).arccos().mean()) for i in (1, 2)}
    assert choose_span(streams, 1, "angle", progress=False) == (min(turned, key=turned.__getitem__),)
    assert choose_span(streams, 0, "loss", progress=False) == ()
