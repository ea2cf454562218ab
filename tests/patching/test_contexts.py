"""A patched pass is a Hugging Face forward pass patched by hand, in every family and for every scheme."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import APART, D_MODEL, KINDS, N_LAYERS, WIRINGS, assert_near
from handpatched import Part, hand_vectors, jump_part, submodule_part, submodules
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import (
    LENGTHS,
    RANGES,
    SENTENCES,
    Vectors,
    assert_same,
    differ,
    linear,
    patched,
    replacement,
    vectors,
)
from torch import Tensor

from matlens import InputError, Site
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement

FAMILIES = ("gpt2", "gptj", "bert", "gemma3", "olmo2")  # a wiring each


def at_modules(name: str, model: Any) -> Vectors:
    """Our sites where a plain model has a module that begins or ends there."""
    return [
        {site: value for site, value in found.items() if site.split(".")[0] not in APART.get(name, ())}
        for found in vectors(model)
    ]


@pytest.mark.parametrize("name", [*WIRINGS, *KINDS, "bloom"])
def test_jumps_are_the_plain_model_with_those_layers_replaced(name, small_model, plain_model):
    unpatched = vectors(small_model(name))
    for seed, (first, last) in enumerate(RANGES if name in FAMILIES else [(0, 1), (1, 3), (3, 3)]):
        replaced = jump_part(first, last, seed, bias=seed % 2 == 0)
        with patched(small_model(name), [replacement(replaced)]):
            ours = at_modules(name, small_model(name))
        assert_same(ours, hand_vectors(name, plain_model(name), [replaced], SENTENCES))
        assert differ(ours, unpatched)


FLAGS = ((False, True, True, False), (True, False, True, False), (True,) * 4, (False,) * 4)
WHERES: list[Any] = ["all", "not-first", "last", (4, 3, 0, 0), FLAGS]


@pytest.mark.parametrize("name", [*WIRINGS, *KINDS])
def test_sub_modules_are_those_of_the_plain_model_replaced(name, small_model, plain_model):
    """Every sub-module of every block, in turn at all tokens, at some, and at one."""
    places = list(itertools.product(submodules(name), range(N_LAYERS)))
    for seed, (module, layer) in enumerate(places if name in FAMILIES else places[::2]):
        replaced = submodule_part(module, layer, seed, where=WHERES[seed % len(WHERES)])
        with patched(small_model(name), [replacement(replaced)]):
            ours = at_modules(name, small_model(name))
        assert_same(ours, hand_vectors(name, plain_model(name), [replaced], SENTENCES))


@st.composite
def schemes(draw: st.DrawFn, name: str) -> list[Part]:
    """Jumps and sub-modules in blocks of their own, in any order, and maps between blocks."""
    parts: list[Part] = []
    seeds, biases = itertools.count(draw(st.integers(0, 10**6))), st.booleans()
    wheres = [st.just("all"), st.just("not-first"), st.just("last")]
    wheres.append(st.tuples(*(st.integers(0, n - 1) for n in LENGTHS)))
    # As many Booleans as the longest sentence has tokens, or fewer.
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


@pytest.mark.parametrize("name", ["gpt2", "gptj", "bert"])
def test_any_scheme_is_the_plain_model_patched_by_hand(name, small_model, plain_model):
    @settings(derandomize=True, max_examples=12)
    @given(parts=schemes(name), side=st.sampled_from(["right", "left"]))
    def check(parts: list[Part], side: str) -> None:
        with patched(small_model(name), [replacement(replaced) for replaced in parts]):
            ours = vectors(small_model(name), side=side)
        assert_same(ours, hand_vectors(name, plain_model(name), parts, SENTENCES))

    check()


@pytest.mark.parametrize("name", ["gpt2", "gptj"])
def test_the_cache_has_what_is_computed_and_no_more(name, small_model, plain_model):
    model, parts = small_model(name), [jump_part(0, 2), submodule_part("attn", 2)]
    expected = hand_vectors(name, plain_model(name), parts, SENTENCES[:1])[0]
    with patched(model, [replacement(replaced) for replaced in parts]), torch.inference_mode():
        logits, cache = model.run_with_cache(torch.tensor(SENTENCES[:1]))
    assert_near(logits[0], expected.pop("logits"))
    for site, value in expected.items():
        assert_near(cache[ModelLayout.from_model(model).hook(site)][0], value)
    skipped = {key for key in cache if key.startswith(("blocks.0.", "blocks.1."))}
    names = {"blocks.0.hook_resid_pre", "blocks.1.hook_resid_post"}  # other names of the same hooks
    assert skipped - names == {"blocks.0.hook_in", "blocks.1.hook_out"}


def test_hooks_inside_see_and_change_what_is_replaced(small_model, plain_model):
    """A user's hook comes after the replacement, at its output, and around the blocks that a jump skips."""
    model, tokens = small_model("gpt2"), torch.tensor(SENTENCES[:1])
    attn, over = submodule_part("attn", 0), jump_part(1, 2, 1)
    assert attn.bias is not None
    doubled = attn._replace(weight=2 * attn.weight, bias=2 * attn.bias)
    halve = Part("h.2", "h.2", 0.5 * torch.eye(D_MODEL))
    expected = hand_vectors("gpt2", plain_model("gpt2"), [doubled, over, halve], SENTENCES[:1])[0]["logits"]
    hook = ModelLayout.from_model(model).hook
    hooks: list[tuple[str, Any]] = [
        (hook("attn_out.0"), lambda value, hook: 2 * value), (hook("h.2"), lambda value, hook: 0.5 * value)
    ]  # fmt: skip
    with patched(model, [replacement(attn), replacement(over)]), torch.inference_mode():
        alone = model(tokens)
        assert_near(model.run_with_hooks(tokens, fwd_hooks=hooks)[0], expected)
        assert torch.equal(model(tokens), alone)  # the replacements outlive them


def test_without_a_mask_every_row_is_a_whole_sentence(small_model, plain_model):
    model, tokens = small_model("gpt2"), torch.tensor(SENTENCES[0]).reshape(2, 5)
    for where in ("not-first", (3, 0)):
        replaced = submodule_part("attn", 0, where=where)
        expected = hand_vectors("gpt2", plain_model("gpt2"), [replaced], tokens.tolist())
        with patched(model, [replacement(replaced)]), torch.inference_mode():
            for row, logits in enumerate(model(tokens)):
                assert_near(logits, expected[row]["logits"])
    mask = torch.zeros(1, 1, 4, 4)
    with (
        patched(model, [linear(submodule_part("ffn", 1))]),
        pytest.raises(InputError, match="got one of 4 dimensions"),
    ):
        model.original_model(input_ids=torch.tensor([[7, 3, 41, 12]]), attention_mask=mask)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_infinite_values_at_padding_reach_no_token(name, small_model):
    """They would come back through attention weights of zero, as NaN."""
    model, part = small_model(name), submodule_part("ffn", 1)
    lengths = torch.tensor(LENGTHS)[:, None]

    def growing(x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]) >= lengths
        return part.apply(x).masked_fill(padding[..., None], torch.inf)

    found = []
    for function in (growing, part.apply):
        with patched(model, [Replacement(function, Site("ffn_in", 1), Site("ffn_out", 1))]):
            found.append(vectors(model))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours["logits"], theirs["logits"])
