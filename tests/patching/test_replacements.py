"""Which parts are replaced between any two sites, by which functions, and which replacements are refused."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near, plain_vectors
from handpatched import Part, hand_vectors, jump_part, part, submodule_part, submodules
from patched_models import (
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
from torch import nn

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
from matlens.patching.submodules import fit_submodules, submodule_pairs
from matlens.patching.variants import Variant

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


# Functions of one's own


def as_linear_layer(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return layer


FORMS = {
    "a map": lambda made: LinearMap(made.weight, made.bias, made.source, made.target),
    "a linear layer": lambda made: as_linear_layer(made.weight, made.bias),
    "a sequence of modules": lambda made: nn.Sequential(as_linear_layer(made.weight, made.bias)),
    "a function": lambda made: made.apply,
    "a matrix": lambda made: made.weight,
}


@pytest.mark.parametrize("ends", [("h.1", "h.3"), ("h.2", "h.2"), ("attn_in.1", "attn_out.1")])
@pytest.mark.parametrize("form", FORMS)
def test_maps_without_provenance_replace_as_by_hand(form, ends, small_model, plain_model):
    made = part(*ends, bias=form != "a matrix", where="not-first")
    given = Replacement(FORMS[form](made), *ends, where="not-first")
    with patched(small_model("gpt2"), [given]):
        assert_same(
            vectors(small_model("gpt2")), hand_vectors("gpt2", plain_model("gpt2"), [made], SENTENCES)
        )


@pytest.mark.parametrize("form", ["a map", "a linear layer", "a matrix"])
def test_maps_without_provenance_are_mapped_in_float32(form, model_folder):
    model = matlens.load(str(model_folder("gpt2")), device="cpu", dtype=torch.bfloat16)
    made, seen = part("h.1", "h.2", bias=form != "a matrix"), []
    read = ("blocks.0.hook_out", lambda value, hook: seen.append(value.clone()))
    written = ("blocks.1.hook_out", lambda value, hook: seen.append(value.clone()))
    given = Replacement(FORMS[form](made), 1, 2)
    with torch.inference_mode(), patched(model, [given]), model.hooks(fwd_hooks=[read, written]):
        model(torch.tensor([SENTENCES[0]]))
    entered, left = seen
    assert torch.equal(left, made.apply(entered.float()).bfloat16())


@pytest.mark.parametrize("where", ["all", "not-first", "last", (2, 0, 0, 1)])
@pytest.mark.parametrize("site", ["h.0", "h.1", "h.3", "attn_out.1", "ffn_in.2", "ffn_post.1", "z.1"])
def test_a_direction_is_added_at_any_site_and_tokens(site, where, small_model, plain_model):
    model, layout = small_model("gpt2"), ModelLayout.from_model(small_model("gpt2"))
    width = layout.width(site)
    direction = torch.randn(width, generator=torch.Generator().manual_seed(3))
    at = where if isinstance(where, str) else torch.tensor(where)
    added = Part(site, site, torch.eye(width), direction, where)
    by_hand = hand_vectors("gpt2", plain_model("gpt2"), [added], SENTENCES)
    with patched(model, [Replacement(lambda h: h + direction, site, site, where=at)]):
        assert_same(vectors(model), by_hand)


def test_a_direction_is_added_to_single_heads(small_model):
    model, seen = small_model("gpt2"), []
    hook = "blocks.1.attn.hook_z"
    direction = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(3))
    read = (hook, lambda value, hook: seen.append(value.flatten(2).clone()))
    tokens = torch.tensor([SENTENCES[0]])
    with torch.inference_mode(), model.hooks(fwd_hooks=[read]):
        model(tokens)
        with patched(model, [Replacement(lambda z: z + direction, hook, hook, heads=[1, 3])]):
            model.reset_hooks()
            with model.hooks(fwd_hooks=[read]):
                model(tokens)
    heads = torch.tensor([0.0, 1, 0, 1]).repeat_interleave(D_MODEL // 4)
    torch.testing.assert_close(seen[1], seen[0] + heads * direction)


@pytest.mark.parametrize("form", ["a map", "a linear layer", "a matrix"])
def test_maps_of_other_shapes_than_their_sites_are_refused(form, small_model):
    for ends, shape in (
        (("h.1", "h.2"), (D_MODEL, D_MODEL + 1)), (("h.1", "h.2"), (D_MODEL - 1, D_MODEL)),
        (("ffn_post.1", "h.2"), (D_MODEL, D_MODEL)),
    ):  # fmt: skip
        given = Replacement(FORMS[form](Part(*ends, torch.zeros(shape), torch.zeros(shape[0]))), *ends)
        with pytest.raises(InputError, match="must have the shape"):
            patched(small_model("gpt2"), [given]).__enter__()
    with pytest.raises(InputError):
        Replacement(torch.zeros(D_MODEL), "h.1", "h.2")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_functions_that_work_in_place_change_only_their_result(name, small_model):
    model = small_model(name)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    sites = [("ffn_in", "ffn_out", 1, 1), ("attn_in", "attn_out", 1, 1), ("h", "h", 0, 1), ("z", "h", 0, 2)]
    for (source, target, first, last), where in itertools.product(sites, ("all", "last")):
        found = []
        for function in (doubled, lambda x: 2 * x):
            given = Replacement(function, Site(source, first), Site(target, last), where)
            with patched(model, [given]):
                found.append(vectors(model))
        assert_same(*found, 0)


@pytest.mark.parametrize("where", ["all", "last"])
def test_replacements_that_overflow_raise(where, small_model):
    model, tokens = small_model("llama"), torch.tensor([[7, 3, 41]])
    for scale in (1e30, 1e60):
        wide = torch.tensor(scale, dtype=torch.float64)
        given = Replacement(lambda x, wide=wide: x * wide, Site("ffn_in", 1), Site("ffn_out", 1), where)
        with patched(model, [given]), pytest.raises(InputError, match="overflow"):
            model(tokens)
        big = linear(jump_part(1, 2))
        big = Replacement.from_map(dataclasses.replace(big, weight=big.weight.double() * scale), where=where)
        with pytest.raises(InputError), patched(model, [big]):
            model(tokens)


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


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("h.-1", "h.1", "h.3 -> h.1 runs backwards"),
        ("h.2", "blocks.1.attn.hook_z", "runs backwards"),
        ("ffn_out.1", "mid.1", "runs backwards"),
        ("mid.1", "mid.1", "runs backwards"),  # written at the output of attention
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
            with pytest.raises(InputError):
                patched(model, given).__enter__()
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
    maps = [LinearMap(nan, None, *ends), LinearMap(torch.eye(D_MODEL), infinite, *ends)]
    layer = as_linear_layer(torch.eye(D_MODEL), infinite)
    for bad in (*map(Replacement.from_map, maps), Replacement(nan, *ends), Replacement(layer, *ends)):
        with pytest.raises(InputError, match="not finite"):
            patched(model, [bad]).__enter__()
        with pytest.raises(InputError, match="not finite"):
            run_variants(model, examples, {"bad": Variant(0, [bad])}, progress=False)
    for function in (lambda h: None, lambda h: h[..., :3], lambda h: h.flatten()):
        given = Replacement(function, *map(Site.parse, ends))
        with pytest.raises(InputError, match="The function of"), patched(model, [given]):
            vectors(model)
    assert_as_before(model, before)


@pytest.mark.parametrize("heads", [(), (4,), (-1,), (1, 1)])
def test_heads_are_those_of_the_target(heads, small_model):
    model = small_model("gpt2")
    with pytest.raises(InputError, match="heads must be different integers from 0 to 3"):
        patched(model, [Replacement.from_map(linear(part("h.0", "z.1")), heads=heads)]).__enter__()
    with pytest.raises(InputError, match="heads must be None for"):
        patched(model, [Replacement.from_map(linear(part("h.0", "ffn_out.1")), heads=(1,))]).__enter__()


def test_a_target_without_effect_is_refused(small_model, monkeypatch):
    model = small_model("gpt2")
    monkeypatch.setattr(replacements_module, "_EFFECTIVE", WeakKeyDictionary())
    monkeypatch.setattr(type(model), "hooks", lambda self, fwd_hooks: nullcontext())
    with pytest.raises(InputError, match="would change nothing"):
        patched(model, [linear(part("h.0", "z.1"))]).__enter__()


@pytest.mark.parametrize("options", [{}, {"rows": True}, {"intercept": True}, {"ridge": 9.0}], ids=str)
def test_maps_of_sub_modules_are_least_squares_on_plain_vectors(options, small_model, plain_model, sentences):
    assert submodule_pairs(ModelLayout.from_model(small_model("olmo2")), ["ln1", "ffn"])[:2] == [
        ("ln1_post_in.0", "ln1_post_out.0"), ("ffn_in.0", "ffn_out.0"),
    ]  # fmt: skip
    model, plain = small_model("llama"), plain_model("llama")
    pairs = submodule_pairs(ModelLayout.from_model(model))
    assert {source[:-5] for source, _ in pairs} == {*submodules("llama")}
    samples = matlens.collect(
        model, matlens.make_examples(model, sentences), [*{site for pair in pairs for site in pair}],
        positions="all", progress=False,
    )  # fmt: skip
    texts = map(torch.from_numpy, np.split(samples.examples.tokens, samples.examples.offsets[1:-1]))
    seen = [plain_vectors("llama", plain, text) for text in texts]
    later = torch.from_numpy(samples.places > 0)
    given = options | ({"rows": later} if "rows" in options else {})
    for (source, target), fitted in zip(
        pairs, fit_submodules(samples, pairs, progress=False, **given), strict=True
    ):
        x, y = (torch.cat([of[site][0] for of in seen]).double() for site in (source, target))
        if "rows" in options:
            x, y = x[later], y[later]
        if "intercept" in options:
            x = torch.cat([x, torch.ones(len(x), 1)], 1)
        if "ridge" in options:
            x, y = torch.cat([x, 3 * torch.eye(D_MODEL)]), torch.cat([y, torch.zeros(D_MODEL, D_MODEL)])
        solution = torch.linalg.lstsq(x, y, driver="gelsd").solution.T
        assert (fitted.source, fitted.target) == (source, target)
        assert_near(fitted.weight, solution[:, :D_MODEL], 1e-4)
        assert (fitted.bias is None) == ("intercept" not in options)
        if fitted.bias is not None:
            assert_near(fitted.bias, solution[:, -1], 1e-4)


def test_blocks_whose_output_no_hook_sees_are_refused(model_folder, monkeypatch):
    """Those of OpenAI's first GPT as a bridge runs them: they return lists."""
    monkeypatch.setattr("matlens.models.families.gpt1._BLOCKS", "no module")
    with pytest.raises(InputError, match=r"blocks\.0\.hook_out"):
        matlens.load(str(model_folder("gpt1")), device="cpu")
