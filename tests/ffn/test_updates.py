"""Sub-updates add up to what the plain model's FFN writes, and their shares are those counted by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    ARCHITECTURES,
    D_MODEL,
    LAYERS,
    MASKED,
    N_LAYERS,
    SITE_MODULES,
    WIRINGS,
    assert_near,
    make_tokenizer,
    plain_vectors,
)
from plain_values import (
    NORM_BEHIND,
    plain_logits,
    plain_matrix,
    plain_norm,
    plain_scale,
    plain_unembedding,
    plain_values,
)
from torch import Tensor

import matlens
from matlens import InputError, collect, make_examples, make_prompts
from matlens.corpora.corpus import Corpus
from matlens.corpora.examples import Examples
from matlens.ffn import updates
from matlens.ffn.projection import Projection
from matlens.ffn.updates import Updates, dominance, dominant_table, random_sub_updates, removal_table
from matlens.ffn.values import ValueVectors

PROMPT = {False: "w3 w14 w15 w9 w26", True: "w3 w14 [MASK] w9 w26"}


def prompt_of(name: str, model: Any) -> Examples:
    return make_prompts(model, [PROMPT[name in MASKED]])


def plain_ffn(
    name: str, plain: Any, examples: Examples, layer: int, sentence: int = 0
) -> tuple[Tensor, Tensor]:
    """Coefficients of an FFN and what it adds to the stream, at a sentence's position, read alone.

    Coefficients are times the scale of a norm behind the FFN, by its formula.
    """
    start, end = examples.offsets[sentence : sentence + 2]
    vectors_by_site = plain_vectors(name, plain, torch.from_numpy(examples.tokens[start:end]))
    at = examples.positions[sentence]
    written = vectors_by_site[f"{'ln2_post_out' if name in NORM_BEHIND else 'ffn_out'}.{layer}"][0, at]
    scale = plain_scale(name, plain, vectors_by_site[f"ffn_out.{layer}"][0, at])
    return scale * vectors_by_site[f"ffn_post.{layer}"][0, at], written


@pytest.mark.parametrize("name", WIRINGS)
def test_sub_updates_and_the_bias_add_up_to_the_plain_models_ffn(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any], sentences: Corpus
) -> None:
    model, plain = small_model(name), plain_model(name)
    examples = make_examples(model, sentences).head(5)
    updates = Updates.run(model, examples, progress=False)
    assert updates.layers == list(range(N_LAYERS))
    for layer in range(N_LAYERS):
        for row in range(len(examples)):
            m, written = plain_ffn(name, plain, examples, layer, row)
            scale = updates.scales(layer)[row]
            assert_near(scale * updates.coefficients(layer)[row], m)
            assert_near(updates.outputs(layer)[row], written)
            parts = updates.sub_updates(layer, row)
            assert_near(parts, m[:, None] * plain_values(name, plain, layer))
            assert_near(parts.sum(0) + scale * updates.values.bias(layer), written)
    if updates.values.bias(0).any():  # the bias is a term of its own
        assert not torch.allclose(parts.sum(0), written, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_coefficients_of_gated_ffns_are_gate_times_up(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain = small_model(name), plain_model(name)
    examples = prompt_of(name, model)
    ffn = plain.get_submodule(LAYERS[name][0])[1].mlp
    read = plain_vectors(name, plain, torch.from_numpy(examples.tokens))["ffn_in.1"][0, -1]
    with torch.inference_mode():
        m = ffn.act_fn(ffn.gate_proj(read)) * ffn.up_proj(read)
    assert_near(Updates.run(model, examples, [1], progress=False).coefficients(1)[0], m)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_contributions_and_shares_are_as_counted_by_hand(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain = small_model(name), plain_model(name)
    examples = prompt_of(name, model)
    updates = Updates.run(model, examples, [-1, 0], progress=False)
    assert updates.layers == [0, N_LAYERS - 1]
    for layer in updates.layers:
        m, _ = plain_ffn(name, plain, examples, layer)
        lengths = (m[:, None] * plain_values(name, plain, layer)).norm(dim=1)
        assert_near(updates.contributions(layer)[0], lengths)
        assert_near(updates.shares(layer)[0], lengths / lengths.sum())
        assert float(updates.shares(layer)[0].sum()) == pytest.approx(1, abs=1e-5)
        assert updates.dominant(layer, 4)[0].tolist() == lengths.argsort(descending=True)[:4].tolist()
    assert torch.equal(updates.coefficients(-1), updates.coefficients(N_LAYERS - 1))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_table_tells_the_tokens_that_each_sub_update_promotes(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain = small_model(name), plain_model(name)
    examples = prompt_of(name, model)
    updates = Updates.run(model, examples, progress=False)
    table = dominant_table(updates, Projection.from_model(model), k=12, n_tokens=3)
    assert table["layer"].tolist() == [layer for layer in range(N_LAYERS) for _ in range(12)]
    assert table["rank"].tolist() == list(range(1, 13)) * N_LAYERS
    tokenizer = make_tokenizer(bert=name in MASKED)
    e = plain.get_output_embeddings().weight.detach()
    for row in table.itertuples():
        m, _ = plain_ffn(name, plain, examples, row.layer)
        index = int(row.value.split("D")[1])
        assert row.value == f"L{row.layer}D{index}"
        written = m[index] * plain_values(name, plain, row.layer)[index]
        assert row.coefficient == pytest.approx(float(m[index]), rel=1e-3)
        assert row.contribution == pytest.approx(float(written.norm()), rel=1e-3)
        best = (e @ written).topk(3).indices.tolist()
        assert row.tokens == ", ".join(tokenizer.decode([token]) or f"<{token}>" for token in best)
    assert (table["coefficient"] < 0).any(), "no sub-update turns its vector round, so this proves less"
    for _, of_layer in table.groupby("layer"):
        assert of_layer["share"].is_monotonic_decreasing


# Over a corpus (Figure 6)


@pytest.mark.parametrize("batch_tokens", [1, 60, 10_000])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_dominance_is_the_mean_share_of_the_largest_contributions(
    name: str,
    batch_tokens: int,
    small_model: Callable[[str], Any],
    plain_model: Callable[[str], Any],
    sentences: Corpus,
) -> None:
    model, plain = small_model(name), plain_model(name)
    examples = make_examples(model, sentences).head(12)
    both = dominance(model, examples, k=4, batch_tokens=batch_tokens, progress=False)
    table, negative = (both[both["metric"] == metric] for metric in ("share", "negative"))
    assert table["layer"].tolist() == [layer for layer in range(N_LAYERS) for _ in range(2)]
    assert (set(table["k"]), set(table["n"]), set(table["corpus"])) == ({4}, {12}, {"words"})
    for layer in range(N_LAYERS):
        v, shares, turned = plain_values(name, plain, layer), [], []
        for sentence in range(12):
            m = plain_ffn(name, plain, examples, layer, sentence)[0]
            lengths = m.abs() * v.norm(dim=1)
            shares.append(float(lengths.sort().values[-4:].sum() / lengths.sum()))
            turned += (m[lengths.argsort()[-4:]] < 0).tolist()
        row = negative[(negative["layer"] == layer) & (negative["method"] == "dominant")]
        assert row["value"].item() == pytest.approx(sum(turned) / 48, abs=1e-6)
        of_layer = table[table["layer"] == layer].set_index("method")
        assert of_layer.loc["dominant", "value"] == pytest.approx(sum(shares) / 12, rel=1e-4)
        assert of_layer.loc["dominant", "value"] > of_layer.loc["random", "value"]


def test_random_sub_updates_are_the_seeds_own_and_have_their_even_share(
    small_model: Callable[[str], Any], sentences: Corpus
) -> None:
    model = small_model("gpt2")
    examples = make_examples(model, sentences)

    def random_shares(seed: int, batch_tokens: int = 500, k: int = 10) -> list[float]:
        table = dominance(model, examples, k=k, seed=seed, batch_tokens=batch_tokens, progress=False)
        chosen = (table["method"] == "random") & (table["metric"] == "share")
        return table[chosen]["value"].tolist()

    assert random_shares(0) == pytest.approx(random_shares(0, 60), rel=1e-5)
    assert random_shares(0) != pytest.approx(random_shares(1), rel=1e-3)
    assert random_shares(0) == pytest.approx([10 / 128] * N_LAYERS, rel=0.15)
    assert random_shares(0, k=128) == pytest.approx([1] * N_LAYERS, rel=1e-5), "each is drawn only once"


def test_random_sub_updates_are_drawn_a_few_examples_at_a_time(
    small_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the seed as if all numbers were drawn at once, in memory that does not grow with the examples."""
    values = ValueVectors(small_model("gpt2"))
    whole, largest, rand = random_sub_updates(values, 50, 3, seed=4), list[int](), torch.rand

    def counted(shape: tuple[int, int], **how: Any) -> Tensor:
        largest.append(shape[0])
        return rand(shape, **how)

    monkeypatch.setattr(updates, "_DRAWN", 7 * values.d_mlp)
    monkeypatch.setattr(torch, "rand", counted)
    parted = random_sub_updates(values, 50, 3, seed=4)
    assert max(largest) == 7
    assert all(torch.equal(one, other) for one, other in zip(whole, parted, strict=True))
    numbers = rand((50, values.d_mlp), generator=torch.Generator().manual_seed(4))
    assert torch.equal(whole[0].long(), numbers.topk(3).indices)


# Left out


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


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "bert", "gemma2", "gemma3"])
@torch.inference_mode()
def test_removal_agrees_with_readings_as_far_as_counted_by_hand(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any], sentences: Corpus
) -> None:
    model, plain = small_model(name), plain_model(name)
    examples = make_examples(model, sentences).head(3)
    table = removal_table(model, examples, k=2, layers=[-1, 0], n_tokens=5, seed=3, progress=False)
    e, final = plain_unembedding(plain), gain_by_hand(name, plain, None)
    expected: dict[tuple[str, int, str, str], list[float]] = {}
    drawn = random_sub_updates(ValueVectors(model), 3, 2, seed=3)
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
    at_layer = overall.xs("correlation", level="metric").xs("at the layer", level="effect")
    if name not in ("bert", "gemma2"):  # the others' logits follow from the gains, but for one direction
        best = "f g v" if name in NORM_BEHIND else "f v"
        assert at_layer[best] > 0.8
        assert at_layer[best] > at_layer["v"] - 0.01
        assert at_layer["another v"] < 0.5


# What cannot be done


def test_updates_of_another_model_are_refused(small_model: Callable[[str], Any]) -> None:
    model = small_model("llama")
    there = collect(model, prompt_of("llama", model), ["ffn_post.0", "ffn_out.0"], progress=False)
    assert Updates(ValueVectors(model), there).layers == [0]
    with pytest.raises(InputError, match="The coefficients and the value vectors do not belong together"):
        Updates(ValueVectors(small_model("gemma2")), there)


def test_what_is_out_of_range_is_told(small_model: Callable[[str], Any]) -> None:
    model = small_model("llama")
    examples = prompt_of("llama", model)
    updates = Updates.run(model, examples, [1], progress=False)
    for layers in ([3], [-4]):
        with pytest.raises(InputError, match="out of range: the FFNs of this model are in the layers 0 to 2"):
            Updates.run(model, examples, layers)
    with pytest.raises(InputError, match="No layers are chosen"):
        Updates.run(model, examples, [])
    with pytest.raises(
        InputError, match=r"ffn_post\.0 was not collected\. There are updates of these layers: 1"
    ):
        updates.coefficients(0)
    for k in (0, 49):
        with pytest.raises(InputError, match=f"{k} sub-updates were asked for. Expected 1 to 48"):
            updates.dominant(1, k)
        with pytest.raises(InputError, match=f"{k} sub-updates were asked for. Expected 1 to 48"):
            dominance(model, examples, k=k)
    with pytest.raises(InputError, match=r"Row 1 was asked for\. Expected 0 to 0"):
        dominant_table(updates, Projection.from_model(model), row=1)
    with pytest.raises(InputError, match="no value vectors that are known"):
        Updates.run(small_model("bloom"), examples)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_half_precision_adds_up_too(
    name: str, model_folder: Callable[[str], Path], sentences: Corpus
) -> None:
    model = matlens.load(str(model_folder(name)), device="cpu", dtype=torch.bfloat16)
    updates = Updates.run(model, make_examples(model, sentences).head(3), progress=False)
    for layer in range(N_LAYERS):
        parts = updates.sub_updates(layer, 2)
        assert parts.dtype == torch.float32
        assert parts.shape[1] == D_MODEL
        assert_near(parts.sum(0) + updates.values.bias(layer), updates.outputs(layer)[2], 1e-2)
