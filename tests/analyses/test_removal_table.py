"""What is lost without a sub-update agrees with readings of its value vector as far as counted by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import LAYERS, N_LAYERS, SITE_MODULES, assert_near, plain_vectors
from paper_b_removal import _agreement, removal_table
from plain_values import (
    NORM_BEHIND,
    plain_ffn,
    plain_logits,
    plain_matrix,
    plain_norm,
    plain_unembedding,
    plain_values,
)
from torch import Tensor

from matlens import make_examples
from matlens.ffn.values import ValueVectors
from matlens.models import active_hooks


def gain_by_hand(name: str, plain: Any, layer: int | None) -> Callable[[Tensor], Tensor]:
    """What the norm behind an FFN, or the final one, does to an addend but for its scale, from its source."""
    if layer is None and name != "bert":
        norm = plain.get_submodule(LAYERS[name][1])
    elif layer is None:
        norm = plain.cls.predictions.transform.LayerNorm
    elif name in NORM_BEHIND:
        norm = plain.model.layers[layer].post_feedforward_layernorm
    else:
        norm = plain.bert.encoder.layer[layer].output.LayerNorm
    weight = norm.weight.detach() + (1 if name in NORM_BEHIND else 0)
    centred = name in ("bert", "gpt2", "neox")
    return lambda v: weight * (v - v.mean(-1, keepdim=True) if centred else v)


def left_out_by_hand(
    name: str, plain: Any, tokens: Tensor, at: int, layer: int, index: int
) -> dict[str, Tensor]:
    """Vectors of a pass in which a coefficient is 0 at one position, by a hook on the plain module."""
    path = SITE_MODULES[name]["ffn_post"][0]
    module = plain.get_submodule(LAYERS[name][0])[layer].get_submodule(path)

    def zero(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        m = args[0].clone()
        m[0, at, index] = 0
        return (m,)

    handle = module.register_forward_pre_hook(zero)
    try:
        return plain_vectors(name, plain, tokens)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gemma3"])
@torch.inference_mode()
def test_removal_agrees_with_readings_as_far_as_counted_by_hand(name, small_model, plain_model, sentences):
    model, plain = small_model(name), plain_model(name)
    examples = make_examples(model, sentences).head(3)
    table = removal_table(model, examples, k=2, layers=[-1, 0], n_tokens=5, seed=3)
    assert active_hooks(model) == ()
    e, final = plain_unembedding(plain), gain_by_hand(name, plain, None)
    expected: dict[tuple[str, int, str, str], list[float]] = {}
    drawn = ValueVectors(model).random_sub_updates(3, 2, seed=3)
    for row, layer in itertools.product(range(3), (0, N_LAYERS - 1)):
        start, end = examples.offsets[row : row + 2]
        tokens, at = torch.from_numpy(examples.tokens[start:end]), examples.positions[row]
        rows, (m, _) = plain_matrix(name, plain, layer), plain_ffn(name, plain, examples, layer, row)
        gain = gain_by_hand(name, plain, layer) if name in (*NORM_BEHIND, "bert") else None
        stream = "v" if gain is None else "g v"
        whole = plain_vectors(name, plain, tokens)
        lengths = m.abs() * plain_values(name, plain, layer).norm(dim=1)
        for i, index in enumerate(lengths.argsort(descending=True)[:2].tolist()):
            v = rows[index]
            reaching = v if gain is None else gain(v)
            through = "f W" if name == "bert" else "f"
            dense = plain.cls.predictions.transform.dense.weight if name == "bert" else torch.eye(len(v))
            scores = {"v": e @ v, "another v": e @ rows[drawn[layer][row, i]]}
            scores[f"{through} v"] = e @ final(dense @ v)
            if name in ("gpt2", "neox", "bert"):
                scores[f"ln_f({stream})"] = e @ plain_norm(name, plain, reaching)
            if gain is not None:
                scores |= {"g v": e @ reaching, f"{through} g v": e @ final(dense @ reaching)}
            without = left_out_by_hand(name, plain, tokens, at, layer, index)
            for effect, site in (("at the layer", f"h.{layer + 1}"), ("at the end", f"h.{N_LAYERS}")):
                lost = plain_logits(name, plain, whole[site][0, at]) - plain_logits(
                    name, plain, without[site][0, at]
                )
                if effect == "at the end":  # what the model itself gives
                    assert_near(lost, (whole["logits"] - without["logits"])[0, at], 1e-2)
                for method, of_all in scores.items():
                    of_all = m[index] * of_all
                    correlation = float(torch.corrcoef(torch.stack([of_all, lost]).double())[0, 1])
                    common = len({*of_all.topk(5).indices.tolist()} & {*lost.topk(5).indices.tolist()}) / 5
                    expected.setdefault((method, layer, effect, "correlation"), []).append(correlation)
                    expected.setdefault((method, layer, effect, "common"), []).append(common)
    by_layer = table.dropna(subset="layer")
    assert len(by_layer) == len(expected)
    for cell in by_layer.itertuples():
        by_hand = np.array(expected[cell.method, cell.layer, cell.effect, cell.metric]).reshape(3, 2).mean(1)
        tolerance = 2e-2 if cell.metric == "correlation" else 0.21  # ties of rounding
        assert cell.value == pytest.approx(by_hand.mean(), abs=tolerance), cell
        assert cell.n == 3
    overall = table[table["layer"].isna()].set_index(["method", "effect", "metric"])["value"]
    for (method, effect, metric), part in by_layer.groupby(["method", "effect", "metric"]):
        assert overall[method, effect, metric] == pytest.approx(part["value"].mean())


def test_agreement_is_a_mean_over_sub_updates():
    scores, lost = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    found = _agreement(scores, lost, 10)
    pairs = list(zip(scores, lost, strict=True))
    common = [len({*a.topk(10).indices.tolist()} & {*b.topk(10).indices.tolist()}) / 10 for a, b in pairs]
    assert found["common"] == pytest.approx(np.mean(common))
    assert np.mean(common) != pytest.approx(np.median(common))
