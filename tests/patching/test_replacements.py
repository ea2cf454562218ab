"""Which parts are replaced between any two sites, by which functions, and which replacements are refused."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, SITE_MODULES, WIRINGS, assert_near
from handpatched import Part, hand_vectors, jump_part, part, run, submodule_part, submodules
from patched_models import (
    LENGTHS,
    RANGES,
    SENTENCES,
    assert_as_before,
    assert_same,
    linear,
    patched,
    replacement,
    run_variants,
    state,
    vectors,
)
from torch import Tensor

import matlens
from matlens import InputError, LinearMap, MapSet, Site
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.layout import ModelLayout
from matlens.patching import replacements as replacements_module
from matlens.patching.replacements import (
    Replacement,
    jump,
    mat_attn,
    mat_ffn,
    mat_ln1_ln2,
    replace_submodules,
)
from matlens.patching.variants import Variant

# Between any two sites

WHERES: list[Any] = [
    "all", "not-first", (3, 0, 0, 5), (tuple(token % 3 == 1 for token in range(max(LENGTHS))),) * len(LENGTHS)
]  # fmt: skip


def random_map(model: Any, source: str, target: str) -> LinearMap:
    layout, generator = ModelLayout.from_model(model), torch.Generator().manual_seed(3)
    d_in, d_out = layout.width(source), layout.width(target)
    weight = torch.randn(d_out, d_in, generator=generator) / d_in**0.5
    return LinearMap(weight, torch.randn(d_out, generator=generator), source, target)


def hand_logits(name: str, plain: Any, linear: LinearMap, where: Any = "all") -> list[Tensor]:
    by_hand = Part(linear.source, linear.target, linear.weight, linear.bias, where)
    return [vectors["logits"] for vectors in hand_vectors(name, plain, [by_hand], SENTENCES)]


@pytest.mark.parametrize("name", WIRINGS)
def test_a_patch_is_the_plain_model_patched_by_hand(name, small_model, plain_model):
    model = small_model(name)
    pairs = [("z.0", "h.2"), ("h.0", "attn_out.1"), ("attn_in.0", "ffn_out.2"), ("ffn_post.0", "z.1")]
    pairs += [("z.0", "ffn_in.2"), ("h.1", "h.3"), ("h.1", "h.1")]
    if "mid" in SITE_MODULES[name]:
        pairs += [("z.0", "mid.1"), ("mid.0", "ln2_in.2" if "ln2_in" in SITE_MODULES[name] else "attn_in.2")]
    for number, (source, target) in enumerate(pairs):
        map_, where = random_map(model, source, target), WHERES[number % len(WHERES)]
        expected = hand_logits(name, plain_model(name), map_, where)
        for side in ("right", "left"):
            with patched(model, [replacement(Part(source, target, map_.weight, map_.bias, where))]):
                ours = vectors(model, side=side)
            for our, their in zip(ours, expected, strict=True):
                assert_near(our["logits"], their)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_map_from_the_heads_is_collected_fitted_and_patched(name, small_model, plain_model, sentences):
    model, plain = small_model(name), plain_model(name)
    examples = matlens.make_examples(model, sentences)
    sites = ["blocks.0.attn.hook_z", "h.2"]
    samples = matlens.collect(model, examples, sites, positions="all", progress=False)
    texts = [examples.tokens[a:b] for a, b in itertools.pairwise(examples.offsets)]
    z = torch.cat([run(name, plain, [], text.tolist())["z.0"] for text in texts])
    assert_near(samples["z.0"], z)
    maps = MapSet.fit(samples, pairs=[("z.0", 2)], progress=False)
    fitted = maps["blocks.0.attn.o.hook_in", "h.-2"]
    solution = torch.linalg.lstsq(z.double(), samples[2].double(), driver="gelsd").solution
    assert_near(fitted.weight, solution.T, 1e-3)
    expected = hand_logits(name, plain, LinearMap(fitted.weight, None, "z.0", "h.2"))
    with patched(model, maps.values()):
        for ours, theirs in zip(vectors(model), expected, strict=True):
            assert_near(ours["logits"], theirs, 1e-4)  # rounding grows with fitted maps


def test_one_patch_reads_what_another_writes_in_any_order(small_model):
    model = small_model("gpt2")
    first, second = random_map(model, "z.0", "h.1"), random_map(model, "h.1", "attn_out.2")
    assert first.bias is not None
    bias = second(first.bias)
    with patched(model, [first, LinearMap(second.weight @ first.weight, bias, "z.0", "attn_out.2")]):
        expected = vectors(model)
    for given in ([first, second], [second, first]):
        with patched(model, given):
            for ours, theirs in zip(vectors(model), expected, strict=True):
                assert_near(ours["logits"], theirs["logits"])


def test_patches_hold_while_a_model_generates_and_nothing_old_is_used(small_model):
    model = small_model("gpt2")
    tokens, h = torch.tensor(SENTENCES[:1]), torch.zeros(1, 4, D_MODEL)
    silent = {"do_sample": False, "verbose": False, "stop_at_eos": False}

    def fail(value: Tensor, hook: Any) -> None:
        raise ZeroDivisionError

    with patched(model, [random_map(model, "z.0", "attn_out.2")]):
        made = [model.generate(tokens, 6, use_past_kv_cache=cached, **silent) for cached in (True, False)]
        assert torch.equal(*made)
        with pytest.raises(ZeroDivisionError), model.hooks(fwd_hooks=[("blocks.1.hook_in", fail)]):
            model(tokens)  # the source has fired, the target not
        with pytest.raises(InputError, match=r"reached attn_out\.2 without blocks\.0\.attn\.hook_z"):
            model(h, start_at_layer=1)


# Named functions


def test_named_functions_replace_their_sub_modules(small_model, plain_model):
    """In parallel blocks of one norm only that; norms after attention and FFN are kept unless alone."""
    for name, norms in (("gptj", ["ln1"]), ("gemma2", ["ln1", "ln2"]), ("olmo2", ["ln1_post", "ln2_post"])):
        parts = [jump_part(first, last, 7 * first + last) for first, last in RANGES]
        for seed, module in enumerate(submodules(name)):
            parts += [submodule_part(module, layer, 100 * seed + layer) for layer in range(N_LAYERS)]
        maps = MapSet([linear(replaced) for replaced in parts])
        known = {(replaced.source, replaced.target): replaced for replaced in parts}
        model, plain = small_model(name), plain_model(name)
        for function, modules in ((mat_attn, ["attn"]), (mat_ffn, ["ffn"]), (mat_ln1_ln2, norms)):
            by_hand = [
                known[f"{module}_in.{layer}", f"{module}_out.{layer}"]._replace(where="not-first")
                for module, layer in itertools.product(modules, (1, 2))
            ]
            with patched(model, function(maps, 1, 3, where="not-first")):
                assert_same(vectors(model), hand_vectors(name, plain, by_hand, SENTENCES))
        by_hand = [known["h.0", "h.1"], known["ffn_in.2", "ffn_out.2"]]
        with patched(model, [*jump(maps, 0, 1), *replace_submodules(maps, ("ffn",), 2, 3)]):
            assert_same(vectors(model), hand_vectors(name, plain, by_hand, SENTENCES))


# Refused

OVERLAPS: dict[str, tuple[Part, Part, str]] = {
    "the same target": (part("z.0", "h.2"), part("z.1", "h.2"), "h.2 is"),
    "a hook by two names": (part("h.0", "z.1"), part("h.1", "blocks.1.attn.o.hook_in"), "hook_z is"),
    "the target of a jump": (jump_part(0, 2), part("z.0", "h.2"), "h.2 is"),
    "a target inside a jump": (jump_part(1, 3), part("z.0", "attn_out.2"), "attn_out.2, which h.1 -> h.3"),
    "a jump under a patch": (jump_part(1, 2), part("z.0", "h.3"), "h.2, which .* -> h.3 covers"),
    "a part of a sub-module": (submodule_part("attn", 1), part("h.0", "z.1"), "hook_z, which attn_in.1 ->"),
    "a sub-module under a patch": (part("z.0", "h.3"), submodule_part("ffn", 1), "ffn_out.1, which .*"),
    "the middle and attention": (part("z.0", "mid.1"), submodule_part("attn", 1), "attn_out.1 is"),
    "jumps that overlap": (jump_part(0, 2), jump_part(1, 3), "h.2, which .* covers"),
    "a layer inside a jump": (jump_part(0, 3), jump_part(1, 1), "h.1, which .* covers"),
    "the same layer": (jump_part(1, 1), jump_part(1, 1, 1), "h.1 is"),
    "the same at other tokens": (
        submodule_part("ffn", 1, where="not-first"), submodule_part("ffn", 1, where=(0, 0, 0, 0)),
        "ffn_out.1 is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERLAPS)
def test_replacements_that_overlap_are_refused(case, small_model):
    """In either order, and in nested contexts."""
    model, (*given, message) = small_model("gpt2"), OVERLAPS[case]
    one, other = map(replacement, given)
    before = state(model)
    for first, second in ((one, other), (other, one)):
        with pytest.raises(InputError, match="overlaps another"):
            patched(model, [first, second]).__enter__()
        with patched(model, [first]), pytest.raises(InputError, match="overlaps another"):
            patched(model, [second]).__enter__()
    with pytest.raises(InputError, match=f"overlaps another: .*{message}"):
        patched(model, [one, other]).__enter__()
    assert_as_before(model, before)


def test_neighbors_do_not_overlap(small_model):
    model = small_model("gptj")
    parts = [jump_part(0, 1), jump_part(1, 2), *(submodule_part(kind, 2) for kind in ("ln1", "attn", "ffn"))]
    for order in itertools.islice(itertools.permutations(parts), 0, None, 19):
        with patched(model, [replacement(replaced) for replaced in order]):
            pass
    for place in range(3):  # maps over no blocks, at the ends of jumps
        with patched(model, [replacement(replaced) for replaced in (*parts[:3], jump_part(place, place))]):
            pass
    some = Replacement.from_map(
        random_map(model, "z.0", "h.3"), where="not-first"
    )  # other tokens need the FFN
    chain = [("z.0", "h.1"), ("h.1", "z.1"), ("z.1", "h.2")]
    for given in ([some, submodule_part("ffn", 1)], [*chain, submodule_part("ffn", 2)]):
        maps = [random_map(model, *each) if each in chain else each for each in given]
        with patched(model, [replacement(each) if isinstance(each, Part) else each for each in maps]):
            pass


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("h.-1", "h.1", "h.3 -> h.1 runs backwards"),
        ("h.2", "blocks.1.attn.hook_z", "runs backwards"),
        ("ffn_out.1", "mid.1", "runs backwards"),
        ("z.1", "blocks.1.attn.o.hook_in", "ends where it starts"),
        ("pattern.1", "h.3", r"carries a tensor"),
        ("z.1", "attn_scores.2", r"carries a tensor"),
        ("z.1", "result.2", "does not fire"),
        ("z.1", "blocks.2.hook_nothing", "no hook 'blocks.2.hook_nothing'. The nearest is"),
        ("z.3", "h.3", "Layer 3 .* is out of range"),
    ],
)
def test_sites_that_cannot_be_patched_are_refused(source, target, message, small_model):
    model = small_model("gpt2")
    before = state(model)
    given = Replacement(lambda h: h, Site.parse(source), Site.parse(target))
    with pytest.raises(InputError, match=message):
        patched(model, [given]).__enter__()
    assert_as_before(model, before)


@pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale")
def test_every_later_hook_is_a_target_and_one_without_effect_is_refused(small_model, monkeypatch):
    model = small_model("gpt2")
    layout, tokens, n = ModelLayout.from_model(model), torch.tensor([SENTENCES[0]]), 0
    plain = model(tokens)
    for hook in {hook.name: hook for hook in layout.hooks.values() if hook.shape}.values():
        if hook.order <= layout.order("h.2"):
            continue
        width = layout.width(Site.parse(hook.name))
        noise = torch.randn(D_MODEL, width, generator=torch.Generator().manual_seed(1))
        given = Replacement(lambda h, noise=noise: h @ noise, Site("h", 2), Site.parse(hook.name))
        if hook.name == layout.hook(Site("h", 3)):
            continue
        with patched(model, [given]):
            assert not torch.equal(model(tokens), plain)
        n += 1
    assert n > 10
    monkeypatch.setattr(replacements_module, "_EFFECTIVE", WeakKeyDictionary())
    monkeypatch.setattr(type(model), "hooks", lambda self, fwd_hooks: nullcontext())
    with pytest.raises(InputError, match="would change nothing"):
        patched(model, [given]).__enter__()


def test_positions_past_a_sentence_are_refused_when_it_runs(small_model):
    model = small_model("gpt2")
    for where, message in (((9, 4, 0, 0), "at most 3 in sentence 1, got 4"), ((0, 0), "a row for each of 4")):
        given = replacement(submodule_part("ffn", 1, where=where))
        with patched(model, [given]), pytest.raises(InputError, match=message):
            vectors(model)


def test_maps_of_another_model_or_precision_are_refused(small_model, model_folder):
    model = small_model("gptj")
    half = matlens.load(str(model_folder("gptj")), device="cpu", dtype=torch.bfloat16)
    native = linear(jump_part(0, 1), provenance=Provenance(ModelIdentity.from_model(model)))
    for other in (small_model("gpt2"), half):
        foreign = linear(jump_part(1, 2), provenance=Provenance(ModelIdentity.from_model(other)))
        for given in ([foreign], [native, foreign], [foreign, native]):
            models = [ModelIdentity.from_model(each).fingerprint for each in (other, model)]
            with pytest.raises(InputError, match=f"Their models are .*{models[0]}, and .*{models[1]}"):
                patched(model, given).__enter__()
    with pytest.raises(InputError, match="unknown provenance"):
        matlens.patched(model, [linear(jump_part(0, 1))]).__enter__()
    bloom = small_model("bloom")  # of which only the residual stream is known
    with pytest.raises(InputError, match=r"no site 'attn_in'.*stream-only"):
        patched(bloom, [linear(submodule_part("attn", 0))]).__enter__()
    folded = matlens.load(str(model_folder("gpt2")), device="cpu")
    folded.enable_compatibility_mode()
    with pytest.raises(InputError, match="compatibility mode"):
        patched(folded, [linear(jump_part(0, 1))]).__enter__()


@pytest.mark.refused
@pytest.mark.parametrize("ends", [("h.0", "h.1"), ("ffn_in.0", "ffn_out.0")])
def test_weights_and_outputs_that_are_no_vectors_are_refused(ends, small_model):
    model = small_model("llama")
    before = state(model)
    nan = torch.eye(D_MODEL).index_fill(0, torch.tensor([3]), torch.nan)
    infinite = torch.full((D_MODEL,), -torch.inf)
    examples = matlens.make_token_examples(model, SENTENCES[:2])
    for bad in (LinearMap(nan, None, *ends), LinearMap(torch.eye(D_MODEL), infinite, *ends)):
        with pytest.raises(InputError, match="not finite"):
            patched(model, [bad]).__enter__()
        with pytest.raises(InputError, match="not finite"):
            run_variants(model, examples, {"bad": Variant(0, [Replacement.from_map(bad)])}, progress=False)
    for function in (lambda h: None, lambda h: h[..., :3], lambda h: h.flatten()):
        given = Replacement(function, *map(Site.parse, ends))
        with pytest.raises(InputError, match="The function of"), patched(model, [given]):
            vectors(model)
    assert_as_before(model, before)


@pytest.mark.parametrize("heads", [(), (4,), (-1,), (1, 1)])
def test_heads_are_those_of_the_target(heads, small_model):
    model, linear_map = small_model("gpt2"), random_map(small_model("gpt2"), "h.0", "z.1")
    with pytest.raises(InputError, match="heads must be different integers from 0 to 3"):
        patched(model, [Replacement.from_map(linear_map, heads=heads)]).__enter__()
    with pytest.raises(InputError, match="heads must be None for"):
        patched(model, [Replacement.from_map(random_map(model, "h.0", "ffn_out.1"), heads=(1,))]).__enter__()
