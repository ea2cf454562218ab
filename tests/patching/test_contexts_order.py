"""Contexts that end out of order, are entered twice, held by generators or threads: right, or refused."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import D_MODEL, make_sentences
from handpatched import jump_part, submodule_part
from patched_models import assert_as_before, assert_same, linear, patched, run_variants, state, vectors

from matlens import InputError, LinearMap, Site, make_examples
from matlens.ffn import controlled
from matlens.models.changes import changes_of
from matlens.patching.replacements import Replacement
from matlens.patching.variants import Variant

Models = Callable[[str], Any]

CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "jump": lambda model: patched(model, [linear(jump_part(0, 1))]),
    "attn": lambda model: patched(model, [linear(submodule_part("attn", 1, 1))]),
    "ffn": lambda model: patched(
        model, [Replacement.from_map(linear(submodule_part("ffn", 2, 2)), where="not-first")]
    ),
    "control": lambda model: controlled(model, ["L1D9"], 3.0),
    "control new": lambda model: controlled(model, ["L1D3", "L1D4"], 2.0, where="last"),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(CONTEXTS, 2)))
def test_contexts_end_in_any_order(first: str, second: str, small_model: Models) -> None:
    model = small_model("llama")
    vectors(model)
    before = state(model)
    with CONTEXTS[second](model):
        alone, changes = vectors(model), changes_of(model)
    one, other = CONTEXTS[first](model), CONTEXTS[second](model)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)  # not the innermost
    assert_same(vectors(model), alone, 0)
    assert changes_of(model) == changes
    with CONTEXTS[first](model):  # what has ended is free again
        pass
    with pytest.raises(InputError, match=r"already|controlled|replaced"), CONTEXTS[second](model):
        pass
    other.__exit__(None, None, None)
    assert_as_before(model, before)


@pytest.mark.parametrize("kind", CONTEXTS)
def test_a_generator_that_holds_a_context_lets_go_of_it(kind: str, small_model: Models) -> None:
    model = small_model("llama")
    vectors(model)
    before = state(model)

    def holding() -> Iterator[int]:
        with CONTEXTS[kind](model):
            yield 1
            yield 2

    generator = holding()
    next(generator)
    assert changes_of(model)
    generator.close()
    assert_as_before(model, before)
    generator = holding()
    next(generator)
    del generator
    gc.collect()
    assert_as_before(model, before)
    generator = holding()
    next(generator)
    with pytest.raises(ZeroDivisionError):
        generator.throw(ZeroDivisionError)
    assert_as_before(model, before)


@pytest.mark.parametrize("kind", CONTEXTS)
def test_hooks_that_are_reset_inside_stay(kind: str, small_model: Models) -> None:
    """`model.reset_hooks()` in a user's code is about that code's hooks."""
    model = small_model("llama")
    vectors(model)
    before = state(model)
    with CONTEXTS[kind](model):
        inside = vectors(model)
        model.reset_hooks()
        assert_same(vectors(model), inside, 0)
    assert_as_before(model, before)


@pytest.mark.parametrize("kind", ["attn", "control"])
def test_hooks_that_are_taken_off_for_good_are_told(kind: str, small_model: Models) -> None:
    model = small_model("llama")
    vectors(model)
    before = state(model)
    with pytest.raises(InputError, match="were removed before it ended"), CONTEXTS[kind](model):
        model.reset_hooks(including_permanent=True)
    assert_as_before(model, before)

    def fail() -> None:
        model.reset_hooks(including_permanent=True)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), CONTEXTS[kind](model):  # what went wrong first is told
        fail()
    assert_as_before(model, before)


def test_a_forward_that_somebody_else_has_put_on_a_block_is_there_again(small_model: Models) -> None:
    model = small_model("llama")
    block = model.blocks[0]
    original = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    vars(block)["forward"] = forward  # not by assignment, which the bridge hands on to the module inside
    try:
        with patched(model, [linear(jump_part(0, 2))]):
            assert block.forward is not forward
        assert block.forward is forward
    finally:
        del vars(block)["forward"]
    assert changes_of(model) == ()


def test_entering_in_two_threads_at_once_is_refused_in_one(small_model: Models) -> None:
    model = small_model("llama")
    vectors(model)
    before, outcomes = state(model), []
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with CONTEXTS["attn"](model):
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    for kind in CONTEXTS:
        with pytest.raises(InputError, match=r"in another thread|already"), CONTEXTS[kind](model):
            outcomes.append(kind)
    done.set()
    thread.join()
    assert not outcomes
    assert_as_before(model, before)


# Maps that cannot be put in


def _bad(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearMap:
    return LinearMap(weight, bias, "ffn_in.1", "ffn_out.1")


NAN, GOOD = torch.eye(D_MODEL), torch.eye(D_MODEL)
NAN = NAN.index_fill(0, torch.tensor([3]), torch.nan)


@pytest.mark.refused
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _bad(NAN), "not finite"),
        (lambda: _bad(GOOD, torch.full((D_MODEL,), -torch.inf)), "not finite"),
        (lambda: replace(_bad(NAN), source="h.0", target="h.2"), "not finite"),
    ],
)
def test_maps_that_are_not_finite_are_refused_before_anything_runs(
    make: Callable[[], LinearMap], message: str, small_model: Models
) -> None:
    model, bad = small_model("llama"), make()
    before = state(model)
    with pytest.raises(InputError, match=message):
        patched(model, [bad]).__enter__()
    examples = make_examples(model, make_sentences()).head(2)
    with pytest.raises(InputError, match=message):
        run_variants(model, examples, {"bad": Variant(0, [Replacement.from_map(bad)])}, progress=False)
    assert_as_before(model, before)


@pytest.mark.refused
@pytest.mark.parametrize("source", ["h.0", "ffn_in.0"])
@pytest.mark.parametrize(
    "function", [lambda h: None, lambda h: h[..., :3], lambda h: h.flatten(), lambda h: h.numpy()]
)
def test_functions_that_give_no_vectors_are_told(function: Any, source: str, small_model: Models) -> None:
    model = small_model("llama")
    before = state(model)
    target = {"h.0": "h.1", "ffn_in.0": "ffn_out.0"}[source]
    stand_in = Replacement(function, Site.read(source), Site.read(target))
    with pytest.raises(InputError, match="The function of"), patched(model, [stand_in]):
        vectors(model)
    assert_as_before(model, before)
