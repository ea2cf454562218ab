"""How a model is wired is found by sums, and what sites it has follows from that."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from conftest import (
    APART,
    D_MODEL,
    KINDS,
    LAYERS,
    N_LAYERS,
    SITE_MODULES,
    WIRING_OF,
    WIRINGS,
    assert_near,
    load_plain,
    plain_vectors,
    save_model,
)
from patched_models import hook_counts
from torch import Tensor

import matlens
from matlens import InputError, Site
from matlens.models import layout
from matlens.models.layout import ModelLayout

TOKENS = torch.tensor([[7, 3, 41, 12, 12, 59, 30, 22, 8, 17, 2, 50]])


def vectors(model: Any, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    """What matlens' own hooks carry at every site of the model."""
    layout, found = ModelLayout.from_model(model), dict[str, Tensor]()

    def keep(site: Site) -> tuple[str, Any]:
        return layout.hook(site), lambda value, hook: found.update({str(site): value.clone()})

    with torch.inference_mode(), model.hooks(fwd_hooks=[keep(site) for site in layout.sites]):
        model(tokens, return_type=None)
    return found


@pytest.fixture
def forgotten(monkeypatch):
    """Let `ModelLayout.from_model` forget the models that it has seen, for this test."""
    monkeypatch.setattr(layout, "_KNOWN", WeakKeyDictionary())


@pytest.mark.parametrize("name", [*WIRINGS, *KINDS])
def test_wirings_are_found_and_every_site_is_the_end_of_its_module(name, small_model, plain_model):
    found = ModelLayout.from_model(small_model(name))
    assert found.wiring.name == (WIRING_OF | KINDS)[name]
    assert set(found.kinds) == {*SITE_MODULES[name], *APART.get(name, ())}
    assert (found.n_layers, found.d_model) == (N_LAYERS, D_MODEL)
    assert [str(site) for site in found.stream] == [f"h.{i}" for i in range(N_LAYERS + 1)]
    ours, theirs = vectors(small_model(name)), plain_vectors(name, plain_model(name), TOKENS)
    apart = {f"{kind}.{layer}" for kind in APART.get(name, ()) for layer in range(N_LAYERS)}
    assert set(ours) == set(theirs) - {"logits"} | apart
    for site in set(ours) - apart:
        assert_near(ours[site], theirs[site])


def test_blocks_whose_parts_add_the_stream_themselves_have_only_the_stream(tmp_path):
    """What BLOOM's attention and FFN return has the stream in it already, so no known sum holds."""
    model = matlens.load(str(save_model("bloom", tmp_path)), device="cpu")
    found = ModelLayout.from_model(model)
    assert (found.wiring.name, found.kinds, found.sites) == ("stream-only", (), found.stream)
    theirs = plain_vectors("bloom", load_plain("bloom", tmp_path), TOKENS)
    for site, value in vectors(model).items():
        assert_near(value, theirs[site])
    with pytest.raises(InputError, match=r"no site 'attn_out' .*stream-only.*it has h\."):
        found.resolve("attn_out.1")


@pytest.mark.parametrize(("name", "layer"), [("gpt2", 2), ("bert", 1), ("neox", 0)])
def test_one_block_that_does_not_add_up_is_enough_to_trust_only_the_stream(
    name, layer, small_model, forgotten
):
    model = small_model(name)
    block = model.original_model.get_submodule(LAYERS[name][0])[layer]

    def shifted(module: Any, args: Any, output: Any) -> Any:
        # One coordinate of one token, by far less than any sub-module adds.
        whole = output[0] if isinstance(output, tuple) else output
        moved = whole.clone()
        moved[0, 5, 3] += 1e-3 * whole.abs().max()
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    inner = getattr(block, "original_component", block)
    handle = inner.register_forward_hook(shifted)
    try:
        assert ModelLayout.from_model(model).wiring.name == "stream-only"
    finally:
        handle.remove()


# Hooks by their names


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_hook_that_carries_a_site_is_that_site(name, small_model):
    """By the hook point itself, whatever TransformerLens calls it in this architecture."""
    model = small_model(name)
    known = ModelLayout.from_model(model)
    points = model.hook_dict
    carried = {id(points[known.hook(site)]) for site in known.sites}
    named = 0
    for hook, point in points.items():
        try:
            site = known.resolve(hook)
        except InputError as error:
            assert "carries a tensor" in str(error) or "does not fire" in str(error)  # noqa: PT017
            continue
        if hook.endswith(("hook_in", "hook_resid_pre")) and site.kind == "h" and site.layer:
            assert (
                known.hook(site) == f"blocks.{site.layer - 1}.hook_out"
            )  # the same vectors, a moment before
            continue
        assert points[known.hook(site)] is point
        assert site.is_hook == (id(point) not in carried)
        assert known.resolve(str(site)) == site
        assert hook in known.names(site)
        named += 1
    assert named > 80


def test_hooks_have_the_width_and_the_order_of_a_pass(small_model):
    """Against a pass of its own, over other tokens."""
    model = small_model("llama")
    known = ModelLayout.from_model(model)
    shapes: dict[str, tuple[int, ...]] = {}  # in the order of the pass

    def keep(value: Any, hook: Any) -> None:
        assert hook.name not in shapes
        shapes[hook.name] = tuple(getattr(value, "shape", ()))

    usable = [name for name, hook in known.hooks.items() if hook.shape]
    with model.hooks(fwd_hooks=[(hook, keep) for hook in dict.fromkeys(map(known.hook, usable))]):
        model(TOKENS.repeat(2, 1))
    assert sorted(shapes, key=lambda hook: known.hooks[hook].order) == list(shapes)
    assert len(shapes) > 60
    for hook, shape in shapes.items():
        assert shape[:2] == (2, TOKENS.shape[1])
        assert known.width(hook) == torch.Size(shape[2:]).numel()


def test_layers_are_counted_where_the_depth_is_known():
    resolved = {"h.-1": "h.3", -4: "h.0", "mid.-3": "mid.0", Site("h", -2): "h.2", 3: "h.3"}
    for given, expected in resolved.items():
        assert str(Site.parse(given, 3)) == expected
    for given, last in ((4, "h.3"), (-5, "h.3"), ("attn_out.3", "attn_out.2"), (Site("mid", -4), "mid.2")):
        with pytest.raises(InputError, match=rf"out of range: this model has \w+\.0 to {last}\."):
            Site.parse(given, 3)


# Names of TransformerLens' hooks

HOOKS = {
    "z.2": "blocks.2.attn.hook_z", "z.-1": "blocks.2.attn.hook_z",
    "blocks.-1.attn.hook_z": "blocks.2.attn.hook_z", "resid_mid.2": "blocks.2.hook_resid_mid",
    "blocks.0.ln1.hook_scale": "blocks.0.ln1.hook_scale", "hook_embed": "hook_embed", "resid_pre.0": "h.0",
    "blocks.1.hook_resid_post": "h.2", "blocks.1.hook_in": "h.1", "blocks.1.hook_out": "h.2",
    "resid_post.-1": "h.3", "resid_post.-3": "h.1", "resid_pre.-1": "h.2", "blocks.-3.hook_resid_pre": "h.0",
    "attn_out.1": "attn_out.1",
}  # fmt: skip


def test_hooks_are_read_as_transformer_lens_writes_them():
    for text, expected in HOOKS.items():
        site = Site.parse(text, 3)
        assert str(site) == expected
        assert site == Site.parse(expected, 3) == Site.parse(site, 3) == Site.parse(Site.parse(text), 3)
        assert site.is_hook == ("hook" in expected)
    for text in ("resid_pre.3", "resid_post.3", "z.3", "resid_post.-4", "blocks.3.hook_in"):
        with pytest.raises(InputError, match=r"out of range: .* blocks\.0\..*hook_\w+ to blocks\.2"):
            Site.parse(text, 3)


def test_an_ffn_that_changes_what_its_output_layer_gives_has_no_coefficients(small_model, forgotten):
    """The rest of the block adds up all the same, so its other sites stay."""
    model = small_model("llama")
    kinds = set(ModelLayout.from_model(model).kinds)
    layout._KNOWN.clear()
    handle = model.blocks[1].mlp.original_component.register_forward_hook(lambda _, __, out: out * 1.01)
    try:
        found = ModelLayout.from_model(model)
    finally:
        handle.remove()
    assert found.wiring.name == WIRING_OF["llama"]
    assert (set(found.kinds), found.d_mlp) == (kinds - {"ffn_post"}, 0)


def test_hooks_are_gone_when_the_run_fails(small_model, forgotten):
    model = small_model("gpt2")
    model(TOKENS, return_type=None)
    before = hook_counts(model)
    handle = model.original_model.transformer.ln_f.register_forward_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            ModelLayout.from_model(model)
    finally:
        handle.remove()
    assert hook_counts(model) == before
    assert ModelLayout.from_model(model).wiring.name == "pre-norm"  # a failure is not remembered
