"""Pairs of sites: spelled out, refused where they run backwards or were not collected, and grouped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matlens.errors import InputError
from matlens.linear.pairs import by_source, check_collected, resolve_pairs
from matlens.models.sites import Site

SITES = ["a.0", "b.0", "c.0"]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("all", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
        ("last", [(0, 3), (1, 3), (2, 3)]),
        ([(1, 2)], [(1, 2)]),
        ([(-3, -1), (0, -2)], [(1, 3), (0, 2)]),
        ([("h.0", "h.2"), ("1", "-1")], [(0, 2), (1, 3)]),
        ([(Site("h", 0), Site("h", -1))], [(0, 3)]),
        (iter([(0, 3)]), [(0, 3)]),
    ],
)
def test_layers_are_spelled_out(pairs: Any, expected: list[tuple[int, int]]) -> None:
    assert resolve_pairs(pairs, 3) == [(f"h.{a}", f"h.{b}") for a, b in expected]


def test_sites_inside_blocks_are_spelled_out() -> None:
    pairs = [("ffn_in.-1", "ffn_out.-1"), ("ln1_out.2", "attn_out.0"), ("mid.1", 0)]
    expected = [("ffn_in.2", "ffn_out.2"), ("ln1_out.2", "attn_out.0"), ("mid.1", "h.0")]
    assert resolve_pairs(pairs, 3) == expected


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([(0, 4)], r"Layer 4 of site 'h' is out of range: this model has h\.0 to h\.3"),
        ([(-5, 3)], "Layer -5 of site 'h' is out of range"),
        ([(2, 2)], "from layer 2 to layer 2: the source must lie before the target"),
        ([(0, 3), (-1, 1)], "from layer 3 to layer 1"),
        ([("ln1_out.3", 3)], r"this model has ln1_out\.0 to ln1_out\.2"),
        ([("x", 3)], "'x' is not a site"),
        ("every", r"^pairs must be"),
        (None, r"^pairs must be"),
        ({0: 3}, r"pair"),
        ((0, 3), r"^pairs must be|pair of sites must be"),
        (["h.0", "h.3"], r"^pairs must be"),
        (["03"], r"^pairs must be"),
        ([(0, 1, 3)], r"\(0, 1, 3\)"),
    ],
)
def test_pairs_that_cannot_be_fitted(pairs: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        resolve_pairs(pairs, 3)


def test_pairs_that_were_not_collected_are_named_in_their_order() -> None:
    check_collected([("h.0", "h.3")], ["h.0", "h.3"])
    with pytest.raises(InputError, match=r"no vectors of h\.2, h\.10; collected were h\.0, h\.3"):
        check_collected(iter([("h.0", "h.10"), ("h.2", "h.3")]), iter(["h.0", "h.3"]))


@given(st.lists(st.tuples(st.sampled_from(SITES), st.sampled_from(SITES)), max_size=12))
def test_pairs_are_grouped_by_source_in_the_order_of_first_occurrence(pairs: list[tuple[str, str]]) -> None:
    grouped = by_source(pairs)
    assert {(source, t) for source, targets in grouped.items() for t in targets} == set(pairs)
    assert sum(map(len, grouped.values())) == len(set(pairs))
    assert list(grouped) == sorted(grouped, key=[source for source, _ in pairs].index)
    for source, targets in grouped.items():
        assert targets == sorted(targets, key=[t for s, t in pairs if s == source].index)
