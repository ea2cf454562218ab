"""A patched pass is a Hugging Face forward pass patched by hand, in every family and for every scheme."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    APART,
    ARCHITECTURES,
    D_MODEL,
    KINDS,
    N_LAYERS,
    WIRINGS,
    assert_near,
)
from handpatched import Part, hand_vectors, jump_part, part, submodule_part, submodules
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import (
    LENGTHS,
    RANGES,
    SENTENCES,
    Models,
    Vectors,
    assert_same,
    differ,
    patched,
    replacement,
    vectors,
)

import matlens

# As if patched by hand


def at_modules(name: str, model: Any) -> Vectors:
    """What matlens' sites carry where a plain model has a module that begins or ends there."""
    return [
        {site: value for site, value in found.items() if site.split(".")[0] not in APART.get(name, ())}
        for found in vectors(model)
    ]


@pytest.mark.parametrize("name", [*WIRINGS, *KINDS, "bloom"])
def test_every_jump_is_the_plain_model_with_those_layers_replaced(
    name: str, small_model: Models, plain_model: Models
) -> None:
    unpatched = vectors(small_model(name))
    for seed, (first, last) in enumerate(RANGES):
        replaced = jump_part(first, last, seed, bias=seed % 2 == 0)
        with patched(small_model(name), [replacement(replaced)]):
            ours = at_modules(name, small_model(name))
        assert_same(ours, hand_vectors(name, plain_model(name), [replaced], SENTENCES))
        assert differ(ours, unpatched)


FLAGS = ((False, True, True, False), (True, False, True, False), (True,) * 4, (False,) * 4)


@pytest.mark.parametrize(
    "where",
    ["all", "not-first", "last", (4, 3, 0, 0), FLAGS],
    ids=["all", "not-first", "last", "positions", "flags"],
)
@pytest.mark.parametrize("name", [*WIRINGS, *KINDS])
def test_every_stand_in_is_the_plain_model_with_that_module_replaced(
    name: str, where: Any, small_model: Models, plain_model: Models
) -> None:
    for seed, (module, layer) in enumerate(itertools.product(submodules(name), range(N_LAYERS))):
        replaced = submodule_part(module, layer, seed, where=where)
        with patched(small_model(name), [replacement(replaced)]):
            ours = at_modules(name, small_model(name))
        assert_same(ours, hand_vectors(name, plain_model(name), [replaced], SENTENCES))


@st.composite
def schemes(draw: st.DrawFn, name: str) -> list[Part]:
    """Jumps and stand-ins in blocks of their own, in any order, and maps between blocks."""
    parts: list[Part] = []
    seeds, biases = itertools.count(draw(st.integers(0, 10**6))), st.booleans()
    wheres = [
        st.just("all"),
        st.just("not-first"),
        st.just("last"),
        st.tuples(*(st.integers(0, n - 1) for n in LENGTHS)),
    ]
    # As many truth values as the longest sentence has tokens, or fewer.
    for width in (1, 4, max(LENGTHS)):
        wheres.append(st.tuples(*[st.tuples(*[st.booleans()] * width)] * len(LENGTHS)))
    layer = 0
    while layer <= N_LAYERS:
        if draw(st.integers(0, 3)) == 0:
            parts.append(jump_part(layer, layer, next(seeds), bias=draw(biases)))
        kind = draw(st.sampled_from(["kept", "jump", "inside"]))
        if layer < N_LAYERS and kind == "inside":
            for module in sorted(draw(st.sets(st.sampled_from(submodules(name)), min_size=1))):
                where = draw(st.one_of(wheres))
                parts.append(submodule_part(module, layer, next(seeds), bias=draw(biases), where=where))
        if layer < N_LAYERS and kind == "jump":
            last = draw(st.integers(layer + 1, N_LAYERS))
            parts.append(jump_part(layer, last, next(seeds), bias=draw(biases)))
            layer = last
        else:
            layer += 1
    return draw(st.permutations(parts))


@pytest.mark.parametrize("name", [*ARCHITECTURES, "neox-sequential"])
def test_any_scheme_is_the_plain_model_patched_by_hand(
    name: str, small_model: Models, plain_model: Models
) -> None:
    @settings(derandomize=True, max_examples=25)
    @given(parts=schemes(name), side=st.sampled_from(["right", "left"]))
    def check(parts: list[Part], side: str) -> None:
        with patched(small_model(name), [replacement(replaced) for replaced in parts]):
            ours = vectors(small_model(name), side=side)
        assert_same(ours, hand_vectors(name, plain_model(name), parts, SENTENCES))

    check()


# The identity changes nothing


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_identity_over_no_blocks_changes_no_bit(name: str, small_model: Models) -> None:
    model = small_model(name)
    before = vectors(model)
    for layer in range(N_LAYERS + 1):
        same = part(f"h.{layer}", f"h.{layer}", bias=False)._replace(weight=torch.eye(D_MODEL))
        with patched(model, [replacement(same)]):
            for ours, theirs in zip(vectors(model), before, strict=True):
                assert all(torch.equal(ours[site], theirs[site]) for site in theirs)


# Half precision


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_half_precision_is_kept(
    name: str, model_folder: Callable[[str], Path], small_model: Models, plain_model: Models
) -> None:
    model = matlens.load(str(model_folder(name)), device="cpu", dtype=torch.bfloat16)
    parts = [jump_part(0, 1), submodule_part("ffn", 1, 1), submodule_part("attn", 2, 2, where="not-first")]
    parts.append(jump_part(2, 2, 3))
    expected = hand_vectors(name, plain_model(name), parts, SENTENCES)
    with patched(model, [replacement(replaced) for replaced in parts]):
        carried = vectors(model)
    for ours, theirs in zip(carried, expected, strict=True):
        assert set(ours) == set(theirs)
        for site in ours:
            assert ours[site].dtype == torch.bfloat16
            assert_near(ours[site].float(), theirs[site], 0.1)
