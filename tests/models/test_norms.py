"""What a norm does to the terms of a sum is written out by hand; other modules are refused."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_near

from matlens.models.norms import NormGain


@pytest.mark.parametrize(("norm", "centred"), [
    (torch.nn.LayerNorm(7), True), (torch.nn.LayerNorm(32, bias=False), True), (torch.nn.RMSNorm(7), False),
], ids=str)  # fmt: skip
def test_the_gain_is_that_of_the_norm_without_size_and_bias(norm, centred):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    gain = NormGain.from_module(norm, norm.weight.shape[0])
    assert gain.centred == centred
    assert_near(gain.gain, norm.weight.detach())
    terms = torch.randn(5, norm.weight.shape[0], generator=generator)
    whole = terms.sum(0)
    size = whole.std(correction=0) if centred else whole.square().mean().sqrt()
    bias = 0 if getattr(norm, "bias", None) is None else norm.bias.detach()
    assert_near(gain(terms).sum(0) / size + bias, norm(whole).detach(), 1e-4)
