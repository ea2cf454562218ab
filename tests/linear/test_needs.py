"""The memory that a fit is said to take is that which its arrays take at their peak, to a tenth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from matlens.linear import Moments, fit_samples, fit_stream, fitting, needs

Pairs = Literal["last", "all"]
JOBS: list[tuple[int, int, int, Pairs]] = [
    (4, 96, 500, "all"), (4, 96, 500, "last"), (3, 64, 9000, "all"), (3, 64, 4500, "last"),
    (3, 256, 700, "last"),
]  # fmt: skip


def peak(work: Callable[[], None]) -> int:
    """Most bytes that torch holds while some work is done, more than before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted(
        (e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns()
    )
    return max(itertools.accumulate(event.nbytes() for event in events))


def vectors(n_layers: int, width: int, n_rows: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"h.{layer}": torch.randn(n_rows, width) for layer in range(n_layers + 1)}


def sites(n_layers: int, pairs: Pairs) -> list[tuple[int, int]]:
    targets = range(1, n_layers + 1) if pairs == "all" else [n_layers]
    return [(a, b) for a in range(n_layers) for b in targets if a < b]


@pytest.mark.parametrize("kept", [0, fitting.KEPT])
@pytest.mark.parametrize(("n_layers", "width", "n_rows", "pairs"), JOBS)
def test_a_fit_on_collected_vectors(
    n_layers: int, width: int, n_rows: int, pairs: Pairs, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "KEPT", kept)
    samples, wanted = vectors(n_layers, width, n_rows), sites(n_layers, pairs)

    def fit() -> None:
        for _, maps in itertools.groupby(fit_samples(samples, wanted), key=lambda linear: linear.source):
            list(maps)

    planned = needs.collected_fit_bytes(
        n_rows, width, n_sites=n_layers + 1, most_targets=n_layers if pairs == "all" else 1
    )
    assert planned == pytest.approx(peak(fit), rel=0.1)


@pytest.mark.parametrize(("n_layers", "width", "n_rows", "pairs"), JOBS)
def test_a_fit_while_vectors_pass_by(n_layers: int, width: int, n_rows: int, pairs: Pairs) -> None:
    samples, wanted = vectors(n_layers, width, n_rows), sites(n_layers, pairs)

    def batches() -> Iterator[dict[str, Tensor]]:
        for start in range(0, n_rows, 128):
            yield {site: rows[start : start + 128].clone() for site, rows in samples.items()}

    def fit() -> None:
        for _ in fit_stream(batches(), wanted):
            pass

    planned = needs.streamed_fit_bytes(n_rows, width, n_layers=n_layers, pairs=pairs)
    assert planned == pytest.approx(peak(fit), rel=0.1)


def test_moments_are_as_large_as_said_however_many_samples_there_are() -> None:
    moments = Moments(20, 60)
    for _ in range(3):
        moments.update(torch.randn(50, 20), torch.randn(50, 60))
        held = sum(8 * part.numel() for part in vars(moments).values() if isinstance(part, Tensor))
        assert held == needs.moments_bytes(20, 60)
    assert needs.model_moments_bytes(3, 20, "all") == sum(needs.moments_bytes(20, 20 * n) for n in (3, 2, 1))
    assert needs.model_moments_bytes(3, 20, "last") == 3 * needs.moments_bytes(20, 20)


def test_a_stream_takes_no_more_for_more_samples() -> None:
    many = [needs.streamed_fit_bytes(10**n, 64, n_layers=6, pairs="all") for n in (4, 5, 9)]
    assert len(set(many)) == 1
