"""Other kinds of models in sizes that no other test has: odd numbers of heads, groups, words, experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from conftest import assert_near, make_tokenizer
from patched_models import patched

import matlens
from matlens import LinearMap
from matlens.models.layout import ModelLayout

_IDS: dict[str, Any] = {"vocab_size": 67, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
_DECODER = _IDS | {
    "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 52,
    "max_position_embeddings": 40,
}  # fmt: skip
_EXPERTS = _DECODER | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
_T5 = _IDS | {
    "d_model": 36, "d_kv": 10, "d_ff": 46, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 3,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip


class Kind(NamedTuple):
    """A configuration, where its blocks are, and the modules that begin and end attention and FFN."""

    config: Any
    auto: str
    blocks: str
    attn: tuple[str, str]
    ffn: tuple[str, str]
    stack: Any = None
    cross: tuple[str, str] | None = None  # attention to an encoder


def _decoder(config: Any) -> Kind:
    return Kind(config, "CausalLM", "model.layers", ("self_attn",) * 2, ("mlp",) * 2)


def _t5(stack: str, **settings: Any) -> Kind:
    ffn = f"layer.{1 + (stack == 'decoder')}.DenseReluDense"
    config = transformers.T5Config(**_T5, **settings)
    cross = ("layer.1.EncDecAttention",) * 2 if stack == "decoder" else None
    attn = ("layer.0.SelfAttention",) * 2
    return Kind(config, "Seq2SeqLM", f"{stack}.block", attn, (ffn,) * 2, stack, cross)


KINDS = {
    "t5 decoder, gated, not tied": _t5(
        "decoder", feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "vit": Kind(
        transformers.ViTConfig(
            hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=54, image_size=15,
            patch_size=5, num_channels=1, num_labels=7, qkv_bias=False,
        ),
        "ImageClassification", "vit.layers", ("attention",) * 2, ("mlp",) * 2,
    ),
    "olmo2, one key": _decoder(transformers.Olmo2Config(**_DECODER, num_key_value_heads=1)),
    "qwen2-moe": _decoder(
        transformers.Qwen2MoeConfig(**_EXPERTS, num_key_value_heads=1, shared_expert_intermediate_size=20)
    ),
}  # fmt: skip
TOKENS = torch.tensor([[7, 3, 41, 12, 12, 66, 30], [9, 5, 2, 2, 44, 31, 8]])
SOURCES = torch.tensor([[11, 4, 60], [13, 13, 6]])


@pytest.fixture(scope="module", params=KINDS)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Any, Any]:
    """A kind, its model as matlens loads it, and as transformers does."""
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("sizes")
    auto = getattr(transformers, f"AutoModelFor{kind.auto}")
    torch.manual_seed(0)
    plain = auto.from_config(kind.config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    plain.save_pretrained(folder)
    make_tokenizer(bert=kind.auto == "MaskedLM").save_pretrained(folder)
    model = matlens.load(str(folder), device="cpu", stack=kind.stack)
    return kind, model, auto.from_pretrained(folder).eval()


def _given(kind: Kind) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if kind.auto == "ImageClassification":
        return torch.randn(2, 1, 15, 15, generator=torch.Generator().manual_seed(0)), {}
    if kind.auto == "Seq2SeqLM":
        first, second = (TOKENS, SOURCES) if kind.stack == "encoder" else (SOURCES, TOKENS)
        return first, {"decoder_input_ids": second}
    return TOKENS, {}


@torch.inference_mode()
def _logits(kind: Kind, model: Any) -> torch.Tensor:
    first, others = _given(kind)
    output = model(first, **others)
    return getattr(output, "logits", output)


@torch.inference_mode()
def _vectors(kind: Kind, model: Any) -> dict[str, torch.Tensor]:
    """What the hooks of all sites carry."""
    layout = ModelLayout.from_model(model)
    first, others = _given(kind)
    _, seen = model.run_with_cache(first, **others)
    return {str(site): seen[layout.hook(site)] for site in layout.sites}


@contextmanager
def _by_hand(kind: Kind, plain: Any, linear: LinearMap) -> Iterator[None]:
    """The plain model with what lies between two sites replaced, by hooks of torch."""
    (part, layer), (_, last) = (str(site).split(".") for site in (linear.source, linear.target))
    blocks, read = plain.get_submodule(kind.blocks), []
    if part == "h":
        entered, left = blocks[int(layer)], blocks[int(last) - 1]
    else:
        entered, left = (blocks[int(layer)].get_submodule(path) for path in getattr(kind, part.split("_")[0]))

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        read[:] = [args[0] if args else kwargs["hidden_states"]]

    def leave(_: Any, __: Any, output: Any) -> Any:
        assert linear.bias is not None
        instead = read[0] @ linear.weight.T + linear.bias
        return (instead, *output[1:]) if isinstance(output, tuple) else instead

    handles = entered.register_forward_pre_hook(enter, with_kwargs=True), left.register_forward_hook(leave)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replaceable(kind: Kind, model: Any) -> list[tuple[str, str]]:
    last, parts = (
        ModelLayout.from_model(model).n_layers,
        ["attn", "ffn", *["cross"] * (kind.cross is not None)],
    )
    inside = [(f"{part}_in.{layer}", f"{part}_out.{layer}") for layer in (0, 1) for part in parts]
    return [*inside, ("h.0", "h.1"), ("h.1", f"h.{last}"), ("h.0", f"h.{last}")]


def test_patches_are_those_of_the_plain_model_patched_by_hand(named: tuple[Kind, Any, Any]) -> None:
    kind, model, plain = named
    unpatched, generator = _logits(kind, model), torch.Generator().manual_seed(0)
    for source, target in _replaceable(kind, model):
        weight = torch.randn(36, 36, generator=generator) / 6
        linear = LinearMap(weight, torch.randn(36, generator=generator), source, target)
        with patched(model, [linear]), _by_hand(kind, plain, linear):
            ours = _logits(kind, model)
            assert_near(ours, _logits(kind, plain))
        assert float((ours - unpatched).abs().max()) > 1e-3 * float(unpatched.abs().max())


def test_sites_and_sub_updates_add_up(named: tuple[Kind, Any, Any]) -> None:
    """As the wiring of the model has it; and of its experts, each coefficient times its value vector."""
    kind, model, _ = named
    layout, vectors = ModelLayout.from_model(model), _vectors(kind, model)
    values = matlens.ffn.ValueVectors(model)
    assert {"attn_out", "ffn_out", "ffn_post"} <= set(layout.kinds)
    for layer in range(layout.n_layers):
        block = {name: vectors[f"{name}.{layer}"] for name in ("h", *layout.kinds)}
        block["next"] = vectors[f"h.{layer + 1}"]
        for total, parts in layout.wiring.sums:
            if {total, *parts} <= set(block):
                assert_near(block[total], torch.stack([block[part] for part in parts]).sum(0), 1e-6)
        written = block["ffn_post"] @ values.matrix(layer) + values.bias(layer)
        assert_near(written, block["ffn_out"])
