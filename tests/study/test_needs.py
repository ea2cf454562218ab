"""The memory that a fit is planned to take is at least what its arrays take, and at most a third more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
from identities import make_activations
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from matlens.linear import LeastSquares, fit_samples, fit_stream, fitting
from matlens.models import Provenance
from matlens.study import plan as needs

Pairs = Literal["last", "all"]
JOBS: list[tuple[int, int, int, Pairs]] = [
    (4, 96, 500, "all"), (4, 96, 500, "last"), (3, 64, 9000, "all"), (3, 64, 4500, "last"),
    (3, 256, 700, "last"),
]  # fmt: skip


def check(planned: int, work: Callable[[], object], before: int = 0, most: float = 1.35) -> None:
    """Compare with the most bytes that torch holds while some work is done, apart from those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    taken = before + max(itertools.accumulate(event.nbytes() for event in events))
    assert 0.97 * taken < planned < most * taken


def vectors(n_layers: int, width: int, n_rows: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"h.{layer}": torch.randn(n_rows, width) for layer in range(n_layers + 1)}


def sites(n_layers: int, pairs: Pairs) -> list[tuple[str, str]]:
    targets = range(1, n_layers + 1) if pairs == "all" else [n_layers]
    return [(f"h.{a}", f"h.{b}") for a in range(n_layers) for b in targets if a < b]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("n_layers", "width", "n_rows", "pairs"), JOBS)
def test_a_fit_on_collected_vectors(n_layers, width, n_rows, pairs, copied, monkeypatch):
    monkeypatch.setattr(fitting, "CONVERTED_BYTES", fitting.CONVERTED_BYTES if copied else 0)
    collected = make_activations(vectors(n_layers, width, n_rows), Provenance())
    wanted = sites(n_layers, pairs)

    def fit() -> None:
        for _, maps in itertools.groupby(fit_samples(collected, wanted), key=lambda linear: linear.source):
            list(maps)

    n_targets = n_layers if pairs == "all" else 1
    check(needs.collected_fit_bytes(n_rows, width, n_sites=n_layers + 1, most_targets=n_targets), fit)


@pytest.mark.parametrize(("n_layers", "width", "n_rows", "pairs"), JOBS)
def test_a_fit_while_streaming(n_layers, width, n_rows, pairs):
    samples, wanted = vectors(n_layers, width, n_rows), sites(n_layers, pairs)

    def batches() -> Iterator[dict[str, Tensor]]:
        for start in range(0, n_rows, 128):
            yield {site: rows[start : start + 128].clone() for site, rows in samples.items()}

    sources = needs.stream_widths(n_layers, width, pairs)
    planned = needs.streamed_fit_bytes(n_rows, sources, of_sample=(n_layers + 1) * width, widest=width)
    check(planned, lambda: list(fit_stream(batches(), wanted)))


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize(("width", "n_targets"), [(96, 4), (96, 1), (256, 1)])
def test_a_fit_on_stored_moments(width, n_targets, n_parts):
    torch.manual_seed(0)
    d_out = n_targets * width
    moments = LeastSquares(width, d_out).update(torch.randn(800, width), torch.randn(800, d_out)).tensors()

    def read() -> LeastSquares:
        return LeastSquares.from_tensors({name: part.clone() for name, part in moments.items()})

    def fit() -> object:
        whole = read()
        for _ in range(n_parts - 1):
            whole.merge(read())
        return whole.solve()

    check(needs.stored_fit_bytes([(width, d_out)], n_shards=n_parts), fit)


def test_moments_are_as_large_as_planned_however_many_samples_there_are():
    moments = LeastSquares(20, 60)
    for n in (7, 50, 50):
        moments.update(torch.randn(n, 20), torch.randn(n, 60))
        stored = sum(8 * moments.tensors()[name].numel() for name in "rz")
        assert stored == needs.statistics_bytes(20, 60, moments.n)
    many = [needs.streamed_fit_bytes(10**n, [(64, 64)] * 6, of_sample=7 * 64, widest=64) for n in (4, 5, 9)]
    assert len(set(many)) == 1
    # LAPACK's own memory for singular values is not torch's: 6.5 times the triangle, measured at 1,024.
    assert (
        needs.stored_fit_bytes([(96, 96)], n_rows=100) == needs.statistics_bytes(96, 96) + 8 * 6.5 * 96 * 96
    )
