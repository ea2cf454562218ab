"""Contexts that fail, end out of order, are held by generators or threads: the model is as before, always."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from handpatched import hand_vectors, jump_part, submodule_part
from patched_models import (
    SENTENCES,
    assert_as_before,
    assert_same,
    hook_counts,
    linear,
    patched,
    replacement,
    state,
    vectors,
)
from torch import Tensor

from matlens import InputError, Site
from matlens.ffn import controlled
from matlens.models.changes import changes_of
from matlens.patching.replacements import Replacement

CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "jump": lambda model: patched(model, [linear(jump_part(0, 1))]),
    "attn": lambda model: patched(model, [linear(submodule_part("attn", 1, 1))]),
    "ffn": lambda model: patched(
        model, [Replacement.from_map(linear(submodule_part("ffn", 2, 2)), where="not-first")]
    ),
    "control": lambda model: controlled(model, ["L1D9"], 3.0),
    "control last": lambda model: controlled(model, ["L1D3", "L1D4"], 2.0, where="last"),
}


@pytest.mark.parametrize(
    ("first", "second"), [*itertools.pairwise(CONTEXTS), *itertools.pairwise([*CONTEXTS][::-2])]
)
def test_contexts_end_in_any_order(first, second, small_model):
    model = small_model("llama")
    before = state(model)
    with CONTEXTS[second](model):
        alone, changes = vectors(model), changes_of(model)
        assert hook_counts(model) != before[0] or second == "jump"
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


def test_nested_contexts_are_one_with_both(small_model, plain_model):
    model = small_model("llama")
    outer = [jump_part(0, 1), submodule_part("ffn", 1, 1, where="not-first")]
    inner = [submodule_part("attn", 1, 2, where=(2, 1, 0, 5)), jump_part(2, 3, 3)]
    with patched(model, [replacement(replaced) for replaced in outer]):
        with patched(model, [replacement(replaced) for replaced in inner]):
            both = vectors(model)
        only_outer = vectors(model)
    assert_same(both, hand_vectors("llama", plain_model("llama"), outer + inner, SENTENCES))
    assert_same(only_outer, hand_vectors("llama", plain_model("llama"), outer, SENTENCES))


def _failing(_: Any) -> Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", ["body", "jump", "sub-module", "positions", "entering"])
def test_after_a_failure_the_model_is_as_before(fails, small_model, monkeypatch):
    model = small_model("gptj")
    parts = [jump_part(1, 2), submodule_part("attn", 0, 1, where="not-first"), jump_part(3, 3, 2)]
    before, replacements = state(model), [replacement(replaced) for replaced in parts]
    if fails == "jump":
        replacements.append(Replacement(_failing, Site("h", 2), Site("h", 3)))
    elif fails == "sub-module":
        replacements.append(Replacement(_failing, Site("ffn_in", 2), Site("ffn_out", 2)))
    elif fails == "positions":
        replacements.append(replacement(submodule_part("ffn", 2, where=(1, 0))))
    run: Callable[[Any], Any] = _failing if fails == "body" else vectors
    error = InputError if fails == "positions" else ZeroDivisionError
    with monkeypatch.context() as patch:
        if fails == "entering":
            patch.setattr(type(model), "hooks", lambda self, fwd_hooks: 1 / 0)
        with pytest.raises(error), patched(model, replacements):
            run(model)
    assert_as_before(model, before)
    with patched(model, [replacement(replaced) for replaced in parts]) as same:
        assert same is model


@pytest.mark.parametrize("kind", ["attn", "control"])
def test_hooks_that_a_user_resets_inside_stay_unless_for_good(kind, small_model):
    model = small_model("llama")
    before = state(model)
    with CONTEXTS[kind](model):
        inside = vectors(model)
        model.reset_hooks()
        assert_same(vectors(model), inside, 0)
    with pytest.raises(InputError, match="were removed before it ended"), CONTEXTS[kind](model):
        model.reset_hooks(including_permanent=True)
    assert_as_before(model, before)
