"""The best schemes are those of all, tried one by one, and weighted round-robin ones are the definition's."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper_a.schemes import r2_schemes, wrr_schemes
from torch import Tensor

from matlens import InputError
from matlens.patching.schemes import Kind

KINDS: tuple[Kind, Kind] = ("blocks", "mat")
Segments = list[tuple[Kind, int, int]]
R2 = st.one_of(st.floats(-1.5, 1, width=32), st.integers(-2, 2).map(float))  # ties, zeros, either sign


def all_segments(n_layers: int) -> list[Segments]:
    """Every way of running or jumping over each block, cut in every way, that alternates."""
    schemes: list[Segments] = []
    for cuts in itertools.product([False, True], repeat=n_layers - 1):
        edges = [0, *(layer for layer, cut in enumerate(cuts, 1) if cut), n_layers]
        for start in (0, 1):
            pairs = enumerate(itertools.pairwise(edges), start)
            schemes.append([(KINDS[i % 2], first, last) for i, (first, last) in pairs])
    return schemes


def product(segments: Segments, r2: Tensor) -> float:
    return math.prod(r2[first, last].item() for kind, first, last in segments if kind == "mat")


@given(n_layers=st.integers(1, 6), data=st.data())
def test_r2_schemes_are_the_best_of_all_schemes(n_layers, data):
    r2 = torch.full((n_layers + 1, n_layers + 1), float("nan"))  # above the diagonal there are values
    for pair in itertools.combinations(range(n_layers + 1), 2):
        r2[pair] = data.draw(R2)
    every, schemes = all_segments(n_layers), r2_schemes(r2)
    assert list(schemes) == list(range(n_layers + 1))
    for n_blocks, (scheme, score) in schemes.items():
        of_kept = [
            each for each in every if sum(b - a for kind, a, b in each if kind == "blocks") == n_blocks
        ]
        assert score == pytest.approx(max(product(each, r2) for each in of_kept), rel=1e-12, abs=0)
        assert list(scheme.segments) in of_kept
        assert product(list(scheme.segments), r2) == pytest.approx(score, rel=1e-12, abs=0)
    for missing in (float("nan"), float("inf")):
        r2[0, n_layers] = missing
        with pytest.raises(InputError):
            r2_schemes(r2)


@pytest.mark.parametrize("n_layers", [1, 2, 5, 6, 12, 30])
def test_wrr_is_the_definition(n_layers):
    """``a`` and ``b`` blocks in turn until ``L`` is reached, for all that reach it after a ``b``."""
    expected: dict[tuple[int, int, str], tuple[int, ...]] = {}
    for a, b in itertools.product(range(1, n_layers + 1), repeat=2):
        steps, edges = itertools.cycle((a, b)), [0]
        while edges[-1] < n_layers or len(edges) % 2 == 0:
            edges.append(edges[-1] + next(steps))
        if edges[-1] == n_layers:
            expected |= {(a, b, start): tuple(edges) for start in KINDS}
    schemes = wrr_schemes(n_layers)
    assert {(a, b, scheme.starts_with): scheme.boundaries for a, b, scheme in schemes} == expected
    assert len(schemes) == len(expected)
