"""Adaptive input and softmax against torch's own adaptive softmax and a loop over words."""

from __future__ import annotations

import pytest
import torch

from matlens.models.families.wikilm.adaptive import AdaptiveInput, AdaptiveSoftmax

D, V = 16, 40


def layers(cutoffs: list[int]) -> tuple[AdaptiveSoftmax, torch.nn.AdaptiveLogSoftmaxWithLoss]:
    torch.manual_seed(0)
    ours, theirs = AdaptiveSoftmax(D, V, cutoffs, 2), torch.nn.AdaptiveLogSoftmaxWithLoss(D, V, cutoffs, 2)
    state = {"head.weight": torch.cat([ours.words[0], ours.classes])}
    for i, projection in enumerate(ours.projections):
        state |= {f"tail.{i}.0.weight": projection.T, f"tail.{i}.1.weight": ours.words[i + 1]}
    theirs.load_state_dict(state)
    return ours, theirs


@pytest.mark.parametrize("cutoffs", [[10], [4, 17], [3, 4, 39]])
def test_it_is_the_adaptive_softmax_of_torch(cutoffs: list[int]) -> None:
    ours, theirs = layers(cutoffs)
    x, targets = torch.randn(50, D), torch.arange(50) % V
    torch.testing.assert_close(ours(x), theirs.log_prob(x))
    torch.testing.assert_close(ours(x).exp().sum(1), torch.ones(50))
    torch.testing.assert_close(ours.losses(x, targets), -theirs(x, targets).output)
    torch.testing.assert_close(ours(x.view(2, 25, D)), ours(x).view(2, 25, V))
    ours.losses(x, targets).mean().backward()
    theirs(x, targets).loss.backward()
    head = torch.cat([ours.words[0].grad, ours.classes.grad])
    torch.testing.assert_close(head, theirs.head.weight.grad)
    for i, tail in enumerate(theirs.tail):
        torch.testing.assert_close(ours.projections[i].grad, tail[0].weight.grad.T)
        torch.testing.assert_close(ours.words[i + 1].grad, tail[1].weight.grad)


def test_words_of_one_band_differ_by_the_products_with_their_rows() -> None:
    """``E`` has the projections in it: within a band it says by how much one word is above another."""
    softmax, _ = layers([4, 17])
    x = torch.randn(6, D)
    scores, log_p = x @ softmax.weight.T, softmax(x)
    for start, end in softmax.bands:
        between = (log_p - scores)[:, start:end]
        torch.testing.assert_close(between, between[:, :1].expand_as(between), atol=1e-5, rtol=0)
    assert not torch.allclose((log_p - scores)[:, 0], (log_p - scores)[:, -1], atol=1e-2)


def test_an_input_is_each_word_projected() -> None:
    torch.manual_seed(0)
    layer, tokens = AdaptiveInput(D, V, [4, 17], 2), torch.tensor([[0, 3, 4], [16, 17, 39]])
    vectors = layer(tokens)
    for place in ((i, j) for i in range(2) for j in range(3)):
        token = int(tokens[place])
        band = sum(token >= cutoff for cutoff in (4, 17))
        word = layer.words[band][token - (0, 4, 17)[band]]
        torch.testing.assert_close(vectors[place], layer.projections[band] @ word)
        torch.testing.assert_close(layer.weight[token], vectors[place])
    vectors.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
