"""What a norm does to an addend is written out by hand, and what is none is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_near
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from matlens import InputError
from matlens.ffn.norms import NormGain, PlainNorm


@pytest.mark.parametrize(("norm", "centred"), [
    (torch.nn.LayerNorm(7), True), (torch.nn.LayerNorm(32, bias=False), True),
    (torch.nn.RMSNorm(7, eps=1e-6), False), (torch.nn.RMSNorm(32), False),
], ids=str)  # fmt: skip
def test_the_gain_of_a_norm_is_its_own_and_the_size_and_the_bias_are_not(norm: Any, centred: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    gain = NormGain.from_module(norm, norm.weight.shape[0])
    assert gain.centred == centred
    assert_near(gain.gain, norm.weight.detach())
    addends = torch.randn(5, norm.weight.shape[0], generator=generator)
    whole = addends.sum(0)
    size = whole.std(correction=0) if centred else whole.square().mean().sqrt()
    bias = 0 if getattr(norm, "bias", None) is None else norm.bias.detach()
    assert_near(gain(addends).sum(0) / size + bias, norm(whole).detach(), 1e-4)


def test_a_plain_norm_is_equal_bit_by_bit_or_there_is_none() -> None:
    for norm in (torch.nn.LayerNorm(7), torch.nn.LayerNorm(7, bias=False, eps=1e-3), LlamaRMSNorm(9)):
        torch.nn.init.normal_(norm.weight)
        plain, x = PlainNorm.equal_to(norm), torch.randn(5, len(norm.weight))
        assert plain is not None
        assert torch.equal(plain(x), norm(x))
    assert PlainNorm.equal_to(Softmax()) is None


def test_a_norm_that_is_another_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"What the norm Softmax does is not known\. Expected an RMS norm or a"
    ):
        NormGain.from_module(Softmax(), 8)


class Softmax(torch.nn.Module):
    """No norm: it has a parameter, and mixes coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).softmax(-1)
