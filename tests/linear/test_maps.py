"""A linear map: applied and stored in float32."""

from __future__ import annotations

import pytest
import torch
from small_maps import ORIGIN, linear

from matlens.errors import InputError
from matlens.linear.maps import LinearMap


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_applying_is_the_matrix_product_in_float32(bias, shape, dtype):
    whole = linear("ln1_out.0", "attn_out.0", bias=bias)
    half = LinearMap(whole.weight.half(), None, "h.0", "h.1")
    h = torch.randn(*shape, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    for mapped in (whole, half):
        expected = torch.einsum("oi,...i->...o", mapped.weight.double(), h.double())
        if mapped.bias is not None:
            expected = expected + mapped.bias.double()
        assert mapped(h).dtype == torch.float32
        torch.testing.assert_close(mapped(h), expected.float(), rtol=1e-6, atol=1e-5)


def test_a_bias_that_would_be_broadcast_is_refused():
    with pytest.raises(InputError):
        LinearMap(torch.eye(4), torch.ones(1), "h.0", "h.1")


def test_a_solution_in_float64_becomes_a_contiguous_map_in_float32():
    weight, bias = torch.randn(4, 4, dtype=torch.float64).T, torch.randn(4, dtype=torch.float64)
    stored = LinearMap.from_solution(weight, bias, "h.0", "h.1", ORIGIN)
    assert stored.weight.is_contiguous()
    assert torch.equal(stored.weight, weight.float())
    assert stored.bias is not None
    assert torch.equal(stored.bias, bias.float())
    assert stored.provenance == ORIGIN
    with pytest.raises(AttributeError):
        stored.weight = torch.zeros(4, 4)  # type: ignore[misc]


def test_the_digest_follows_values_that_are_edited_in_place():
    one = linear("h.0", "h.1", bias=True)
    before = one.digest
    assert one.digest == before == linear("h.0", "h.1", bias=True).digest
    one.weight[0, 0] += 1
    assert one.digest != before
    assert linear("h.0", "h.1").digest != before
