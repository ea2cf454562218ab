"""What the named functions replace, and which maps they do not find."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, D_MODEL, N_LAYERS, assert_near
from handpatched import Part, hand_vectors, jump_part, submodule_part, submodules
from patched_models import RANGES, SENTENCES, Models, assert_same, linear, patched, replacement, vectors

import matlens
from matlens import InputError, LinearMap, MapSet, Site
from matlens.patching.replacements import (
    Replacement,
    jump,
    mat_attn,
    mat_ffn,
    mat_ln1_ln2,
    replace_submodules,
)

# What the named functions replace


def map_set(name: str) -> tuple[MapSet, dict[tuple[str, str], Part]]:
    """A random map for every pair of stream layers and for every sub-module."""
    parts = [jump_part(first, last, 7 * first + last) for first, last in RANGES]
    for seed, module in enumerate(submodules(name)):
        parts += [submodule_part(module, layer, 100 * seed + layer) for layer in range(N_LAYERS)]
    return MapSet([linear(replaced) for replaced in parts]), {
        (replaced.source, replaced.target): replaced for replaced in parts
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_named_functions_replace_what_they_say(name: str, small_model: Models, plain_model: Models) -> None:
    """In parallel blocks of one norm only that; norms after attention and FFN are kept."""
    model, (maps, parts) = small_model(name), map_set(name)
    norms = ["ln1"] if name == "gptj" else ["ln1", "ln2"]
    for function, modules in ((mat_attn, ["attn"]), (mat_ffn, ["ffn"]), (mat_ln1_ln2, norms)):
        for first, last in ((0, 3), (1, 2), (2, 2)):
            by_hand = [
                parts[f"{module}_in.{layer}", f"{module}_out.{layer}"]
                for module, layer in itertools.product(modules, range(first, last))
            ]
            with patched(model, function(maps, first, last)):
                assert_same(vectors(model), hand_vectors(name, plain_model(name), by_hand, SENTENCES))
            with patched(model, function(maps, first, last, where="not-first")):
                by_hand = [replaced._replace(where="not-first") for replaced in by_hand]
                assert_same(vectors(model), hand_vectors(name, plain_model(name), by_hand, SENTENCES))
    with patched(model, [*jump(maps, 0, 1), *replace_submodules(maps, ("ffn", "ln1"), 2, 3)]):
        by_hand = [parts["h.0", "h.1"], parts["ffn_in.2", "ffn_out.2"], parts["ln1_in.2", "ln1_out.2"]]
        assert_same(vectors(model), hand_vectors(name, plain_model(name), by_hand, SENTENCES))


def test_maps_functions_and_layers_from_the_end_are_all_replacements(small_model: Models) -> None:
    model, replaced = small_model("gpt2"), jump_part(1, 3)
    with patched(model, [replacement(replaced)]):
        expected = vectors(model)
    ways: list[Any] = [
        linear(replaced),
        linear(replaced._replace(source="h.-3", target="h.-1")),
        Replacement(replaced.apply, Site("h", 1), Site("h", 3)),
        Replacement(replaced.apply, Site("h", -3), Site("h", -1)),
        Replacement(replaced.apply, Site.read("resid_pre.1"), Site.read("resid_post.-1")),
    ]
    for way in ways:
        with patched(model, iter([way])):
            for ours, theirs in zip(vectors(model), expected, strict=True):
                assert_near(ours["logits"], theirs["logits"], 1e-6)


def test_fitted_maps_are_at_home_in_their_model(
    small_model: Models, plain_model: Models, sentences: matlens.data.Corpus
) -> None:
    """From collecting to patching: the maps' provenance is that of the model."""
    model = small_model("llama")
    examples = matlens.make_examples(model, sentences)
    pairs = [("h.0", "h.2"), ("attn_in.2", "attn_out.2")]
    collected = matlens.collect(model, examples, ["h.0", "h.2", "attn_in.2", "attn_out.2"], progress=False)
    maps = MapSet(matlens.linear.fit_samples(collected, pairs, provenance=collected.provenance))
    by_hand = [Part(*pair, maps[pair].weight) for pair in pairs]
    with patched(model, [*jump(maps, 0, 2), *mat_attn(maps, 2, 3)]):
        assert_same(vectors(model), hand_vectors("llama", plain_model("llama"), by_hand, SENTENCES))


@pytest.mark.refused
def test_a_bias_of_another_width_is_refused() -> None:
    with pytest.raises(InputError, match=r"of the shapes .*1.* do not fit a weight"):
        LinearMap(torch.zeros(D_MODEL, D_MODEL), torch.zeros(1), "h.1", "h.2")


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (lambda maps: jump(maps, 0, 3), "h.0 -> h.3"),
        (lambda maps: jump(maps, 2, 0), "h.2 -> h.0"),
        (lambda maps: mat_ffn(maps, 0, 1), "ffn_in.0 -> ffn_out.0"),
        (lambda maps: mat_attn(maps, 0, 3), "attn_in.1 -> attn_out.1"),
        (lambda maps: mat_ln1_ln2(maps, 0, 1), "ln1_in.0 -> ln1_out.0"),
    ],
)
def test_a_map_that_is_not_there_is_named(function: Callable[[MapSet], Any], missing: str) -> None:
    maps = MapSet([linear(jump_part(0, 2)), linear(submodule_part("attn", 0))])
    with pytest.raises(KeyError, match=f"There is no map {missing}; there are 2: "):
        function(maps)


@pytest.mark.parametrize(("first", "last"), [(2, 1), (3, 0), (-1, 2)])
def test_ranges_that_run_backwards_are_refused(first: int, last: int) -> None:
    maps = MapSet([linear(submodule_part(name, i)) for name in ("attn", "ffn", "ln1") for i in range(3)])
    for function in (mat_attn, mat_ffn, mat_ln1_ln2):
        with pytest.raises(InputError, match=f"from layer {first} to layer {last}: the range runs backwards"):
            function(maps, first, last)
