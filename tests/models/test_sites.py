"""Sites are read from what people write, and say what is wrong with it."""

from __future__ import annotations

import pytest

from matlens import InputError, Site


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
