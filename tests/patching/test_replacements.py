"""What the named functions replace, and which replacements are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, D_MODEL, N_LAYERS, assert_near
from handpatched import Part, hand_vectors, jump_part, part, submodule_part, submodules
from patched_models import RANGES, SENTENCES, Models, assert_same, hook_counts, linear, replacement, vectors

import matlens
from matlens import InputError, LinearMap, MapSet, Site
from matlens.models.identity import ModelIdentity, Provenance
from matlens.patching.contexts import patched
from matlens.patching.replacements import Replacement, jump, mat_attn, mat_ffn, mat_ln1_ln2, stand_ins

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
    with patched(model, [*jump(maps, 0, 1), *stand_ins(maps, ("ffn", "ln1"), 2, 3)]):
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
    small_model: Models, plain_model: Models, sentences: matlens.corpora.Corpus
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


# What is refused


@contextmanager
def refused(model: Any, message: str) -> Iterator[None]:
    """An error that says so, nothing left in the model, and nothing remembered as taken."""
    vectors(model)
    before = hook_counts(model)
    with pytest.raises(InputError, match=message):
        yield
    assert hook_counts(model) == before
    assert not any("forward" in vars(block) for block in model.blocks)
    whole = [jump_part(0, N_LAYERS - 1), *(submodule_part(kind, 2) for kind in ("ln1", "attn", "ffn"))]
    with patched(model, [replacement(replaced) for replaced in whole]):
        pass


CLASHES = {
    "jumps that overlap": (jump_part(0, 2), jump_part(1, 3), "block 1, or a part of it,"),
    "jumps one inside the other": (jump_part(0, 3), jump_part(1, 2), "block 1, or a part of it,"),
    "the same jump": (jump_part(1, 3), jump_part(1, 3, 1), "block 1, or a part of it,"),
    "a jump and a stand-in": (jump_part(0, 2), submodule_part("attn", 1), "attn of block 1"),
    "a stand-in and a jump": (submodule_part("ffn", 2), jump_part(0, 3), "block 2, or a part of it,"),
    "a place inside a jump": (jump_part(0, 3), jump_part(1, 1), "layer 1 of the stream"),
    "a jump over a place": (jump_part(2, 2), jump_part(1, 3), "layer 2 of the stream"),
    "the same place": (jump_part(1, 1), jump_part(1, 1, 1), "layer 1 of the stream"),
    "the same sub-module": (submodule_part("attn", 0), submodule_part("attn", 0, 1), "attn of block 0"),
    "the same at other tokens": (
        submodule_part("ffn", 1, where="not-first"), submodule_part("ffn", 1, where=(0, 0, 0, 0)),
        "ffn of block 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["together", "nested"])
@pytest.mark.parametrize(("replaced", "other", "named"), CLASHES.values(), ids=CLASHES)
def test_what_is_replaced_already_is_refused(
    replaced: Part, other: Part, named: str, nested: bool, small_model: Models
) -> None:
    model, message = small_model("gptj"), rf"{other.source} -> {other.target} overlaps another: {named} is"
    if not nested:
        with refused(model, message), patched(model, [replacement(replaced), replacement(other)]):
            pytest.fail("not refused")
        return
    with patched(model, [replacement(replaced)]):
        inside = vectors(model)
        with pytest.raises(InputError, match=message), patched(model, [replacement(other)]):
            pytest.fail("not refused")
        assert all(
            torch.equal(now["logits"], then["logits"])
            for now, then in zip(vectors(model), inside, strict=True)
        )
    with patched(model, [replacement(other)]):  # afterwards it may
        pass


def test_neighbours_do_not_overlap(small_model: Models) -> None:
    parts = [jump_part(0, 1), jump_part(1, 2), *(submodule_part(kind, 2) for kind in ("ln1", "attn", "ffn"))]
    for order in itertools.permutations(parts):
        with patched(small_model("gptj"), [replacement(replaced) for replaced in order]):
            pass
    for place in range(3):  # maps over no blocks, at the ends of jumps and before a stand-in
        with patched(
            small_model("gptj"), [replacement(replaced) for replaced in (*parts[:3], jump_part(place, place))]
        ):
            pass


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("h.2", "h.1", "h.2 -> h.1 runs backwards: a pass comes to h.1 before h.2"),
        ("h.-1", "h.1", "h.3 -> h.1 runs backwards"),
        ("attn_out.1", "attn_in.1", "attn_out.1 -> attn_in.1 runs backwards"),
        ("ffn_out.1", "h.1", "ffn_out.1 -> h.1 runs backwards"),
        ("ln1_out.1", "ln1_out.1", "ln1_out.1 -> ln1_out.1 ends where it starts"),
        ("h.0", "h.4", "Layer 4 of site 'h' is out of range"),
        ("ffn_in.3", "ffn_out.3", "Layer 3 of site 'ffn_in' is out of range"),
        ("ln2_in.0", "ln2_out.0", r"no site 'ln2_in' \(its blocks are parallel\)"),
        ("mid.0", "mid.0", "no site 'mid'"),
    ],
)
def test_sites_that_are_no_two_ends_are_refused(
    source: str, target: str, message: str, small_model: Models
) -> None:
    model = small_model("gptj")
    with refused(model, message), patched(model, [linear(jump_part(0, 1)), linear(part(source, target))]):
        pytest.fail("not refused")


def test_where_only_the_stream_is_known_only_jumps_are_taken(small_model: Models) -> None:
    model = small_model("bloom")
    with pytest.raises(InputError, match=r"no site 'attn_in'.*stream-only"):
        patched(model, [linear(submodule_part("attn", 0))]).__enter__()
    with patched(model, [linear(jump_part(0, 1))]):
        pass


@pytest.mark.refused
@pytest.mark.parametrize(
    "where",
    [
        "first", None, 3, [0, 1], torch.tensor([-1, 0]), torch.tensor([0.0, 1.0]), torch.tensor(1),
        torch.tensor([[1, 2]]), torch.tensor([True, False]), torch.ones(2, 0, dtype=torch.bool),
    ],
    ids=str,
)  # fmt: skip
def test_what_says_no_tokens_is_refused(where: Any, small_model: Models) -> None:
    model, maps = small_model("gptj"), MapSet([linear(submodule_part("attn", 0))])
    with (
        refused(model, "where.* of (attn_in.0 -> attn_out.0|mat_attn) .*[Ee]xpected"),
        patched(model, mat_attn(maps, 0, 1, where=where)),
    ):
        pytest.fail("not refused")


def test_what_replaces_nothing_is_refused(small_model: Models) -> None:
    model, replaced = small_model("gptj"), linear(jump_part(0, 1))
    wrong: Any
    for wrong, message in (
        (replaced, "Expected a list"),
        (MapSet([replaced]), r"\('h.0', 'h.1'\) replaces nothing.*From a MapSet, choose the maps"),
        ([replaced, "h.1"], "each entry a Replacement or a LinearMap"),
    ):
        with refused(model, message), patched(model, wrong):
            pytest.fail("not refused")


@pytest.mark.refused
def test_a_bias_of_another_width_is_refused() -> None:
    with pytest.raises(InputError, match=r"A bias of the shape \(1,\) does not fit a weight"):
        LinearMap(torch.zeros(D_MODEL, D_MODEL), torch.zeros(1), "h.1", "h.2")


@pytest.mark.parametrize("shape", [(16, 16), (D_MODEL, 16), (64, D_MODEL)], ids=str)
def test_maps_of_another_width_are_refused(shape: tuple[int, int], small_model: Models) -> None:
    model, wrong = small_model("gptj"), LinearMap(torch.zeros(shape), None, "h.1", "h.2")
    message = (
        rf"h.1 -> h.2 has the shape \({shape[0]}, {shape[1]}\), and the vectors of this model have {D_MODEL}"
    )
    with refused(model, message), patched(model, [wrong]):
        pytest.fail("not refused")


def test_maps_fitted_on_another_model_are_refused(
    small_model: Models, model_folder: Callable[[str], Path]
) -> None:
    model = small_model("gptj")
    half = matlens.load(str(model_folder("gptj")), device="cpu", dtype=torch.bfloat16)
    native = linear(jump_part(0, 1), provenance=Provenance(ModelIdentity.from_model(model)))
    with patched(model, [native, linear(jump_part(1, 2))]):  # of one that says nothing nothing is known
        pass
    for other in (small_model("gpt2"), half):
        foreign = linear(jump_part(1, 2), provenance=Provenance(ModelIdentity.from_model(other)))
        for given in ([foreign], [native, foreign], [foreign, native]):
            models = [ModelIdentity.from_model(each).fingerprint for each in (other, model)]
            message = f"Their models are .*{models[0]}, and .*{models[1]}"
            with refused(model, message), patched(model, given):
                pytest.fail("not refused")


def test_a_model_in_compatibility_mode_is_refused(model_folder: Callable[[str], Path]) -> None:
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    model.enable_compatibility_mode()
    before = hook_counts(model)
    with (
        pytest.raises(InputError, match="compatibility mode"),
        patched(model, [linear(jump_part(0, 1))]),
    ):
        pytest.fail("not refused")
    assert hook_counts(model) == before


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
    there = r"in this set of 2 \(it has attn_in -> attn_out, h -> h\)"
    with pytest.raises(InputError, match=rf"There is no map {missing} {there}"):
        function(maps)
    with pytest.raises(InputError, match=rf"There is no map {missing} in this set of 0 \(it has none\)"):
        function(MapSet([])) if missing != "attn_in.1 -> attn_out.1" else mat_attn(MapSet([]), 1, 2)


@pytest.mark.parametrize(("first", "last"), [(2, 1), (3, 0), (-1, 2)])
def test_ranges_that_run_backwards_are_refused(first: int, last: int) -> None:
    maps = MapSet([linear(submodule_part(name, i)) for name in ("attn", "ffn", "ln1") for i in range(3)])
    for function in (mat_attn, mat_ffn, mat_ln1_ln2):
        with pytest.raises(InputError, match=f"from layer {first} to layer {last}: the range runs backwards"):
            function(maps, first, last)
