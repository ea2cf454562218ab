"""Vision transformers against the plain model, hooked and patched by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import D_MODEL, N_LAYERS, assert_near, listening, make_sentences
from patched_models import patched
from torch import Tensor

import matlens
from matlens import InputError, LinearMap, Readout
from matlens.data import make_image_examples
from matlens.models.layout import ModelLayout

IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(5))
PLACES = 10  # nine patches behind the class token
# By hand, from the source of ViT.
MODULES = {
    "ln1": "layernorm_before", "attn": "attention", "ln2": "layernorm_after", "ffn": "mlp",
}  # fmt: skip
ENDS = {f"{kind}_{side}": (path, side) for kind, path in MODULES.items() for side in ("in", "out")} | {
    "mid": ("layernorm_after", "in"), "ffn_post": ("mlp.fc2", "in"),
}  # fmt: skip


@torch.inference_mode()
def plain_vectors(plain: Any) -> dict[str, Tensor]:
    """Vectors of every site, ``[image, place, d]``, and the logits."""
    with listening(plain.vit.layers, plain.vit.layernorm, ENDS) as seen:
        seen["logits"] = plain(IMAGES).logits
    return seen


def test_sites_are_the_plain_models_and_add_up(small_model, plain_model):
    model, theirs = small_model("vit"), plain_vectors(plain_model("vit"))
    known, examples = ModelLayout.from_model(model), make_image_examples(model, IMAGES)
    assert (known.wiring.name, known.d_mlp) == ("pre-norm", 48)
    assert {str(site) for site in known.sites} == set(theirs) - {"logits"}
    ours = matlens.collect(model, examples, known.sites, positions="all", progress=False)
    for site in known.sites:
        assert_near(ours[site], theirs[str(site)].flatten(0, 1))
    at_class = matlens.collect(model, examples, progress=False)
    assert_near(at_class["h.2"], theirs["h.2"][:, 0])
    patch = make_image_examples(model, IMAGES, position=-1)
    assert_near(matlens.collect(model, patch, batch_tokens=1, progress=False)["h.2"], theirs["h.2"][:, 9])
    assert patch.fingerprint != examples.fingerprint != make_image_examples(model, IMAGES.flip(0)).fingerprint
    assert_near(Readout(model).logits(theirs[f"h.{N_LAYERS}"][:, 0]), theirs["logits"], 2e-6)


@pytest.mark.parametrize(
    ("source", "target"),
    [("h.0", "h.2"), ("attn_in.1", "attn_out.1"), ("ffn_in.2", "ffn_out.2")],
)
def test_patched_passes_are_those_of_the_plain_model_patched_by_hand(
    source, target, small_model, plain_model
):
    model, plain = small_model("vit"), plain_model("vit")
    weight = torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(1)) / D_MODEL**0.5
    linear, given = LinearMap(weight, None, source, target), []
    (kind, first), (_, last) = source.split("."), target.split(".")
    blocks = plain.vit.layers
    entered = blocks[int(first)] if kind == "h" else blocks[int(first)].get_submodule(MODULES[kind[:-3]])
    left = blocks[int(last) - 1] if kind == "h" else entered

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        given[:] = [args[0] if args else kwargs["hidden_states"]]

    def leave(_: Any, __: Any, output: Any) -> Any:
        instead = linear(given[0])
        return (instead, *output[1:]) if isinstance(output, tuple) else instead

    handles = [entered.register_forward_pre_hook(enter, with_kwargs=True), left.register_forward_hook(leave)]
    try:
        expected = plain_vectors(plain)["logits"]
    finally:
        for handle in handles:
            handle.remove()
    with torch.inference_mode():
        before = model(IMAGES)
        with patched(model, [linear]):
            assert_near(model(IMAGES), expected)
        assert torch.equal(model(IMAGES), before)
    assert float((expected - before).abs().max()) > 1e-3 * float(before.abs().max())


def test_what_is_no_image_is_refused(small_model):
    model = small_model("vit")
    for images in (IMAGES[..., :8], IMAGES / 0):
        with pytest.raises(InputError, match=r"images must be finite and of the shape \('n', 3, 12, 12\)"):
            make_image_examples(model, images)
    with pytest.raises(InputError, match="position"):
        make_image_examples(model, IMAGES, position=PLACES)
    with pytest.raises(InputError, match="must be a vision transformer"):
        make_image_examples(small_model("gpt2"), IMAGES)
    with pytest.raises(InputError, match="has no tokenizer"):
        matlens.make_examples(model, make_sentences())
    words = matlens.make_token_examples(small_model("gpt2"), [[3, 4, 5]])
    with pytest.raises(InputError, match=r"must have images of the shape \(3, 12, 12\)"):
        matlens.collect(model, words, progress=False)
