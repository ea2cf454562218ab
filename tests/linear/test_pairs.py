"""Pairs of sites: resolved, refused where they run backward or were not collected, and grouped."""

from __future__ import annotations

from typing import Any

import pytest
from identities import make_identity

from matlens.errors import InputError
from matlens.linear.pairs import resolve_pairs
from matlens.models.identity import Provenance
from matlens.models.sites import Site


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("all", "01 02 03 12 13 23"), ("last", "03 13 23"), ([(1, 2)], "12"), ([(-3, -1), (0, -2)], "13 02"),
        ([("h.0", "h.2"), ("1", "-1")], "02 13"), ([(Site("h", 0), Site("h", -1))], "03"),
        (iter([(0, 3)]), "03"),
    ],
)  # fmt: skip
def test_layers_are_resolved(pairs, expected):
    asked = list(pairs) if not isinstance(pairs, str) else pairs
    for model in (3, Provenance(make_identity(n_layers=3))):
        assert resolve_pairs(asked, model) == [(f"h.{a}", f"h.{b}") for a, b in expected.split()]


def test_sites_inside_blocks_are_resolved():
    pairs = [("ffn_in.-1", "ffn_out.-1"), ("ln1_out.2", "attn_out.0"), ("mid.1", 0)]
    expected = [("ffn_in.2", "ffn_out.2"), ("ln1_out.2", "attn_out.0"), ("mid.1", "h.0")]
    assert resolve_pairs(pairs, 3) == expected


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 4)], [(-5, 3)], [(2, 2)], [(0, 3), (-1, 1)], [("ln1_out.3", 3)], [("x", 3)], "every", None,
        {0: 3}, (0, 3), ["03"], [(0, 1, 3)], [], "last",
    ],
)  # fmt: skip
def test_pairs_that_cannot_be_fitted(pairs):
    model: Any = Provenance() if pairs == "last" else 3  # of an unknown model, the last layer is unknown
    with pytest.raises(InputError):
        resolve_pairs(pairs, model)
