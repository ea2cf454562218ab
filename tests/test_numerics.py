"""Float64 on devices, products, log-probabilities and largest entries are those of plain torch in float64."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pretend
import pytest
import torch
from torch import Tensor

from matlens import InputError, numerics
from matlens.lens.evaluation import confidence_in_top
from matlens.numerics import (
    check_float64_device,
    find_device,
    in_float64,
    kl_divergence,
    largest,
    log_softmax,
    return_freed_memory,
    split_product,
)


def test_devices_are_found_and_have_float64_or_are_refused(monkeypatch):
    assert find_device("meta") == torch.device("meta")
    assert check_float64_device("cpu") == torch.device("cpu")
    for device in ("nowhere", "cuda:99", "", None, 1.5):
        with pytest.raises(ValueError, match=r"."):
            find_device(device)
        with pytest.raises(InputError, match=r"^device must be available on this machine"):
            check_float64_device(device)
    monkeypatch.setattr(numerics, "WITHOUT_FLOAT64", frozenset({"cpu"}))
    with pytest.raises(InputError, match=r"^device must support float64"):
        check_float64_device("cpu")


def test_a_device_without_float64_refuses_it_and_its_numbers_are_taken_to_the_cpu():
    with pretend.devices(without_float64=True):
        x = torch.tensor([0.1, 2.0], device=pretend.FIRST)
        for asked in (
            lambda: x.double(),
            lambda: x.to("cpu", torch.float64),
            lambda: torch.zeros(3, dtype=torch.float64).to(x.device),
            lambda: x.new_zeros(2, dtype=torch.float64),
            lambda: torch.zeros(2, dtype=torch.float64).copy_(x),
        ):
            with pytest.raises(TypeError, match="float64"):
                asked()
        wide = in_float64(x)
    assert wide.dtype == torch.float64
    assert wide.device == torch.device("cpu")
    assert wide.tolist() == torch.tensor([0.1, 2.0]).tolist()


def stream(n: int, width: int, seed: int) -> Tensor:
    """Vectors of which one coordinate is a thousand times larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator) @ torch.randn(width, width, generator=generator)
    x[:, 2] *= 1000
    x[0] *= 300  # a sink
    return x


@pytest.mark.parametrize("n", [1, 256, 257, 1500])
def test_a_product_is_as_exact_as_in_float64(n):
    a, b = stream(n, 20, 0).double() / 3, stream(n, 30, 1)
    product = split_product(a, b)
    assert product.dtype == torch.float64
    bound = n * 6 * 2.0**-46 * a.abs().amax(0)[:, None] * b.double().abs().amax(0)
    error = (product - a.T @ b.double()).abs()
    assert bool((error <= bound + 1e-15 * (a.abs().T @ b.double().abs())).all())
    single = (a.float().T @ b).double() - a.T @ b.double()
    if n > 1:
        assert float(single.abs().max()) > 1e4 * float(error.max()), "float32 alone would do as well"


def test_products_of_integers_are_exact():
    whole = torch.randint(-255, 256, (700, 9), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(split_product(whole, whole), whole.double().T @ whole.double())
    assert torch.equal(split_product(torch.zeros(5, 2), torch.zeros(5, 3)), torch.zeros(2, 3).double())


D_VOCAB = 262_144  # Gemma's


def draw(n: int, seed: int) -> Tensor:
    """Logits as peaked as those of a language model."""
    return 3 * torch.randn(n, D_VOCAB, generator=torch.Generator().manual_seed(seed))


def test_log_probabilities_of_a_large_vocabulary_are_those_of_float64():
    logits = draw(4, 0)
    ours = log_softmax(logits)
    assert ours.dtype == torch.float32
    expected = logits.double().log_softmax(-1)
    # Values of 16 to 32 have steps of 2e-6 in float32; what must not be is an error common to all.
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6)
    assert abs(float((ours.double() - expected).mean())) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_of_logits_in_half_precision_sum_to_one(dtype):
    p, q = (draw(4, seed)[:, :50_000].to(dtype) for seed in (0, 1))
    ours, exact = log_softmax(p), p.double().log_softmax(-1)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.exp().sum(-1), torch.ones(4), rtol=0, atol=1e-5)
    expected = (exact.exp() * (exact - q.double().log_softmax(-1))).sum(-1)
    torch.testing.assert_close(kl_divergence(ours, log_softmax(q)).double(), expected, rtol=1e-5, atol=0)
    rounded = [log_softmax(x).to(dtype) for x in (p, q)]  # as a model in half precision gives them
    wanted = (rounded[0].double().exp() * (rounded[0].double() - rounded[1].double())).sum(-1)
    torch.testing.assert_close(kl_divergence(*rounded).double(), wanted, rtol=1e-5, atol=0)


def test_divergence_and_confidence_of_a_large_vocabulary_are_those_of_float64():
    p, q = draw(4, 0), draw(4, 1)
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    ours = kl_divergence(log_softmax(p), log_softmax(q))
    torch.testing.assert_close(ours.double(), expected, rtol=4e-6, atol=0)
    best = log_p.exp().topk(2).values
    torch.testing.assert_close(confidence_in_top(p), best[:, 0] - best[:, 1], rtol=2e-6, atol=0)


def test_tokens_without_probability_add_nothing_to_a_divergence():
    p, q = torch.tensor([[0.0, 1.0, -torch.inf]]), torch.tensor([[0.5, 0.0, -torch.inf]])
    expected = torch.nn.functional.kl_div(
        q[:, :2].log_softmax(-1), p[:, :2].log_softmax(-1), reduction="sum", log_target=True
    )
    assert float(kl_divergence(log_softmax(p), log_softmax(q))) == pytest.approx(float(expected))


def check(scores: Tensor, k: int) -> None:
    values, places = largest(scores, k)
    assert torch.equal(values, scores.topk(k).values)
    assert torch.equal(scores.gather(1, places), values)
    assert all(len(set(row)) == k for row in places.tolist())


@pytest.mark.parametrize("m", [30, 255, 1000, 5 * 2**10 + 511, 2**14, 2**14 + 7])
@pytest.mark.parametrize("k", [1, 5, 30])
def test_they_are_those_of_topk(m, k):
    generator = torch.Generator().manual_seed(m)
    check(torch.randn(7, m, generator=generator), k)
    check(-torch.rand(3, m, generator=generator), k)


def test_many_of_one_group_those_after_the_last_group_and_equal_ones_are_found():
    scores = torch.zeros(2, 17 * 1024 + 5)
    scores[0, 3::1024] = torch.arange(1.0, 19.0)  # 18, all in the fourth of 1,024 groups and after
    scores[1, -5:] = torch.arange(1.0, 6.0)
    check(scores[:1], 18)
    values, places = largest(scores, 5)
    assert places[1].tolist() == [17 * 1024 + i for i in (4, 3, 2, 1, 0)]
    assert values[0].tolist() == [18, 17, 16, 15, 14]
    check(torch.ones(2, 17 * 1024), 30)
    check(torch.arange(20 * 1024.0).remainder(7).repeat(3, 1), 200)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_what_lies_between_what_is_in_use_is_given_back():
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        assert not return_freed_memory()
        return
    size, n = 50_000, 800  # small enough for the heap, 40 MB in all
    kept = [bytes(size) if i % 2 else bytearray(b"x" * size) for i in range(n)]
    kept[::2] = [b""] * (n // 2)
    before = resident()
    assert return_freed_memory()
    assert before - resident() > 0.5 * size * n / 2
    assert sum(map(len, kept)) == size * n // 2
