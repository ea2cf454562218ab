"""A linear map: applied, composed, and kept in float32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_maps import ORIGIN, linear

from matlens.errors import InputError
from matlens.linear.maps import LinearMap

# One map


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_applying_is_the_matrix_product(bias: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mapped = linear("ln1_out.0", "attn_out.0", bias=bias)
    h = torch.randn(*shape, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.einsum("oi,...i->...o", mapped.weight.double(), h.double())
    if mapped.bias is not None:
        expected = expected + mapped.bias.double()
    assert mapped(h).dtype == torch.float32
    torch.testing.assert_close(mapped(h), expected.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_map_in_half_precision_computes_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 64, generator=generator).to(dtype), torch.ones(3, dtype=dtype)
    h = torch.randn(5, 64, generator=generator)
    for vectors in (h, h.to(dtype)):
        mapped = LinearMap(weight, bias, "h.0", "h.1")(vectors)
        assert mapped.dtype == torch.float32
        expected = vectors.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(mapped.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("first_bias", [False, True])
@pytest.mark.parametrize("second_bias", [False, True])
def test_composing_is_applying_one_after_the_other(first_bias: bool, second_bias: bool) -> None:
    first = linear("h.0", "ln1_out.0", bias=first_bias)
    second = linear("ln1_out.0", "attn_out.0", bias=second_bias)
    h = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    composed = first.then(second)
    assert (composed.source, composed.target) == ("h.0", "attn_out.0")
    assert (composed.bias is None) == (not first_bias and not second_bias)
    torch.testing.assert_close(composed(h), second(first(h)), rtol=1e-5, atol=1e-5)
    assert composed.weight.dtype == torch.float32


@given(st.lists(st.booleans(), min_size=3, max_size=3))
def test_composing_is_associative(biases: list[bool]) -> None:
    a, b, c = (linear(f"h.{i}", f"h.{i + 1}", bias=bias) for i, bias in enumerate(biases))
    left, right = a.then(b).then(c), a.then(b.then(c))
    torch.testing.assert_close(left.weight, right.weight, rtol=1e-5, atol=1e-5)
    assert (left.bias is None) == (right.bias is None) == (not any(biases))
    if left.bias is not None and right.bias is not None:
        torch.testing.assert_close(left.bias, right.bias, rtol=1e-5, atol=1e-5)


def test_maps_that_do_not_meet_are_not_composed() -> None:
    with pytest.raises(InputError, match=r"onto h\.1 cannot be followed by one from h\.2"):
        linear("h.0", "h.1").then(linear("h.2", "h.3"))


def test_a_solution_in_float64_is_kept_in_float32_apart_from_it() -> None:
    weight, bias = torch.randn(4, 4, dtype=torch.float64).T, torch.randn(4, dtype=torch.float64)
    kept = LinearMap.from_solution(weight, bias, "h.0", "h.1", ORIGIN)
    assert kept.weight.dtype == torch.float32
    assert kept.weight.is_contiguous()
    assert torch.equal(kept.weight, weight.float())
    assert kept.bias is not None
    assert torch.equal(kept.bias, bias.float())
    assert kept.provenance == ORIGIN
    assert LinearMap.from_solution(weight, None, "h.0", "h.1").bias is None
    with pytest.raises(AttributeError):
        kept.weight = torch.zeros(4, 4)  # type: ignore[misc]


@pytest.mark.parametrize("bias", [True, False])
def test_on_a_device_a_map_is_the_same(bias: bool) -> None:
    given = linear("h.0", "h.1", bias=bias)
    there = given.to("cpu")
    assert torch.equal(there.weight, given.weight)
    assert (there.bias is None) == (given.bias is None) == (not bias)
    assert not bias or torch.equal(there.bias, given.bias)  # type: ignore[arg-type]
    assert (there.source, there.target, there.provenance) == (given.source, given.target, given.provenance)
    assert given.to("meta").weight.device.type == "meta"


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", "cpu:cpu"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(InputError, match=f"cannot be brought to the device .*{device}"):
        linear("h.0", "h.1").to(device)
