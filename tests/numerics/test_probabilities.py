"""Log-probabilities against float64, for vocabularies so large that float32 sums drift."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from matlens.lens.evaluation import confidence_in_top
from matlens.numerics.probabilities import kl_divergence, log_softmax

D_VOCAB = 262_144  # Gemma's


def draw(n: int, seed: int) -> Tensor:
    """Logits as peaked as those of a language model."""
    return 3 * torch.randn(n, D_VOCAB, generator=torch.Generator().manual_seed(seed))


def test_log_probabilities_of_a_large_vocabulary_are_those_of_float64() -> None:
    logits = draw(4, 0)
    ours = log_softmax(logits)
    assert ours.dtype == torch.float32
    expected = logits.double().log_softmax(-1)
    # Values of 16 to 32 have steps of 2e-6 in float32; what must not be is an error common to all.
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6)
    assert abs(float((ours.double() - expected).mean())) < 1e-6


def test_divergence_and_confidence_of_a_large_vocabulary_are_those_of_float64() -> None:
    p, q = draw(4, 0), draw(4, 1)
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    ours = kl_divergence(log_softmax(p), log_softmax(q))
    torch.testing.assert_close(ours.double(), expected, rtol=4e-6, atol=0)
    best = log_p.exp().topk(2).values
    torch.testing.assert_close(confidence_in_top(p), best[:, 0] - best[:, 1], rtol=2e-6, atol=0)


def test_tokens_without_probability_add_nothing_to_a_divergence() -> None:
    p, q = torch.tensor([[0.0, 1.0, -torch.inf]]), torch.tensor([[0.5, 0.0, -torch.inf]])
    expected = torch.nn.functional.kl_div(
        q[:, :2].log_softmax(-1), p[:, :2].log_softmax(-1), reduction="sum", log_target=True
    )
    assert float(kl_divergence(log_softmax(p), log_softmax(q))) == pytest.approx(float(expected))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_have_no_divergence(bad: float) -> None:
    scores, spoilt = torch.rand(1, 5), torch.tensor([[bad, 0.0, 1.0, 2.0, 3.0]])
    for p, q in ((spoilt, scores), (scores, spoilt)):
        assert kl_divergence(log_softmax(p), log_softmax(q)).isnan().all()


def test_the_gradient_is_that_of_torch() -> None:
    logits = draw(1, 0)[:, :100].double().requires_grad_()
    (ours,) = torch.autograd.grad(log_softmax(logits)[0, 7], logits)
    (expected,) = torch.autograd.grad(logits.log_softmax(-1)[0, 7], logits)
    torch.testing.assert_close(ours, expected)
