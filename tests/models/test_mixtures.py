"""What experts write is a sum over value vectors, with the router's weights in the coefficients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import N_LAYERS, assert_near, plain_vectors
from torch import Tensor

import matlens
from matlens import InputError
from matlens.activations.collecting import collect
from matlens.ffn.control import controlled
from matlens.ffn.values import ValueVector, ValueVectors
from matlens.models.layout import ModelLayout, mixture

MIXTURES = ("olmoe", "qwen2-moe")
WIDTHS = {"olmoe": (48, 0), "qwen2-moe": (16, 24)}  # of a routed expert, and of the shared one
TOKENS = torch.tensor([[7, 3, 41, 12, 12, 59, 30, 22, 8, 17, 2, 50]])


@torch.inference_mode()
def experts_by_hand(name: str, plain: Any, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients ``[n, columns]`` and value vectors ``[columns, d]``, from the weights alone.

    Written from the papers: softmax over the experts, the two greatest kept (and not normalized again in
    these configurations), gated SiLU experts; Qwen's shared expert times the sigmoid of its gate.
    """
    block = plain.model.layers[layer].mlp
    width, shared_width = WIDTHS[name]
    chance = torch.softmax(x @ block.gate.weight.T, -1)
    assert not plain.config.norm_topk_prob
    kept = torch.where(chance >= chance.topk(2).values[:, 1:], chance, torch.zeros(()))
    coefficients, rows = [], []
    for expert in range(4):
        both = x @ block.experts.gate_up_proj[expert].T
        gate, up = both[:, :width], both[:, width:]
        coefficients.append(kept[:, expert, None] * gate * torch.sigmoid(gate) * up)
        rows.append(block.experts.down_proj[expert].T)
    if shared_width:
        gate, up = x @ block.shared_expert.gate_proj.weight.T, x @ block.shared_expert.up_proj.weight.T
        weight = torch.sigmoid(x @ block.shared_expert_gate.weight.T)
        coefficients.append(weight * gate * torch.sigmoid(gate) * up)
        rows.append(block.shared_expert.down_proj.weight.T)
    return torch.cat(coefficients, 1), torch.cat(rows)


def block_ends(plain: Any, layer: int, tokens: Tensor = TOKENS) -> tuple[Tensor, Tensor]:
    """What the FFN of a block reads and writes, by hooks on the plain module."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = plain.model.layers[layer].mlp.register_forward_hook(
        lambda _, args, output: seen.append((args[0][0].clone(), output[0].clone()))
    )
    try:
        with torch.inference_mode():
            plain(tokens)
    finally:
        handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", MIXTURES)
def test_coefficients_and_value_vectors_are_those_of_the_weights(name, small_model, plain_model):
    model, plain = small_model(name), plain_model(name)
    layout, values = ModelLayout.from_model(model), ValueVectors(model)
    width, shared = WIDTHS[name]
    assert (layout.wiring.name, layout.d_mlp) == ("pre-norm", 4 * width + shared)
    examples = matlens.data.make_token_examples(model, TOKENS, positions=[[*range(TOKENS.shape[1])]])
    sites = [f"{kind}.{layer}" for kind in ("ffn_post", "ffn_out") for layer in range(N_LAYERS)]
    collected = collect(model, examples, sites, progress=False)
    for layer in range(N_LAYERS):
        x, written = block_ends(plain, layer)
        m, rows = experts_by_hand(name, plain, layer, x)
        assert_near(collected[f"ffn_post.{layer}"], m)
        assert_near(values.layer(layer), rows, 1e-7)
        assert_near(collected[f"ffn_out.{layer}"], written)
        assert_near(m @ rows, written)
        # Most coefficients are 0, and each token has those of two experts.
        chosen = torch.stack([part.any(1) for part in m[:, : 4 * width].split(width, 1)])
        assert chosen.sum(0).tolist() == [2] * len(m)


def test_a_coefficient_that_is_set_adds_its_value_vector(small_model, plain_model):
    """At every token, whether its expert is chosen or not; the shared expert too."""
    name, names = "qwen2-moe", ["L1E2D5", "L1E0D3", "L1E4D7"]
    model, plain = small_model(name), plain_model(name)
    values = ValueVectors(model)
    columns = [values.column(vector) for vector in names]
    x, _ = block_ends(plain, 1)
    m, rows = experts_by_hand(name, plain, 1, x)
    changed = m.clone()
    changed[:, columns] = 2.0

    def write(_: Any, __: Any, output: Tensor) -> Tensor:
        return output + ((changed - m) @ rows).view(output.shape)

    handle = plain.model.layers[1].mlp.register_forward_hook(write)
    try:
        expected = plain_vectors(name, plain, TOKENS)["logits"]
    finally:
        handle.remove()
    with torch.inference_mode():
        before = model(TOKENS)
        with controlled(model, names, 2.0):
            assert_near(model(TOKENS), expected)
        assert torch.equal(model(TOKENS), before)
    assert float((expected - before).abs().max()) > 1e-3 * float(before.abs().max())


def test_half_precision_adds_up_and_a_missing_expert_does_not(model_folder):
    model = matlens.load(str(model_folder("qwen2-moe")), device="cpu", dtype=torch.bfloat16)
    known, experts = ModelLayout.from_model(model), mixture(model, 1)
    assert known.d_mlp == 88
    assert experts is not None
    seen: list[Tensor] = []
    sites = map(known.hook, ("ffn_post.1", "ffn_out.1"))
    hooks = [(site, lambda value, hook: seen.append(value.clone())) for site in sites]
    with torch.inference_mode(), model.hooks(fwd_hooks=hooks):
        model(TOKENS)
    coefficients, output = seen
    assert experts.adds_up(coefficients, output, 1.0)
    assert not experts.adds_up(coefficients, output, 1.2)
    for part in (slice(16, 32), slice(64, 88)):
        without = coefficients.clone()
        without[..., part] = 0
        assert not experts.adds_up(without, output, 1.0)


def test_names_have_an_expert(small_model):
    values = ValueVectors(small_model("qwen2-moe"))
    assert values.resolve("L1E2D5") == values.resolve("L1D37") == ValueVector(1, 5, 2)
    names = [values.vector(1, column) for column in range(88)]
    assert [ValueVector.parse(str(name)) for name in names] == names
    assert torch.equal(values.vectors(names), values.layer(1))
    for wrong in ("L1E2D16", "L1E4D24", "L1E5D0"):
        with pytest.raises(InputError, match=r"0 to 3 has the value vectors 0 to 15, and expert 4 0 to 23"):
            values.resolve(wrong)
