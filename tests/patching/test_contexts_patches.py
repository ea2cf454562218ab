"""Any site put in the place of a later one: against plain models patched by hand, at all or chosen tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, D_MODEL, SITE_MODULES, WIRINGS, assert_near
from handpatched import Part, hand_vectors, jump_part, part, run, submodule_part
from patched_models import (
    LENGTHS,
    SENTENCES,
    Models,
    assert_as_before,
    assert_same,
    patched,
    replacement,
    state,
    vectors,
)
from torch import Tensor

import matlens
from matlens import InputError, LinearMap, MapSet, Site
from matlens.models.layout import ModelLayout
from matlens.patching.replacements import Replacement, jump

WHERE: dict[str, Any] = {
    "all": "all",
    "not-first": "not-first",
    "one each": (3, 0, 0, 5),
    "marks": (tuple(token % 3 == 1 for token in range(max(LENGTHS))),) * len(LENGTHS),
}


def hand_logits(name: str, plain: Any, linear: LinearMap, where: Any = "all") -> list[Tensor]:
    by_hand = Part(linear.source, linear.target, linear.weight, linear.bias, where)
    return [vectors["logits"] for vectors in hand_vectors(name, plain, [by_hand], SENTENCES)]


def random_map(model: Any, source: str, target: str, *, bias: bool = True) -> LinearMap:
    layout, generator = ModelLayout.from_model(model), torch.Generator().manual_seed(3)
    d_in, d_out = layout.width(source), layout.width(target)
    weight = torch.randn(d_out, d_in, generator=generator) / d_in**0.5
    return LinearMap(weight, torch.randn(d_out, generator=generator) if bias else None, source, target)


def state_after_a_pass(model: Any) -> Any:
    vectors(model)  # the first leaves its marks on the bridge
    return state(model)


def pairs_of(name: str) -> list[tuple[str, str]]:
    pairs = [("z.0", "h.2"), ("z.1", "h.2"), ("h.0", "attn_out.1"), ("attn_in.0", "ffn_out.2")]
    pairs += [("ffn_post.0", "z.1"), ("z.0", "ffn_in.2"), ("h.1", "h.3")]
    later = "ln2_in.2" if "ln2_in" in SITE_MODULES[name] else "attn_in.2"
    return pairs + ([("z.0", "mid.1"), ("mid.0", later)] if "mid" in SITE_MODULES[name] else [])


@pytest.mark.parametrize("name", WIRINGS)
def test_a_patch_equals_a_plain_model_patched_by_hand(
    name: str, small_model: Models, plain_model: Models
) -> None:
    model = small_model(name)
    before = state_after_a_pass(model)
    unpatched = [vectors["logits"] for vectors in hand_vectors(name, plain_model(name), [], SENTENCES)]
    for number, (source, target) in enumerate(pairs_of(name)):
        linear = random_map(model, source, target)
        for where in list(WHERE.values())[number % 2 :: 2]:
            expected = hand_logits(name, plain_model(name), linear, where)
            given = replacement(Part(source, target, linear.weight, linear.bias, where))
            for side in ("right", "left"):
                with patched(model, [given]):
                    ours = vectors(model, side=side)
                for our, their, plain in zip(ours, expected, unpatched, strict=True):
                    assert_near(our["logits"], their)
                    if isinstance(where, str) and len(their) > 1:
                        assert float((their - plain).abs().max()) > 1e-3 * float(their.abs().max())
    assert_as_before(model, before)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_map_from_the_heads_is_collected_fitted_and_patched(
    name: str, small_model: Models, plain_model: Models, sentences: matlens.data.Corpus
) -> None:
    """By any name of the hook; the vectors are the plain model's, and so is the patched pass."""
    model, plain = small_model(name), plain_model(name)
    examples = matlens.make_examples(model, sentences)
    samples = matlens.collect(
        model, examples, ["blocks.0.attn.hook_z", "h.2"], positions="all", progress=False
    )
    assert list(samples) == ["blocks.0.attn.hook_z", "h.2"]
    sentences_of = [examples.tokens[a:b] for a, b in itertools.pairwise(examples.offsets)]
    alone = [run(name, plain, [], sentence.tolist())["z.0"] for sentence in sentences_of]
    assert_near(samples["z.0"], torch.cat(alone))
    maps = MapSet.fit(samples, pairs=[("z.0", 2)], intercept=True, progress=False)
    z, h = torch.cat(alone).double(), samples[2].double()
    padded = torch.cat([z, torch.ones(len(z), 1, dtype=torch.float64)], 1)
    solution = torch.linalg.lstsq(padded, h, driver="gelsd").solution
    linear = maps["blocks.0.attn.o.hook_in", "h.-2"]
    assert linear is maps["blocks.0.attn.hook_z", 2]
    assert_near(linear.weight, solution[:-1].T, 1e-3)
    expected = hand_logits(name, plain, replace(linear, source="z.0"))
    with patched(model, maps.values()):
        for ours, theirs in zip(vectors(model), expected, strict=True):
            assert_near(ours["logits"], theirs, 1e-4)  # of fitted maps rounding grows


def test_maps_of_hooks_are_kept_in_folders(small_model: Models, sentences: Any, tmp_path: Any) -> None:
    model = small_model("gemma2")
    examples = matlens.make_examples(model, sentences)
    sites = ["z.1", "blocks.1.hook_attn_out", "mlp_out.-1", "hook_embed"]
    matlens.collect(model, examples, [*sites, 3], folder=tmp_path / "x", progress=False)
    samples = matlens.activations.Activations.load(tmp_path / "x")
    assert list(samples) == ["blocks.1.attn.hook_z", "ln1_post_out.1", "ln2_post_out.2", "hook_embed", "h.3"]
    # A finished folder is opened by other names of its hooks.
    again = matlens.collect(
        model, examples, ["blocks.1.attn.o.hook_in"], folder=tmp_path / "x", progress=False
    )
    assert torch.equal(again["z.1"], samples["blocks.1.attn.hook_z"])
    MapSet.fit(samples, pairs=[(site, "resid_post.-1") for site in sites], progress=False).save(
        tmp_path / "m"
    )
    maps = MapSet.load(tmp_path / "m")
    for site, column in zip(sites, samples, strict=False):
        assert (site, -1) in maps
        assert (maps[site, 3].source, maps[site, 3].target) == (column, "h.3")
    with pytest.raises(KeyError, match=r"There is no map blocks\.0\.attn\.hook_z -> h\.3"):
        maps["z.0", 3]


def test_maps_made_by_hand_are_found_by_all_names_of_their_sites(small_model: Models, tmp_path: Any) -> None:
    model = small_model("gpt2")
    linear = random_map(model, "z.0", "resid_post.1")
    maps = MapSet([linear])
    assert list(maps) == [("blocks.0.attn.hook_z", "h.2")]
    assert torch.equal(maps["blocks.0.attn.hook_z", 2].weight, linear.weight)
    maps.save(tmp_path / "maps")
    assert torch.equal(MapSet.load(tmp_path / "maps")["z.0", "h.2"].weight, linear.weight)
    following = random_map(model, "h.2", "h.3")
    assert linear.then(following).target == "h.3"


def test_a_place_of_the_stream_is_mapped_at_chosen_tokens(small_model: Models, plain_model: Models) -> None:
    model, where = small_model("llama"), (3, 0, 0, 5)
    linear = random_map(model, "h.1", "h.1")
    expected = hand_logits("llama", plain_model("llama"), linear, where)
    with patched(model, [Replacement.from_map(linear, where=torch.tensor(where))]):
        for ours, theirs in zip(vectors(model), expected, strict=True):
            assert_near(ours["logits"], theirs)


def test_what_one_patch_writes_the_next_reads(small_model: Models) -> None:
    """In whichever order they are given: z.0 -> h.1, and h.1 -> attn_out.2 of what stands there then."""
    model = small_model("gpt2")
    first, second = random_map(model, "z.0", "h.1"), random_map(model, "h.1", "attn_out.2")
    composed = first.then(second)
    with patched(model, [first, LinearMap(composed.weight, composed.bias, "z.0", "attn_out.2")]):
        expected = vectors(model)
    for given in ([first, second], [second, first]):
        with patched(model, given):
            for ours, theirs in zip(vectors(model), expected, strict=True):
                assert_near(ours["logits"], theirs["logits"])


def test_patches_hold_while_a_model_writes(small_model: Models) -> None:
    """With a cache each pass has one token; the tokens written are those without a cache."""
    model = small_model("llama")
    tokens = torch.tensor([SENTENCES[0], SENTENCES[0][::-1]])
    with patched(model, [random_map(model, "z.0", "h.2")]):
        written = [
            model.generate(
                tokens, max_new_tokens=6, do_sample=False, use_past_kv_cache=cached, verbose=False,
                stop_at_eos=False,
            )
            for cached in (True, False)
        ]  # fmt: skip
    assert torch.equal(*written)
    assert written[0].shape[1] == tokens.shape[1] + 6


def test_hooks_are_gone_after_an_exception_and_nothing_old_is_used(small_model: Models) -> None:
    model = small_model("gpt2")
    h = torch.zeros(1, len(SENTENCES[0]), D_MODEL)
    model(h, start_at_layer=1)
    before = state_after_a_pass(model)
    linear = random_map(model, "z.0", "attn_out.2")

    class Failure(Exception):
        pass

    def fail(value: Tensor, hook: Any) -> None:
        raise Failure

    tokens = torch.tensor([SENTENCES[0]])
    with patched(model, [linear]):
        with pytest.raises(Failure), model.hooks(fwd_hooks=[("blocks.1.hook_in", fail)]):
            model(tokens)  # the source has fired, the target not
        with pytest.raises(
            InputError, match=r"came to attn_out\.2 and not to blocks\.0\.attn\.hook_z before"
        ):
            model(h, start_at_layer=1)
    with pytest.raises(Failure), patched(model, [linear]):
        raise Failure
    assert_as_before(model, before)


REFUSED: list[tuple[str, str, str]] = [
    ("h.2", "blocks.1.attn.hook_z", "runs backwards"),
    ("mlp_out.1", "z.1", "runs backwards"),
    ("attn_out.1", "attn_in.1", "runs backwards"),
    ("ffn_out.1", "mid.1", "runs backwards"),
    ("unembed.hook_out", "h.3", "runs backwards"),
    ("z.1", "z.1", "ends where it starts"),
    ("z.1", "blocks.1.attn.o.hook_in", "ends where it starts"),
    ("pattern.1", "h.3", r"carries a tensor \[batch, 4, token, token\]"),
    ("z.1", "attn_scores.2", r"carries a tensor \[batch, 4, token, token\]"),
    ("z.1", "result.2", "does not fire"),
    ("z.1", "blocks.2.hook_nothing", "no hook 'blocks.2.hook_nothing'. The nearest is"),
    ("z.3", "h.3", "Layer 3 .* is out of range"),
]


@pytest.mark.parametrize(("source", "target", "message"), REFUSED)
def test_what_cannot_be_patched_is_refused(
    source: str, target: str, message: str, small_model: Models
) -> None:
    model = small_model("gpt2")
    before = state_after_a_pass(model)
    given = Replacement(lambda h: h, Site.read(source), Site.read(target))
    with pytest.raises(InputError, match=message), patched(model, [given]):
        pytest.fail("not refused")
    assert_as_before(model, before)


@pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale")
def test_a_target_that_nothing_reads_is_refused(small_model: Models) -> None:
    """Hooks that only show what was computed elsewhere would take a patch and leave the pass as it is."""
    for name in ("gpt2", "llama"):
        model = small_model(name)
        layout = ModelLayout.from_model(model)
        tokens = torch.tensor([SENTENCES[0]])
        plain = model(tokens)
        accepted = 0
        for hook in {hook.name: hook for hook in layout.hooks.values() if hook.shape}.values():
            if hook.order <= layout.order("h.1"):
                continue
            target = Site.read(hook.name)
            width = layout.width(target)
            noise = torch.randn(D_MODEL, width, generator=torch.Generator().manual_seed(1))
            given = Replacement(lambda h, noise=noise: h @ noise, Site("h", 1), target)
            try:
                with patched(model, [given]):
                    assert not torch.equal(model(tokens), plain)
                accepted += 1
            except InputError as error:
                assert "would change nothing" in str(error) or "starts" in str(error)  # noqa: PT017
        assert accepted > 20


OVERLAPS: dict[str, tuple[Part, Part, str]] = {
    "the same target": (part("z.0", "h.2"), part("z.1", "h.2"), "h.2 is"),
    "a hook by two names": (part("h.0", "z.1"), part("h.1", "blocks.1.attn.o.hook_in"), "hook_z is"),
    "the target of a jump": (jump_part(0, 2), part("z.0", "h.2"), "h.2 is"),
    "a source inside a jump": (jump_part(0, 2), part("z.1", "h.3"), "which .* covers"),
    "a target inside a jump": (jump_part(1, 3), part("z.0", "attn_out.2"), "attn_out.2, which h.1 -> h.3"),
    "a jump under a patch": (jump_part(1, 2), part("z.0", "h.3"), "h.2, which .* -> h.3 covers"),
    "a part of a sub-module": (submodule_part("attn", 1), part("h.0", "z.1"), "hook_z, which attn_in.1 ->"),
    "a sub-module": (submodule_part("ffn", 1), part("h.0", "ffn_out.1"), "ffn_out.1 is"),
    "a sub-module under a patch": (part("z.0", "h.3"), submodule_part("ffn", 1), "ffn_out.1, which .*"),
    "the middle and attention": (part("z.0", "mid.1"), submodule_part("attn", 1), "attn_out.1 is"),
    "jumps that overlap": (jump_part(0, 2), jump_part(1, 3), "h.2, which .* covers"),
    "jumps one inside the other": (jump_part(0, 3), jump_part(1, 2), "h.2, which .* covers"),
    "the same jump": (jump_part(1, 3), jump_part(1, 3, 1), "h.3 is"),
    "a jump and a sub-module": (jump_part(0, 2), submodule_part("attn", 1), "attn_out.1, which .* covers"),
    "a sub-module and a jump": (submodule_part("ffn", 2), jump_part(0, 3), "ffn_out.2, which .* covers"),
    "a layer inside a jump": (jump_part(0, 3), jump_part(1, 1), "h.1, which .* covers"),
    "the same layer": (jump_part(1, 1), jump_part(1, 1, 1), "h.1 is"),
    "the same sub-module": (submodule_part("attn", 0), submodule_part("attn", 0, 1), "attn_out.0 is"),
    "the same at other tokens": (
        submodule_part("ffn", 1, where="not-first"), submodule_part("ffn", 1, where=(0, 0, 0, 0)),
        "ffn_out.1 is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERLAPS)
def test_replacements_that_overlap_are_refused(case: str, small_model: Models) -> None:
    """Together and in nested contexts; afterwards each may be put in."""
    model, (*given, message) = small_model("gpt2"), OVERLAPS[case]
    one, other = map(replacement, given)
    before = state_after_a_pass(model)
    with pytest.raises(InputError, match=f"overlaps another: .*{message}"), patched(model, [one, other]):
        pytest.fail("not refused")
    for first, second in ((one, other), (other, one)):
        with pytest.raises(InputError, match="overlaps another"), patched(model, [first, second]):
            pytest.fail("not refused")
        with patched(model, [first]):
            inside = vectors(model)
            with pytest.raises(InputError, match="overlaps another"), patched(model, [second]):
                pytest.fail("not refused")
            assert_same(vectors(model), inside, 0)
    assert_as_before(model, before)


def test_a_patch_inside_of_one_at_chosen_tokens(small_model: Models) -> None:
    """The other's tokens are those of four sentences, whatever is tried before the context is entered."""
    model = small_model("gemma3")
    outer = Replacement.from_map(random_map(model, "z.0", "h.1"), where=torch.tensor([1, 1, 0, 2]))
    inner = random_map(model, "z.1", "ffn_in.2")
    with patched(model, [outer, Replacement.from_map(inner)]):
        expected = vectors(model)
    with patched(model, [outer]), patched(model, [inner]):
        for ours, theirs in zip(vectors(model), expected, strict=True):
            assert_near(ours["logits"], theirs["logits"])


def test_neighbours_of_patches_do_not_overlap(small_model: Models) -> None:
    model = small_model("gpt2")
    beside = [
        random_map(model, "z.0", "h.1"),
        random_map(model, "h.1", "z.1"),
        random_map(model, "z.1", "mid.2"),
    ]
    others = [replacement(submodule_part("ffn", 2)), replacement(submodule_part("ln1", 0))]
    with patched(model, [*map(Replacement.from_map, beside), *others]):
        pass
    some = Replacement.from_map(random_map(model, "z.0", "h.3"), where="not-first")  # the rest is not lost
    with patched(model, [some, replacement(submodule_part("ffn", 1))]):
        pass


def test_layers_of_a_set_count_from_the_end_of_its_model(small_model: Models, sentences: Any) -> None:
    model = small_model("gpt2")
    samples = matlens.collect(model, matlens.make_examples(model, sentences), progress=False)
    maps = MapSet.fit(samples, progress=False)
    assert maps[0, -1] is maps["h.0", "h.3"] is maps[-4, "resid_post.-1"] is maps["resid_pre.0", 3]
    assert ((0, -1) in maps, (0, -2) in maps, (0, -9) in maps) == (True, False, False)
    (given,) = jump(maps, 0, -1)
    assert (given.source, given.target) == (Site("h", 0), Site("h", 3))
    with patched(model, jump(maps, -4, -1)), pytest.raises(InputError, match="overlaps another"):
        patched(model, jump(maps, 0, -1)).__enter__()
    with pytest.raises(InputError, match="out of range"):
        maps[0, -9]
    with pytest.raises(KeyError, match=r"no map h\.0 -> h\.9"):
        maps[0, 9]
    for wrong in (3, "h.3", (0,), (0, 1, 2), None):
        with pytest.raises(InputError, match=r"^A pair of sites must be"):
            maps[wrong]  # type: ignore[index]
    for wrong in (1.5, "a", None, True):
        with pytest.raises(InputError, match=r"^last must be"):
            jump(maps, 0, wrong)  # type: ignore[arg-type]
