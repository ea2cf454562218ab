"""The largest numbers of rows are those of torch.topk, at places where they stand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from matlens.numerics.largest import largest


def check(scores: Tensor, k: int) -> None:
    values, places = largest(scores, k)
    assert torch.equal(values, scores.topk(k).values)
    assert torch.equal(scores.gather(1, places), values)
    assert all(len(set(row)) == k for row in places.tolist())


@pytest.mark.parametrize(
    "m", [30, 255, 256, 1000, 3 * 2**10, 5 * 2**10 + 511, 2**14 - 1, 2**14, 2**14 + 7, 21503]
)
@pytest.mark.parametrize("k", [1, 5, 30])
def test_they_are_those_of_topk(m: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m)
    check(torch.randn(7, m, generator=generator), k)
    check(-torch.rand(3, m, generator=generator), k)


def test_many_of_one_group_and_of_what_is_left_over_are_found() -> None:
    scores = torch.zeros(2, 17 * 1024 + 5)
    scores[0, 3::1024] = torch.arange(1.0, 19.0)  # 18, all in the fourth of 1,024 groups and behind
    scores[1, -5:] = torch.arange(1.0, 6.0)
    check(scores[:1], 18)
    values, places = largest(scores, 5)
    assert places[1].tolist() == [17 * 1024 + i for i in (4, 3, 2, 1, 0)]
    assert values[0].tolist() == [18, 17, 16, 15, 14]


def test_equal_numbers_are_taken_once_each() -> None:
    check(torch.ones(2, 17 * 1024), 30)
    check(torch.arange(20 * 1024.0).remainder(7).repeat(3, 1), 200)
    check(torch.randn(2, 17 * 1024, generator=torch.Generator().manual_seed(0)), 300)  # most groups
