"""The best schemes are those of all, tried one by one, and weighted round-robin ones are the definition's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from paper_a.schemes import r2_schemes, wrr_schemes
from torch import Tensor

from matlens import InputError
from matlens.patching.schemes import Kind, Scheme

KINDS: tuple[Kind, Kind] = ("blocks", "mat")
Segments = list[tuple[Kind, int, int]]


def all_segments(n_layers: int) -> list[Segments]:
    """Every way of running or jumping over each block, cut in every way, that alternates."""
    schemes: list[Segments] = []
    for cuts in itertools.product([False, True], repeat=n_layers - 1):
        edges = [0, *(layer for layer, cut in enumerate(cuts, 1) if cut), n_layers]
        for start in (0, 1):
            pairs = enumerate(itertools.pairwise(edges), start)
            schemes.append([(KINDS[i % 2], first, last) for i, (first, last) in pairs])
    return schemes


def kept(segments: Segments) -> int:
    return sum(last - first for kind, first, last in segments if kind == "blocks")


def product(segments: Segments, r2: Tensor) -> float:
    return math.prod(r2[first, last].item() for kind, first, last in segments if kind == "mat")


def table(n_layers: int, values: Callable[[int], Tensor]) -> Tensor:
    """Values above the diagonal and NaN elsewhere, as `r2_matrix` gives them."""
    above = torch.ones(n_layers + 1, n_layers + 1).triu(1) == 1
    r2 = torch.full(above.shape, float("nan"))
    r2[above] = values(int(above.sum()))
    return r2


def uniform(low: float, high: float, seed: int) -> Callable[[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda n: low + (high - low) * torch.rand(n, generator=generator)


def integers(seed: int) -> Callable[[int], Tensor]:
    """Many ties, zeros, and products of either sign."""
    generator = torch.Generator().manual_seed(seed)
    return lambda n: torch.randint(-2, 3, (n,), generator=generator).float()


TABLES: dict[str, Callable[[int], Callable[[int], Tensor]]] = {
    "positive": lambda seed: uniform(0.3, 1.0, seed),
    "some negative": lambda seed: uniform(-1.5, 1.0, seed),
    "all negative": lambda seed: uniform(-2.0, -0.1, seed),
    "ties": integers,
}


@pytest.mark.parametrize("values", TABLES)
@pytest.mark.parametrize("n_layers", [1, 2, 3, 5, 7])
def test_r2_schemes_are_the_best_of_all_schemes(n_layers, values):
    every = all_segments(n_layers)
    assert len({tuple(segments) for segments in every}) == 2**n_layers
    for seed in range(4):
        r2 = table(n_layers, TABLES[values](seed))
        schemes = r2_schemes(r2)
        assert list(schemes) == list(range(n_layers + 1))
        for n_blocks, (scheme, score) in schemes.items():
            best = max(product(segments, r2) for segments in every if kept(segments) == n_blocks)
            assert score == pytest.approx(best, rel=1e-12, abs=0)
            segments = list(scheme.segments)
            assert segments in every
            assert kept(segments) == scheme.n_blocks == n_blocks
            assert product(segments, r2) == pytest.approx(score, rel=1e-12, abs=0)


def test_two_bad_jumps_can_score_more_than_two_good_ones():
    r2 = table(3, lambda n: torch.full((n,), 0.5))
    r2[0, 1], r2[2, 3] = -0.9, -0.9
    scheme, score = r2_schemes(r2)[1]
    assert (scheme.boundaries, scheme.starts_with) == ((0, 1, 2, 3), "mat")
    assert score == pytest.approx(0.81)
    assert r2_schemes(r2)[3] == (Scheme((0, 3), "blocks"), 1.0)
    for missing in (float("nan"), float("inf")):
        r2[1, 3] = missing
        with pytest.raises(InputError):
            r2_schemes(r2)


@pytest.mark.parametrize("n_layers", [1, 2, 5, 6, 12, 30])
def test_wrr_is_the_definition(n_layers):
    """``a`` and ``b`` blocks in turn until ``L`` is reached, for all that reach it after a ``b``."""
    expected: dict[tuple[int, int, str], tuple[int, ...]] = {}
    for a, b in itertools.product(range(1, n_layers + 1), repeat=2):
        steps = itertools.cycle((a, b))
        edges = [0]
        while edges[-1] < n_layers or len(edges) % 2 == 0:
            edges.append(edges[-1] + next(steps))
        if edges[-1] == n_layers:
            expected |= {(a, b, start): tuple(edges) for start in KINDS}
    schemes = wrr_schemes(n_layers)
    assert {(a, b, scheme.starts_with): scheme.boundaries for a, b, scheme in schemes} == expected
    assert len(schemes) == len(expected)
