"""Sub-updates add up to what the plain model's FFN writes, and their shares are those counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    D_MODEL,
    LAYERS,
    MASKED,
    N_LAYERS,
    WIRINGS,
    assert_near,
    make_tokenizer,
    plain_vectors,
)
from plain_values import plain_ffn, plain_values
from sub_updates.dominance import dominance
from torch import Tensor

import matlens
from matlens import InputError, collect, make_examples, make_prompts
from matlens.data.corpus import Corpus
from matlens.data.examples import Examples
from matlens.ffn import updates
from matlens.ffn.projection import Projection
from matlens.ffn.updates import Updates, dominant_table, random_sub_updates
from matlens.ffn.values import ValueVectors

PROMPT = {False: "w3 w14 w15 w9 w26", True: "w3 w14 [MASK] w9 w26"}


def prompt_of(name: str, model: Any) -> Examples:
    return make_prompts(model, [PROMPT[name in MASKED]])


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
        assert row.promoted == ", ".join(tokenizer.decode([token]) or f"<{token}>" for token in best)
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
    with pytest.raises(KeyError, match=r"ffn_post\.0 was not collected"):
        updates.coefficients(0)
    for k in (0, 49):
        with pytest.raises(InputError, match=r"^k must be an integer from 1 to 48"):
            updates.dominant(1, k)
    with pytest.raises(InputError, match=r"^row must be"):
        updates.sub_updates(1, 1)
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
