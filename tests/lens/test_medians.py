"""Medians of rows that come bit by bit are those of all rows at once, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from matlens.lens import medians
from matlens.lens.medians import RunningMedians


def drawn(kind: str, n: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(n, 3, generator=generator).abs()
    match kind:
        case "few values":
            return (values * 2).round()
        case "many sizes":
            return torch.exp(20 * torch.randn(n, 3, generator=generator))
        case _:
            return values


@pytest.mark.parametrize("kind", ["close", "few values", "many sizes"])
def test_medians_are_those_of_all_rows_so_far(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    running, rows = RunningMedians(3), torch.empty(0, 3)
    for n in (1, 1, 2, 7, 100, 1000, 3, 500):
        part = drawn(kind, n, generator)
        running.add(part)
        rows = torch.cat([rows, part])
        assert torch.equal(running.medians(), rows.median(0).values)
    assert torch.equal(running.rows, rows)


def test_medians_that_drift_open_no_bins_without_end() -> None:
    running, rows = RunningMedians(3), torch.empty(0, 3)
    for step in range(12):
        part = torch.full((2**step, 3), 1.5**step) * torch.tensor([1.0, 2.0, 0.0])
        running.add(part)
        rows = torch.cat([rows, part])
        assert torch.equal(running.medians(), rows.median(0).values)
        assert len(running._opened) <= 3 * medians._OPENED


def test_merged_medians_are_those_of_all_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [drawn("close", n, generator) for n in (40, 61)]
    one, other = RunningMedians(3), RunningMedians(3)
    one.add(parts[0])
    other.add(parts[1])
    assert torch.equal(other.medians(), parts[1].median(0).values)
    one.medians()
    one.merge(other)
    assert torch.equal(one.medians(), torch.cat(parts).median(0).values)
    one.add(parts[1] / 3)
    assert torch.equal(one.medians(), torch.cat([*parts, parts[1] / 3]).median(0).values)


def test_what_a_row_costs_does_not_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    bits = medians._bits

    def counting(values: Tensor) -> Tensor:
        looked_at.append(values.numel())
        return bits(values)

    monkeypatch.setattr(medians, "_bits", counting)
    generator = torch.Generator().manual_seed(2)
    running = RunningMedians(1)
    for _ in range(200):
        running.add(10 + torch.rand(100, 1, generator=generator))
        running.medians()
    assert sum(looked_at) < 4 * 200 * 100
