"""Alternation schemes, against all of them, against their definition and against plain blocks in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, D_MODEL, N_LAYERS, assert_near
from handpatched import Part, hand_vectors
from patched_models import patched
from torch import Tensor

from matlens import InputError, LinearMap, MapSet
from matlens.patching.schemes import Kind, Scheme, r2_schemes, wrr_schemes

TOKENS = torch.tensor([[7, 3, 41, 12, 12, 59, 30, 22, 8, 17], [5, 33, 2, 50, 44, 19, 4, 26, 51, 9]])
KINDS: tuple[Kind, Kind] = ("blocks", "mat")
Segments = list[tuple[Kind, int, int]]


def all_segments(n_layers: int) -> list[Segments]:
    """Every way of running each block or jumping it, cut in every way, that alternates."""
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
    """Numbers above the diagonal and nothing elsewhere, as `r2_matrix` gives them."""
    above = torch.ones(n_layers + 1, n_layers + 1).triu(1) == 1
    r2 = torch.full(above.shape, float("nan"))
    r2[above] = values(int(above.sum()))
    return r2


def uniform(low: float, high: float, seed: int) -> Callable[[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda n: low + (high - low) * torch.rand(n, generator=generator)


def whole(seed: int) -> Callable[[int], Tensor]:
    """Many ties, zeros, and products whose sign is all that matters."""
    generator = torch.Generator().manual_seed(seed)
    return lambda n: torch.randint(-2, 3, (n,), generator=generator).float()


TABLES: dict[str, Callable[[int], Callable[[int], Tensor]]] = {
    "positive": lambda seed: uniform(0.3, 1.0, seed),
    "some negative": lambda seed: uniform(-1.5, 1.0, seed),
    "all negative": lambda seed: uniform(-2.0, -0.1, seed),
    "ties": whole,
}


# R2


@pytest.mark.parametrize("values", TABLES)
@pytest.mark.parametrize("n_layers", range(1, 9))
def test_r2_schemes_are_the_best_of_all_schemes(n_layers: int, values: str) -> None:
    every = all_segments(n_layers)
    assert len({tuple(segments) for segments in every}) == 2**n_layers
    for seed in range(6):
        r2 = table(n_layers, TABLES[values](seed))
        schemes = r2_schemes(r2)
        assert list(schemes) == list(range(n_layers + 1))
        for n_blocks, (scheme, score) in schemes.items():
            best = max(product(segments, r2) for segments in every if kept(segments) == n_blocks)
            assert score == pytest.approx(best, rel=1e-12, abs=0)
            # What is returned is a scheme of all layers with that score and that many blocks.
            segments = list(scheme.segments)
            assert segments in every
            assert kept(segments) == scheme.n_blocks == n_blocks
            assert product(segments, r2) == pytest.approx(score, rel=1e-12, abs=0)


def test_two_bad_jumps_can_score_more_than_two_good_ones() -> None:
    """The best scheme need not be made of best parts: its first jump is the worst there is."""
    r2 = table(3, lambda n: torch.full((n,), 0.5))
    r2[0, 1], r2[2, 3] = -0.9, -0.9
    scheme, score = r2_schemes(r2)[1]
    assert (scheme.boundaries, scheme.starts_with) == ((0, 1, 2, 3), "mat")
    assert score == pytest.approx(0.81)


def test_without_jumps_the_score_is_one_and_without_blocks_it_is_that_of_one_jump() -> None:
    r2 = table(4, uniform(0.1, 0.2, 0))
    schemes = r2_schemes(r2)
    assert schemes[4] == (Scheme((0, 4), "blocks"), 1.0)
    assert schemes[0] == (Scheme((0, 4), "mat"), r2[0, 4].item())


@pytest.mark.parametrize("missing", [float("nan"), float("inf"), float("-inf")])
def test_a_table_that_lacks_a_pair_is_refused(missing: float) -> None:
    for pair in itertools.combinations(range(5), 2):
        r2 = table(4, uniform(0.0, 1.0, 0))
        r2[pair] = missing
        with pytest.raises(InputError, match="lacks pairs of layers"):
            r2_schemes(r2)


# WRR


@pytest.mark.parametrize("n_layers", range(1, 31))
def test_wrr_is_the_definition(n_layers: int) -> None:
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
    divisors = [n for n in range(2, n_layers + 1) if n_layers % n == 0]
    assert len(schemes) == len(expected) == 2 * sum(n - 1 for n in divisors)
    for a, b, scheme in schemes:
        repeats = n_layers // (a + b)
        assert scheme.boundaries[-1] == n_layers
        assert scheme.n_blocks == repeats * (a if scheme.starts_with == "blocks" else b)
        assert len(scheme.jumps) == repeats
        assert {last - first for first, last in scheme.jumps} == {b if scheme.starts_with == "blocks" else a}


# One scheme


def test_a_scheme_alternates_from_what_it_starts_with() -> None:
    scheme = Scheme((0, 2, 3, 7), "blocks")
    assert scheme.segments == (("blocks", 0, 2), ("mat", 2, 3), ("blocks", 3, 7))
    assert (scheme.jumps, scheme.n_blocks) == (((2, 3),), 6)
    assert str(scheme) == "blocks 0-2 mat 2-3 blocks 3-7"
    scheme = Scheme((0, 2, 3, 7), "mat")
    assert scheme.segments == (("mat", 0, 2), ("blocks", 2, 3), ("mat", 3, 7))
    assert (scheme.jumps, scheme.n_blocks) == (((0, 2), (3, 7)), 1)
    assert str(scheme) == "mat 0-2 blocks 2-3 mat 3-7"
    assert (Scheme((0, 5), "blocks").jumps, Scheme((0, 5), "blocks").n_blocks) == ((), 5)
    assert (Scheme((0, 5), "mat").jumps, Scheme((0, 5), "mat").n_blocks) == (((0, 5),), 0)


@pytest.mark.parametrize(
    "boundaries", [(), (0,), (3,), (1, 3), (-1, 0, 3), (0, 0, 3), (0, 2, 2), (0, 3, 2), (0, -1)], ids=str
)
def test_boundaries_that_do_not_rise_from_zero_are_refused(boundaries: tuple[int, ...]) -> None:
    for start in KINDS:
        with pytest.raises(InputError, match="are not a scheme"):
            Scheme(boundaries, start)


@pytest.mark.parametrize("start", ["", "block", "id", None])
def test_what_a_scheme_starts_with_is_blocks_or_mat(start: Any) -> None:
    with pytest.raises(InputError, match=r"^starts_with must be"):
        Scheme((0, 3), start)


# In a model

PAIRS = list(itertools.combinations(range(N_LAYERS + 1), 2))


@pytest.fixture(scope="module")
def maps() -> MapSet:
    """A map for every pair of layers, that keeps vectors about as long as they are."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(PAIRS), D_MODEL, D_MODEL, generator=generator) / D_MODEL**0.5
    return MapSet(
        LinearMap(weight, None, f"h.{a}", f"h.{b}") for weight, (a, b) in zip(weights, PAIRS, strict=True)
    )


@pytest.mark.parametrize("boundaries", [(0, 2), (0, 1, 2), (0, 4), (0, 1, 3, 4)], ids=str)
def test_a_scheme_of_another_depth_is_refused(
    boundaries: tuple[int, ...], maps: MapSet, small_model: Callable[[str], Any]
) -> None:
    with pytest.raises(InputError, match=rf"ends at layer {boundaries[-1]}.* last layer is {N_LAYERS}"):
        Scheme(boundaries, "blocks").replacements(small_model("gpt2"), maps)


def test_a_jump_without_a_map_is_refused(maps: MapSet, small_model: Callable[[str], Any]) -> None:
    some = MapSet(linear for pair, linear in maps.items() if pair != ("h.1", "h.2"))
    assert Scheme((0, 1, 3), "blocks").replacements(small_model("gpt2"), some)
    with pytest.raises(KeyError, match=r"no map h\.1 -> h\.2"):
        Scheme((0, 1, 2, 3), "blocks").replacements(small_model("gpt2"), some)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_scheme_runs_plain_blocks_and_matrices_in_turn(
    name: str, maps: MapSet, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model = small_model(name)
    every = all_segments(N_LAYERS)
    distinct: list[Tensor] = []
    for segments in every:
        scheme = Scheme((0, *(last for _, _, last in segments)), segments[0][0])
        assert list(scheme.segments) == segments
        with torch.inference_mode(), patched(model, scheme.replacements(model, maps)):
            logits = model(TOKENS)
        jumps = [(a, b) for kind, a, b in segments if kind == "mat"]
        parts = [Part(f"h.{a}", f"h.{b}", maps[a, b].weight) for a, b in jumps]
        by_hand = hand_vectors(name, plain_model(name), parts, TOKENS.tolist())
        expected = torch.stack([vectors["logits"] for vectors in by_hand])
        assert_near(logits, expected)
        scale = float(expected.abs().max())
        assert all(float((expected - other).abs().max()) > 1e-3 * scale for other in distinct)
        distinct.append(expected)
    assert len(distinct) == 2**N_LAYERS
