"""Patching is there in its context and nowhere else, around every way to run a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, D_MODEL, assert_near, make_sentences
from handpatched import Part, hand_vectors, jump_part, submodule_part
from patched_models import (
    SENTENCES,
    Models,
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

import matlens
from matlens import InputError, LinearMap, Site
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement

# Around every way to run a model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_cache_holds_what_is_computed_and_no_more(
    name: str, small_model: Models, plain_model: Models
) -> None:
    model, parts = small_model(name), [jump_part(0, 2), submodule_part("attn", 2)]
    expected = hand_vectors(name, plain_model(name), parts, SENTENCES[:1])[0]
    with patched(model, [replacement(replaced) for replaced in parts]), torch.inference_mode():
        logits, cache = model.run_with_cache(torch.tensor(SENTENCES[:1]))
        assert_near(logits[0], expected.pop("logits"))
        assert torch.equal(model(torch.tensor(SENTENCES[:1])), logits)
    for site, value in expected.items():
        assert_near(cache[ModelLayout.from_model(model).hook(site)][0], value)
    skipped = {key for key in cache if key.startswith(("blocks.0.", "blocks.1."))}
    ends = {"blocks.0.hook_in", "blocks.1.hook_out"}
    assert skipped - {"blocks.0.hook_resid_pre", "blocks.1.hook_resid_post"} == ends  # and their other names


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks_inside_see_and_change_what_stands_in(
    name: str, small_model: Models, plain_model: Models
) -> None:
    """A user's hook comes after the stand-in, at its output, and around the blocks that a jump skips."""
    model, tokens = small_model(name), torch.tensor(SENTENCES[:1])
    attn, over = submodule_part("attn", 0), jump_part(1, 2, 1)
    doubled = attn._replace(weight=2 * attn.weight, bias=2 * attn.bias)
    halve = Part("h.2", "h.2", 0.5 * torch.eye(D_MODEL))
    expected = hand_vectors(name, plain_model(name), [doubled, over, halve], SENTENCES[:1])[0]["logits"]
    hooks = [
        (ModelLayout.from_model(model).hook("attn_out.0"), lambda value, hook: 2 * value),
        (ModelLayout.from_model(model).hook("h.2"), lambda value, hook: 0.5 * value),
    ]
    with patched(model, [replacement(attn), replacement(over)]), torch.inference_mode():
        alone = model(tokens)
        assert_near(model.run_with_hooks(tokens, fwd_hooks=hooks)[0], expected)
        assert torch.equal(model(tokens), alone)  # their end is not the end of what stands in
        with model.hooks(fwd_hooks=hooks):
            assert_near(model(tokens)[0], expected)
        assert torch.equal(model(tokens), alone)


def test_gradients_flow_through_what_stands_in(small_model: Models) -> None:
    weights = [torch.eye(D_MODEL).requires_grad_() for _ in range(2)]
    maps = [LinearMap(weights[0], None, "h.0", "h.1"), LinearMap(weights[1], None, "ffn_in.2", "ffn_out.2")]
    with patched(small_model("gpt2"), maps):
        small_model("gpt2")(torch.tensor(SENTENCES[:1])).square().sum().backward()
    small_model("gpt2").zero_grad()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in weights)


# The model is as before


PARTS = [jump_part(1, 2), submodule_part("attn", 0, 1, where="not-first"), jump_part(3, 3, 2)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_afterwards_the_model_is_as_before(name: str, small_model: Models) -> None:
    model = small_model(name)
    vectors(model)
    before = state(model)
    for _ in range(2):  # and can be patched again
        with patched(model, [replacement(replaced) for replaced in PARTS]) as same:
            assert same is model
            vectors(model)
            assert hook_counts(model) != before[0]
        assert_as_before(model, before)


def _failing(_: Any) -> Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize("where_it_fails", ["body", "jump", "stand-in", "positions", "entering"])
def test_after_a_failure_the_model_is_as_before(
    where_it_fails: str, small_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("gptj")
    vectors(model)
    before, parts = state(model), [replacement(replaced) for replaced in PARTS]
    if where_it_fails == "jump":
        parts.append(Replacement(_failing, Site("h", 2), Site("h", 3)))
    elif where_it_fails == "stand-in":
        parts.append(Replacement(_failing, Site("ffn_in", 2), Site("ffn_out", 2)))
    elif where_it_fails == "positions":
        parts.append(replacement(submodule_part("ffn", 2, where=(1, 0))))

    run: Callable[[Any], Any] = _failing if where_it_fails == "body" else vectors
    error, message = ZeroDivisionError, None
    if where_it_fails == "positions":
        error, message = InputError, r"2 rows for a batch of 4 sentences\..*one row for each"
    with monkeypatch.context() as patch:
        if where_it_fails == "entering":
            patch.setattr(type(model), "hooks", lambda self, fwd_hooks: 1 / 0)
        with pytest.raises(error, match=message), patched(model, parts):
            run(model)
    assert_as_before(model, before)
    with patched(model, [replacement(replaced) for replaced in PARTS]):
        pass


# Contexts in contexts


def test_nested_contexts_are_one_with_both(small_model: Models, plain_model: Models) -> None:
    model = small_model("llama")
    outer = [jump_part(0, 1), submodule_part("ffn", 1, 1, where="not-first")]
    inner = [submodule_part("attn", 1, 2, where=(2, 1, 0, 5)), jump_part(2, 3, 3)]
    with patched(model, [replacement(replaced) for replaced in outer]):
        with patched(model, [replacement(replaced) for replaced in inner]):
            both = vectors(model)
        only_outer = vectors(model)
    expected = hand_vectors("llama", plain_model("llama"), outer + inner, SENTENCES)
    assert_same(both, expected)
    assert_same(only_outer, hand_vectors("llama", plain_model("llama"), outer, SENTENCES))


def test_collecting_what_is_jumped_over_is_refused(small_model: Models) -> None:
    model = small_model("llama")
    examples = matlens.make_examples(model, make_sentences()).head(3)
    with patched(model, [linear(jump_part(0, 2))]):
        assert set(matlens.collect(model, examples, ["h.0", "h.2"], progress=False)) == {"h.0", "h.2"}
        with pytest.raises(InputError, match=r"did not come to h\.1.*patched"):
            matlens.collect(model, examples, ["h.1", "h.2"], progress=False)
