"""Sub-updates add up to the plain model's FFN outputs, and their shares are those counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import MASKED, N_LAYERS, assert_near, make_tokenizer
from paper_b_fig6_dominance import dominance
from plain_values import plain_ffn, plain_unembedding, plain_values

from matlens import InputError, make_examples, make_prompts
from matlens.ffn.projection import Projection
from matlens.ffn.updates import Updates
from matlens.ffn.values import ValueVectors

Models = Callable[[str], Any]


@pytest.mark.parametrize("name", ["gpt2", "gptj", "bert", "gemma2", "granite", "olmo2"])
def test_sub_updates_and_the_bias_add_up_to_the_plain_models_ffn(name, small_model, plain_model, sentences):
    model, plain = small_model(name), plain_model(name)
    examples = make_examples(model, sentences).head(4)
    updates = Updates.run(model, examples, progress=False)
    assert updates.layers == list(range(N_LAYERS))
    with pytest.raises(InputError, match="The coefficients and the value vectors do not belong together"):
        Updates(ValueVectors(small_model("llama")), updates.activations)
    for layer in range(N_LAYERS):
        shares = updates.shares(layer)
        for row in range(len(examples)):
            m, written = plain_ffn(name, plain, examples, layer, row)
            scale = updates.scales(layer)[row]
            assert_near(scale * updates.coefficients(layer)[row], m)
            assert_near(updates.outputs(layer)[row], written)
            parts = updates.sub_updates(layer, row)
            assert_near(parts, m[:, None] * plain_values(name, plain, layer))
            assert_near(parts.sum(0) + scale * updates.values.bias(layer), written)
            lengths = (m[:, None] * plain_values(name, plain, layer)).norm(dim=1)
            assert_near(shares[row], lengths / lengths.sum())
    if updates.values.bias(0).any():  # the bias is a term of its own
        assert not torch.allclose(parts.sum(0), written, rtol=1e-3)


@pytest.mark.parametrize("batch_tokens", [1, 10_000])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dominance_is_the_mean_share_of_the_largest_contributions(
    name, batch_tokens, small_model, plain_model, sentences
):
    model, plain = small_model(name), plain_model(name)
    examples = make_examples(model, sentences).head(8)
    both = dominance(model, examples, k=4, batch_tokens=batch_tokens)
    table, negative = (both[both["metric"] == metric] for metric in ("share", "negative"))
    assert table["layer"].tolist() == [layer for layer in range(N_LAYERS) for _ in range(2)]
    assert (set(table["k"]), set(table["n"]), set(table["corpus"])) == ({4}, {8}, {"words"})
    for layer in range(N_LAYERS):
        v, shares, turned = plain_values(name, plain, layer), [], []
        for sentence in range(8):
            m = plain_ffn(name, plain, examples, layer, sentence)[0]
            lengths = m.abs() * v.norm(dim=1)
            shares.append(float(lengths.sort().values[-4:].sum() / lengths.sum()))
            turned += (m[lengths.argsort()[-4:]] < 0).tolist()
        row = negative[(negative["layer"] == layer) & (negative["method"] == "dominant")]
        assert row["value"].item() == pytest.approx(sum(turned) / 32, abs=1e-6)
        of_layer = table[table["layer"] == layer].set_index("method")
        assert of_layer.loc["dominant", "value"] == pytest.approx(sum(shares) / 8, rel=1e-4)
        assert of_layer.loc["dominant", "value"] > of_layer.loc["random", "value"]


def test_random_sub_updates_are_the_same_however_few_are_sampled_at_once(small_model, monkeypatch):
    values = ValueVectors(small_model("gpt2"))
    whole = values.random_sub_updates(50, 3, seed=4)
    monkeypatch.setattr("matlens.ffn.values._SAMPLED", 7 * values.d_mlp)
    parts = values.random_sub_updates(50, 3, seed=4)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    numbers = torch.rand((50, values.d_mlp), generator=torch.Generator().manual_seed(4))
    assert torch.equal(whole[0].long(), numbers.topk(3).indices)


@pytest.mark.parametrize("name", ["bert", "gemma3"])
def test_the_table_has_the_largest_sub_updates_and_the_tokens_they_promote(name, small_model, plain_model):
    model, plain, tokenizer = small_model(name), plain_model(name), make_tokenizer(bert=name == "bert")
    examples = make_prompts(model, [f"w3 w14 {'[MASK]' if name in MASKED else 'w15'} w9 w26"])
    updates = Updates.run(model, examples, [0, -1], progress=False)
    table = updates.table(Projection.from_model(model), k=12, n_tokens=3)
    e, rows = plain_unembedding(plain), iter(table.itertuples())
    for layer in (0, N_LAYERS - 1):
        m = plain_ffn(name, plain, examples, layer)[0]
        written = m[:, None] * plain_values(name, plain, layer)
        lengths = written.norm(dim=1)
        scale = float(updates.scales(layer)[0])
        for rank, index in enumerate(lengths.argsort(descending=True)[:12].tolist(), start=1):
            row: Any = next(rows)
            assert (row.layer, row.rank, row.value) == (layer, rank, f"L{layer}D{index}")
            assert row.coefficient == pytest.approx(float(m[index]) / scale, rel=1e-3)
            assert row.contribution == pytest.approx(float(lengths[index]), rel=1e-3)
            assert row.share == pytest.approx(float(lengths[index] / lengths.sum()), rel=1e-3)
            best = (e @ written[index]).topk(3).indices.tolist()
            assert row.promoted == ", ".join(tokenizer.decode([token]) or f"<{token}>" for token in best)
    assert (table["coefficient"] < 0).any(), "no sub-update has a negative coefficient, so this proves less"
