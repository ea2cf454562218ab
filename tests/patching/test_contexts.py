"""A patched pass is a Hugging Face pass patched by hand, and the model is as before afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import APART, D_MODEL, KINDS, N_LAYERS, SITE_MODULES, WIRINGS, assert_near
from handpatched import Part, hand_vectors, jump_part, part, submodule_part, submodules
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import (
    LENGTHS,
    RANGES,
    SENTENCES,
    assert_as_before,
    assert_same,
    counting,
    differ,
    hook_counts,
    linear,
    patched,
    replacement,
    state,
    vectors,
)
from plain_values import D_MLP
from torch import Tensor

from matlens import InputError, MapSet, Site
from matlens.ffn import controlled
from matlens.models import active_hooks
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement
from matlens.patching.schemes import Scheme

FAMILIES = ("gpt2", "gptj", "bert", "gemma3", "olmo2")  # a wiring each
FLAGS = ((False, True, True, False), (True, False, True, False), (True,) * 4, (False,) * 4)
WHERES: list[Any] = ["all", "not-first", "last", (4, 3, 0, 0), FLAGS]


def cases(name: str) -> list[list[Part]]:
    """Jumps, sub-modules of every block in turn, and maps between any two sites, at all tokens or some."""
    step = 1 if name in FAMILIES else 2
    places = list(itertools.product(submodules(name), range(N_LAYERS)))[::step]
    parts = [jump_part(*ends, seed, bias=seed % 2 == 0) for seed, ends in enumerate(RANGES[::step])]
    parts += [submodule_part(*place, i, where=WHERES[i % len(WHERES)]) for i, place in enumerate(places)]
    if name not in WIRINGS:
        return [[each] for each in parts]
    ends = [("z.0", "h.2"), ("h.0", "attn_out.1"), ("attn_in.0", "ffn_out.2"), ("ffn_post.0", "z.1")]
    ends += [("z.0", "ffn_in.2")]
    if "mid" in SITE_MODULES[name]:
        ends += [("z.0", "mid.1"), ("mid.0", "ln2_in.2" if "ln2_in" in SITE_MODULES[name] else "attn_in.2")]
    for i, (source, target) in enumerate(ends):
        d_in = D_MLP[name] if source == "ffn_post.0" else D_MODEL
        parts.append(part(source, target, i, where=WHERES[i % len(WHERES)], d_in=d_in))
    return [[each] for each in parts] + [[part("h.1", "attn_out.2"), part("z.0", "h.1", 1)]]


@pytest.mark.parametrize("name", [*WIRINGS, *KINDS, "bloom"])
def test_a_patched_model_is_the_plain_one_patched_by_hand(name, small_model, plain_model):
    model, unread = small_model(name), (*APART.get(name, ()), "z")
    unpatched = vectors(model)
    for number, parts in enumerate(cases(name)):
        with patched(model, list(map(replacement, parts))):
            ours = vectors(model, side=("right", "left")[number % 2])
        ours = [{site: of[site] for site in of if site.split(".")[0] not in unread} for of in ours]
        theirs = hand_vectors(name, plain_model(name), parts, SENTENCES)
        if not parts[0].blocks and parts[0].source.replace("_in", "_out") != parts[0].target:
            ours, theirs = ([{"logits": each["logits"]} for each in both] for both in (ours, theirs))
        assert_same(ours, theirs)
        assert differ(ours, unpatched) or parts[0].where != "all"


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
    @given(parts=schemes(name), side=st.sampled_from(["right", "left"]), cut=st.integers(0, 3))
    def check(parts: list[Part], side: str, cut: int) -> None:
        outer, inner = (list(map(replacement, some)) for some in (parts[:cut], parts[cut:]))
        with patched(small_model(name), outer), patched(small_model(name), inner):
            ours = vectors(small_model(name), side=side)
        assert_same(ours, hand_vectors(name, plain_model(name), parts, SENTENCES))

    check()


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


@pytest.mark.parametrize("name", ["gptj", "bert"])
def test_skipped_blocks_are_not_computed(name, small_model):
    model = small_model(name)
    for kept in itertools.product([False, True], repeat=N_LAYERS):
        jumps = [jump_part(layer, layer + 1, layer) for layer in range(N_LAYERS) if not kept[layer]]
        with patched(model, [*map(replacement, jumps)]), counting(model) as counts, torch.inference_mode():
            model(torch.tensor(SENTENCES[:1]))
        assert counts == list(map(int, kept))


N_NEW = 8
PROMPT = [7, 3, 41, 12, 12, 59, 30, 22, 8, 17, 5, 33, 2]  # with its end outside of Gemma 3's window
TEXTS = ["w4 w40 w11 w0 w29 w9", "w17", "w8 w8 w30 w21 w2 w35 w45 w13 w7 w26 w1 w19"]
SILENT: dict[str, Any] = {"stop_at_eos": False, "do_sample": False, "verbose": False, "return_type": "tokens"}


TO_COME = tuple(tuple(place == chosen for place in range(30)) for chosen in (1, 0, 13))
SCHEMES: dict[str, list[Part]] = {
    "two blocks and attention": [jump_part(0, 2, 2), submodule_part("attn", 2, 3, where="not-first")],
    "all blocks": [jump_part(0, 3, 5)],
    "around a jump": [
        jump_part(1, 2, 6), submodule_part("ffn", 0, 7, where="not-first"), submodule_part("attn", 2, 8),
    ],
    "at masks": [
        submodule_part("ffn", 1, 11, where=TO_COME), jump_part(2, 3, 12),
        submodule_part("attn", 1, 13, where=((False, True, True), (True, False, True), (True, True, False))),
    ],
}  # fmt: skip


def generate(model: Any, given: Any, parts: Sequence[Part], **options: Any) -> tuple[Tensor, Tensor]:
    """Sequences, and the logits of each new token."""
    with patched(model, [replacement(replaced) for replaced in parts]):
        output = model.generate(given, N_NEW, output_logits=True, **SILENT, **options)
    return output.sequences, torch.stack(output.logits, dim=1)


def assert_most_probable(
    name: str, plain: Any, parts: Sequence[Part], sequences: Sequence[Tensor], logits: Tensor
) -> None:
    """Read as a whole and without a cache, the hand-patched model has the same logits at each new token.

    By induction, then, it would have generated the same.
    """
    expected = hand_vectors(name, plain, parts, [sequence.tolist() for sequence in sequences])
    for sequence, ours, by_hand in zip(sequences, logits, expected, strict=True):
        assert torch.equal(sequence[-N_NEW:], ours.argmax(-1))
        assert_near(ours, by_hand["logits"][-N_NEW - 1 : -1])


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("name", ["gpt2", "gptj", "gemma3", "qwen3-next"])
def test_prompts_of_different_lengths(name, cached, small_model, plain_model):
    """They are padded on the left, and a sentence's first token is its own."""
    model = small_model(name)
    prompts = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    for scheme, parts in SCHEMES.items():
        if name == "qwen3-next" and scheme != "all blocks":  # its linear attention reads padding
            continue
        padded, logits = generate(model, TEXTS, parts, use_past_kv_cache=cached)
        sequences = [row[-len(prompt) - N_NEW :] for row, prompt in zip(padded, prompts, strict=True)]
        assert [row[:-N_NEW].tolist() for row in sequences] == prompts
        assert_most_probable(name, plain_model(name), parts, sequences, logits)


def test_hugging_faces_own_generation_and_two_passes_are_patched_too(small_model, plain_model):
    model, plain, given = small_model("gemma3"), plain_model("gemma3"), torch.tensor([PROMPT])
    silent = {"max_new_tokens": N_NEW, "do_sample": False, "stop_at_eos": False}
    parts = SCHEMES["around a jump"]
    with patched(model, list(map(replacement, parts))), torch.inference_mode():
        output = model.hf_generate(given, output_logits=True, return_dict_in_generate=True, **silent)
        beams = [
            model.hf_generate(given, num_beams=4, use_cache=cached, return_type="tokens", **silent)
            for cached in (True, False)  # the cache of a beam is reordered, empty places included
        ]
        first, cache = model(given[:, :5], return_type="logits_and_cache", use_cache=True)
        rest = model(given[:, 5:], past_key_values=cache)  # whose first token is not the sentence's
    logits = torch.stack(output.logits, dim=1)
    assert_most_probable("gemma3", plain, parts, list(output.sequences), logits)
    assert torch.equal(*beams)
    assert_near(torch.cat([first, rest], 1)[0], hand_vectors("gemma3", plain, parts, [PROMPT])[0]["logits"])


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
        alone, changes = vectors(model), active_hooks(model)
        assert hook_counts(model) != before[0] or second == "jump"
    one, other = CONTEXTS[first](model), CONTEXTS[second](model)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)  # not the innermost
    assert_same(vectors(model), alone, 0)
    assert active_hooks(model) == changes
    with CONTEXTS[first](model):  # what has ended is free again
        pass
    with pytest.raises(InputError, match=r"already|controlled|replaced"), CONTEXTS[second](model):
        pass
    other.__exit__(None, None, None)
    assert_as_before(model, before)


def _failing(_: Any) -> Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", ["body", "jump", "sub-module", "positions", "entering", "control"])
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
    run: Callable[[Any], Any] = _failing if fails in ("body", "control") else vectors
    error = InputError if fails == "positions" else ZeroDivisionError
    with monkeypatch.context() as patch:
        if fails == "entering":
            patch.setattr(type(model), "hooks", lambda self, fwd_hooks: 1 / 0)
        control = controlled(model, {"L2D5": 2.0}, where="new") if fails == "control" else nullcontext()
        with pytest.raises(error), control, patched(model, replacements):
            run(model)
    assert_as_before(model, before)
    with patched(model, [replacement(replaced) for replaced in parts]) as same:
        assert same is model


@pytest.mark.parametrize("kind", ["attn", "control"])
def test_hooks_of_a_context_survive_a_reset(kind, small_model):
    model = small_model("llama")
    before = state(model)
    with CONTEXTS[kind](model):
        inside = vectors(model)
        model.reset_hooks()
        assert_same(vectors(model), inside, 0)
    assert_as_before(model, before)


@pytest.mark.parametrize("name", ["gpt2", "gptj"])
def test_a_pass_starts_and_stops_where_there_are_vectors(name, small_model):
    """At the ends of a jump as if nothing were replaced, and nowhere between."""
    model, replaced = small_model(name), linear(jump_part(0, 2))
    tokens = torch.tensor([[7, 3, 41, 12]])
    with torch.inference_mode():
        h0, h2 = model(tokens, stop_at_layer=0), model(tokens, stop_at_layer=2)
        from_two = model(replaced(h0), start_at_layer=2)
        with patched(model, [replaced]):
            assert torch.equal(model(tokens, stop_at_layer=0), h0)
            assert_near(model(tokens, stop_at_layer=2), replaced(h0))
            assert_near(model(h0, start_at_layer=0), from_two)
            for given, asked in ((tokens, {"stop_at_layer": 1}), (h0, {"start_at_layer": 1})):
                with pytest.raises(InputError, match="cannot start or stop at layer 1: the jump"):
                    model(given, **asked)
        assert torch.equal(model(tokens, stop_at_layer=2), h2)

    def fail(value: Tensor, hook: Any) -> None:
        raise ZeroDivisionError

    with patched(model, [linear(part("z.0", "attn_out.2"))]):
        with pytest.raises(ZeroDivisionError), model.hooks(fwd_hooks=[("blocks.1.hook_in", fail)]):
            model(tokens)  # the source has fired, the target not
        with pytest.raises(InputError, match=r"reached attn_out\.2 without blocks\.0\.attn"):
            model(h0, start_at_layer=1)


def test_a_scheme_runs_plain_blocks_and_matrices_in_turn(small_model, plain_model):
    scheme = Scheme((0, 2, 3, 7), "blocks")
    assert scheme.segments == (("blocks", 0, 2), ("mat", 2, 3), ("blocks", 3, 7))
    assert (scheme.jumps, scheme.n_blocks, str(scheme)) == (((2, 3),), 6, "blocks 0-2 mat 2-3 blocks 3-7")
    for wrong in ((), (0,), (1, 3), (0, 2, 2), (0, 3, 2)):
        with pytest.raises(InputError, match="boundaries must be"):
            Scheme(wrong, "mat")
    parts = {ends: jump_part(*ends, seed, bias=False) for seed, ends in enumerate(RANGES) if len({*ends}) > 1}
    maps = MapSet(map(linear, parts.values()))
    for name, inner in itertools.product(("gptj", "bert"), ((), (1,), (1, 2), (2,))):
        for boundaries, start in (((0, *inner, N_LAYERS), "mat"), ((0, *inner, N_LAYERS), "blocks")):
            scheme = Scheme(boundaries, start)  # type: ignore[arg-type]
            with patched(small_model(name), scheme.replacements(small_model(name), maps)):
                ours = vectors(small_model(name))
            jumps = list(itertools.pairwise(boundaries))[start == "blocks" :: 2]
            assert (*jumps,) == scheme.jumps
            by_hand = [parts[ends] for ends in jumps]
            assert_same(ours, hand_vectors(name, plain_model(name), by_hand, SENTENCES))
    with pytest.raises(InputError, match="ends at layer 2, the model at layer 3"):
        Scheme((0, 2), "blocks").replacements(small_model("bert"), maps)
