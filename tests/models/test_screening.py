"""What a quick precision does not settle is settled in full: always the top token and the rank in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from matlens.models import screening
from matlens.models.screening import Screen

WIDTH = 48


@pytest.fixture(params=["bfloat16", "float32"])
def precision(request, monkeypatch):
    """The precision of the quick products, whatever this processor likes best."""
    monkeypatch.setattr(screening, "_bfloat16_is_quicker", lambda weight: request.param == "bfloat16")
    return str(request.param)


def layer(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    unembed = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        unembed.weight.copy_(weight)
        if bias is not None:
            unembed.bias.copy_(bias)
    return unembed


def in_float64(unembed: nn.Linear, x: Tensor) -> Tensor:
    logits = x.double() @ unembed.weight.detach().double().T
    return logits if unembed.bias is None else logits + unembed.bias.detach().double()


def check(unembed: nn.Linear, x: Tensor, ids: Tensor) -> None:
    screen, logits = Screen(unembed), in_float64(unembed, x)
    with torch.inference_mode():
        top, rank = screen.top_and_rank(x, ids)
    assert torch.equal(logits.gather(1, top[:, None])[:, 0], logits.amax(1))
    assert torch.equal(rank, (logits > logits.gather(1, ids[:, None])).sum(1))


@pytest.mark.parametrize("n_tokens", [1, 1025])
@pytest.mark.parametrize("biased", [False, True])
def test_top_tokens_and_ranks_are_those_of_float64(n_tokens, biased, precision):
    generator = torch.Generator().manual_seed(n_tokens)
    weight = torch.randn(n_tokens, WIDTH, generator=generator)
    weight *= torch.rand(n_tokens, 1, generator=generator) * 3
    x = torch.randn(40, WIDTH, generator=generator) + 1
    x[:, 3] *= 1000  # as streams are
    bias = 10 * torch.randn(n_tokens, generator=generator) if biased else None
    check(layer(weight, bias), x, torch.randint(n_tokens, (40,), generator=generator))


def test_tokens_that_the_quick_product_confuses_are_told_apart(precision):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, generator=generator) + 1e-5 * torch.randn(3000, WIDTH, generator=generator)
    x = torch.randn(30, WIDTH, generator=generator)
    unembed = layer(weight)
    quick = x.bfloat16() @ unembed.weight.detach().bfloat16().T
    assert (quick.float().argmax(1) != in_float64(unembed, x).argmax(1)).sum() > 15, "nothing is confused"
    check(unembed, x, torch.randint(3000, (30,), generator=generator))


def test_weights_that_are_rounded_though_their_logits_are_small_are_told_apart(precision):
    """Features are exact in bfloat16, and nearly orthogonal to all tokens."""
    generator = torch.Generator().manual_seed(0)
    weight = 5 + 0.01 * torch.randn(3000, WIDTH, generator=generator)
    x = torch.ones(30, WIDTH)
    for row in x:
        row[torch.randperm(WIDTH, generator=generator)[::2]] = -1
    check(layer(weight), x, torch.randint(3000, (30,), generator=generator))


def test_logits_that_are_rounded_though_no_input_is_are_told_apart(precision):
    """Small integers are exact in bfloat16, and their products of about 3,000 are not."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(7, 10, (3000, WIDTH), generator=generator).float()
    x = torch.randint(7, 10, (30, WIDTH), generator=generator).float()
    assert Screen(layer(weight))._rounded == 0
    check(layer(weight), x, torch.randint(3000, (30,), generator=generator))


def test_the_first_of_equal_tokens_is_on_top_and_none_is_above_its_equals(precision):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(900, WIDTH, generator=generator).repeat(3, 1)  # each token three times
    x = torch.randn(20, WIDTH, generator=generator)
    unembed = layer(weight)
    logits = in_float64(unembed, x)[:, :900]
    top, rank = Screen(unembed).top_and_rank(x, logits.argmax(1) + 1800)
    assert torch.equal(top, logits.argmax(1))
    assert not rank.any()
    assert torch.equal(
        Screen(unembed).top_and_rank(torch.zeros(2, WIDTH), None)[0], torch.zeros(2, dtype=torch.int64)
    )


def test_a_bias_of_zeros_is_none(monkeypatch):
    """TransformerLens gives one to unembeddings that have none, and a real one is added in full precision."""
    monkeypatch.setattr(screening, "_bfloat16_is_quicker", lambda weight: True)
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(2000, WIDTH, generator=generator), torch.randn(9, WIDTH, generator=generator)
    unembed = layer(weight, torch.zeros(2000))
    screen = Screen(unembed)
    assert screen._logits(x)[0].dtype == torch.bfloat16
    check(unembed, x, torch.arange(9))
    with torch.no_grad():
        unembed.bias[7] = 100
    check(unembed, x, torch.arange(9))
    assert Screen(unembed).top_and_rank(x, None)[0].tolist() == [7] * 9


def test_a_layer_that_something_hangs_on_is_not_screened():
    unembed = layer(torch.randn(10, WIDTH))
    assert Screen.suits(unembed)
    assert not Screen.suits(nn.Sequential(unembed))
    assert not Screen.suits(nn.Linear(3, 3).bfloat16())
    handle = unembed.register_forward_hook(lambda module, inputs, output: output + 1)
    assert not Screen.suits(unembed)
    handle.remove()
    screen = Screen(unembed)
    assert not screen.fits(torch.full((1, WIDTH), 1e35))
    assert screen.fits(torch.zeros(0, WIDTH))
