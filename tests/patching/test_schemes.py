"""A scheme runs plain blocks and matrices in turn."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near
from handpatched import Part, hand_vectors
from patched_models import SENTENCES, patched, vectors

from matlens import InputError, LinearMap, MapSet
from matlens.patching.schemes import Scheme

SEGMENTS = [
    ("blocks", (0, 3)), ("mat", (0, 3)), ("blocks", (0, 1, 3)), ("mat", (0, 1, 3)), ("blocks", (0, 1, 2, 3)),
    ("mat", (0, 1, 2, 3)), ("blocks", (0, 2, 3)), ("mat", (0, 2, 3)),
]  # fmt: skip


def test_a_scheme_alternates():
    scheme = Scheme((0, 2, 3, 7), "blocks")
    assert scheme.segments == (("blocks", 0, 2), ("mat", 2, 3), ("blocks", 3, 7))
    assert (scheme.jumps, scheme.n_blocks) == (((2, 3),), 6)
    assert str(scheme) == "blocks 0-2 mat 2-3 blocks 3-7"
    scheme = Scheme((0, 2, 3, 7), "mat")
    assert (scheme.jumps, scheme.n_blocks) == (((0, 2), (3, 7)), 1)
    for wrong in ((), (0,), (1, 3), (0, 2, 2), (0, 3, 2)):
        with pytest.raises(InputError, match="boundaries must be"):
            Scheme(wrong, "mat")


@pytest.mark.parametrize("name", ["gpt2", "gptj", "bert"])
def test_a_scheme_runs_plain_blocks_and_matrices_in_turn(name, small_model, plain_model):
    model, pairs = small_model(name), list(itertools.combinations(range(N_LAYERS + 1), 2))
    weights = torch.randn(len(pairs), D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(0))
    maps = MapSet(
        LinearMap(weight / D_MODEL**0.5, None, f"h.{a}", f"h.{b}")
        for weight, (a, b) in zip(weights, pairs, strict=True)
    )
    for start, boundaries in SEGMENTS:
        with patched(model, Scheme(boundaries, start).replacements(model, maps)):  # type: ignore[arg-type]
            ours = vectors(model)
        segments = list(itertools.pairwise(boundaries))[start == "blocks" :: 2]
        parts = [Part(f"h.{a}", f"h.{b}", maps[a, b].weight) for a, b in segments]
        for one, other in zip(ours, hand_vectors(name, plain_model(name), parts, SENTENCES), strict=True):
            assert_near(one["logits"], other["logits"])
    with pytest.raises(InputError, match="ends at layer 2, the model at layer 3"):
        Scheme((0, 2), "blocks").replacements(model, maps)
    some = MapSet(linear for pair, linear in maps.items() if pair != ("h.1", "h.2"))
    with pytest.raises(KeyError, match=r"no map h\.1 -> h\.2"):
        Scheme((0, 1, 2, 3), "blocks").replacements(model, some)
