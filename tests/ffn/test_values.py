"""Value vectors, projections, updates and the cache are those of the plain model's own weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import (
    D_MODEL,
    LAYERS,
    MASKED,
    N_LAYERS,
    SITE_MODULES,
    WIRINGS,
    assert_near,
    load_plain,
    make_tokenizer,
    save_model,
)
from paper_b_fig6_dominance import dominance
from plain_values import (
    D_MLP,
    D_VOCAB,
    all_plain_values,
    plain_ffn,
    plain_matrix,
    plain_norm,
    plain_unembedding,
    plain_values,
)
from safetensors.torch import load_file, save_file

import matlens
from matlens import InputError, Site, make_examples, make_prompts
from matlens.ffn import Trace, controlled, projection
from matlens.ffn import catalogue as module
from matlens.ffn.catalogue import Catalogue, Reading
from matlens.ffn.projection import Projection, TopTokens
from matlens.ffn.updates import Updates
from matlens.ffn.values import ValueVectors
from matlens.io.cache import default_cache
from matlens.models.identity import ModelIdentity, Provenance
from matlens.models.layout import ModelLayout
from matlens.patching import Replacement

Folders = Callable[[str], Path]


@pytest.mark.parametrize("name", WIRINGS)
def test_vectors_are_the_rows_of_the_plain_output_matrix(name, small_model, plain_model):
    values, plain = ValueVectors(small_model(name)), plain_model(name)
    assert (values.n_layers, values.d_mlp, values.d_model) == (N_LAYERS, D_MLP[name], D_MODEL)
    for layer in range(N_LAYERS):
        assert torch.equal(values.matrix(layer), plain_matrix(name, plain, layer))
        assert_near(values.layer(layer), plain_values(name, plain, layer), 1e-6)
        assert_near(values.norms(layer), plain_values(name, plain, layer).norm(dim=1), 1e-6)
        module = plain.get_submodule(LAYERS[name][0])[layer].get_submodule(SITE_MODULES[name]["ffn_post"][0])
        expected = torch.zeros(D_MODEL) if module.bias is None else module.bias.detach()
        assert torch.equal(values.bias(layer), expected)
    chosen = values.vectors(["L2D5", (0, 3), "L-1D-1"])
    rows = [plain_values(name, plain, layer)[index] for layer, index in ((2, 5), (0, 3), (-1, -1))]
    assert_near(chosen, torch.stack(rows), 1e-6)
    last = f"L{N_LAYERS - 1}D{D_MLP[name] - 1}"
    assert str(values.resolve("L-1D-1")) == str(values.at(len(values) - 1)) == last
    assert str(values.at(D_MLP[name])) == "L1D0"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma3", "granite", "olmoe", "opt-narrow"])
def test_no_accessor_gives_the_models_own_weights(name, small_model):
    """Centering or normalizing them in place would edit the model."""
    model = small_model(name)
    own = {weight.untyped_storage().data_ptr() for weight in model.original_model.parameters()}
    values = ValueVectors(model)
    given = [
        *(read(layer) for layer in range(N_LAYERS) for read in (values.layer, values.matrix, values.bias)),
        values.vectors([values.at(0)]), values.norms(0), values.random(0, 2),
    ]  # fmt: skip
    for make in (Projection.from_model, Projection.after_norm, Projection.through_head):
        if make == Projection.from_model or hasattr(model, "ln_final"):
            read = make(model)
            given += [read.unembedding, *(read.norm.parameters() if read.norm is not None else ())]
            given += [] if read.norm is None else list(vars(read.norm).values())
    given = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in given}
    first = values.layer(0)
    first -= first.mean(0)
    assert not torch.equal(values.layer(0), first)


@pytest.mark.parametrize("wrong", ["L3D0", "L-4D0", "L0D48", "L0D-49", "L0E0D1"])
def test_names_outside_the_model_are_refused(wrong, small_model):
    with pytest.raises(InputError, match=r"^(layer|index) must be between|There is no value vector"):
        ValueVectors(small_model("llama")).resolve(wrong)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_half_precision_is_read_in_float32(name, model_folder):
    model = matlens.load(str(model_folder(name)), device="cpu", dtype=torch.bfloat16)
    plain = load_plain(name, model_folder(name), dtype=torch.bfloat16)
    values, read = ValueVectors(model), Projection.from_model(model)
    assert torch.equal(values.layer(1), plain_values(name, plain, 1).float())
    expected = plain_values(name, plain, 1).float() @ plain_unembedding(plain).float().T
    assert_near(read.scores(values.layer(1)), expected, 1e-6)
    assert Projection.after_norm(model).scores(values.layer(1)).dtype == torch.float32
    assert {parameter.dtype for parameter in model.original_model.parameters()} == {torch.bfloat16}


def test_weights_that_the_layer_does_not_use_as_they_are_are_refused(model_folder):
    """As with packed weights and adapters, the layer computes more than its weight says."""
    model = matlens.load(str(model_folder("llama")), device="cpu")
    layer = model.blocks[1].mlp.out.original_component
    usual = layer.forward
    layer.forward = lambda x: usual(x) * 1.01
    with pytest.raises(InputError, match=r"not a plain matrix of 48 x 32.*without quantization or adapters"):
        ValueVectors(model)


def test_models_that_cannot_be_read_are_refused(small_model, model_folder):
    with pytest.raises(InputError, match=r"no known value vectors \(its blocks are stream-only\)"):
        ValueVectors(small_model("bloom"))
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    del model._modules["ln_final"]
    with pytest.raises(InputError, match="has no final norm"):
        Projection.after_norm(model)
    del model._modules["unembed"]
    with pytest.raises(InputError, match=r"has no unembedding.*ForCausalLM or \.\.\.ForMaskedLM"):
        Projection.from_model(model)
    folded = matlens.load(str(model_folder("gpt2")), device="cpu")
    folded.enable_compatibility_mode(disable_warnings=True)
    for read in (ValueVectors, Projection.from_model):
        with pytest.raises(InputError, match="compatibility mode"):
            read(folded)


def test_random_vectors_have_the_layers_moments_and_depend_on_the_seed_alone(small_model):
    values = ValueVectors(small_model("gpt2"))
    sampled, real = values.random(1, 50_000, seed=4), values.layer(1)
    deviation = real.std(0)
    assert ((sampled.mean(0) - real.mean(0)).abs() / deviation).max() < 0.03
    assert ((sampled.std(0) - deviation).abs() / deviation).max() < 0.03
    assert torch.equal(sampled[:3], values.random(-2, 50_000, seed=4)[:3])
    for other in (values.random(1, 5, seed=5), values.random(0, 5, seed=4)):
        assert not torch.allclose(sampled[:5], other)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_square_output_matrices_are_not_transposed(name, tmp_path):
    """Where d_mlp is d_model, only what the layer computes tells rows from columns."""
    torch.manual_seed(0)
    folder = save_model(name, tmp_path)
    plain = load_plain(name, folder)
    setattr(plain.config, "n_inner" if name == "gpt2" else "intermediate_size", D_MODEL)
    plain = type(plain)(plain.config)
    plain.save_pretrained(folder)
    values = ValueVectors(matlens.load(str(folder), device="cpu"))
    assert values.d_mlp == values.d_model == D_MODEL
    assert torch.equal(values.layer(1), plain_values(name, plain, 1))


K = 7
NAMES = ("gpt2", "gptj", "bert", "gemma2", "gemma3")


@pytest.mark.parametrize("name", NAMES)
def test_scores_through_the_head_have_its_linear_parts(name, small_model, plain_model):
    """The norm's gain, less the mean in layer norms, after the dense layer of masked-LM heads."""
    model, plain = small_model(name), plain_model(name)
    v = plain_values(name, plain, 1)[:4]
    if name == "bert":
        dense = plain.cls.predictions.transform.dense.weight.detach()
        norm = plain.cls.predictions.transform.LayerNorm
        gained = norm.weight.detach() * (v @ dense.T - (v @ dense.T).mean(-1, keepdim=True))
    else:
        path = {"gpt2": "transformer.ln_f", "gptj": "transformer.ln_f"}.get(name, "model.norm")
        norm = plain.get_submodule(path)
        centred = v - v.mean(-1, keepdim=True) if name in ("gpt2", "gptj") else v
        gained = (norm.weight.detach() + name.startswith("gemma")) * centred
    assert_near(Projection.through_head(model).scores(v), gained @ plain_unembedding(plain).T, 1e-4)


@pytest.mark.parametrize("in_memory", [1, D_VOCAB * 5, 2**25])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_top_and_bottom_tokens_are_those_of_all_scores_sorted(
    name, in_memory, small_model, plain_model, monkeypatch
):
    """Whether many vectors are read at once or one."""
    monkeypatch.setattr(projection, "_SCORES", in_memory)
    model, plain = small_model(name), plain_model(name)
    best, order = (all_plain_values(name, plain) @ plain_unembedding(plain).T).sort(dim=1, descending=True)
    ours = Projection.from_model(model)
    assert len(ours.blocks(all_plain_values(name, plain))[0]) == max(1, min(in_memory // D_VOCAB, len(best)))
    tokens = ours.top_of_all(ValueVectors(model), K, progress=False)
    assert torch.equal(tokens.ids, order[:, :K])
    assert_near(tokens.scores, best[:, :K], 1e-6)
    lowest = ours.bottom(all_plain_values(name, plain), K)
    assert torch.equal(lowest.ids, order.flip(1)[:, :K])
    assert_near(lowest.scores, best.flip(1)[:, :K], 1e-6)
    with pytest.raises(InputError, match=f"^k must be an integer from 1 to {D_VOCAB}"):
        ours.top(torch.zeros(2, D_MODEL), D_VOCAB + 1)


def test_the_table_has_both_ends_of_each_vector(small_model, plain_model):
    model, plain, tokenizer = small_model("gpt2"), plain_model("gpt2"), make_tokenizer()
    table = Projection.from_model(model).table(ValueVectors(model), ["L2D9", (0, -1)], k=3)
    assert tuple(table.columns) == projection.TOKEN_COLUMNS
    assert len(table) == 12
    named = Projection.from_model(model).table(ValueVectors(model), table["value"].drop_duplicates(), k=3)
    assert named.equals(table)
    for nothing in (None, []):
        with pytest.raises(InputError):
            Projection.from_model(model).table(ValueVectors(model), nothing)
    with pytest.raises(InputError, match="model"):
        Projection.from_model(model).table(ValueVectors(small_model("llama")), ["L2D9"], k=3)
    for name, layer, index in (("L2D9", 2, 9), ("L0D127", 0, 127)):
        scores = plain_values("gpt2", plain, layer)[index] @ plain_unembedding(plain).T
        for side, order in (("top", scores.argsort(descending=True)), ("bottom", scores.argsort())):
            rows = table[(table["value"] == name) & (table["side"] == side)]
            assert rows["token_id"].tolist() == order[:3].tolist()
            # The unembedding has rows for which the tokenizer has no token.
            texts = [tokenizer.decode([token]) or f"<{token}>" for token in order[:3].tolist()]
            assert rows["token"].tolist() == texts
            assert rows["score"].tolist() == pytest.approx(scores[order[:3]].tolist(), rel=1e-4, abs=1e-6)
            assert rows["rank"].tolist() == [1, 2, 3]
            assert set(zip(rows["layer"], rows["index"], strict=True)) == {(layer, index)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("named", [False, True])
def test_the_table_reads_any_vectors(named, dtype, small_model, plain_model):
    vectors = torch.nn.Parameter(
        torch.randn(3, D_MODEL, generator=torch.Generator().manual_seed(0)).to(dtype)
    )
    names = ["warm", "cold", "warm less cold"]
    read = Projection.from_model(small_model("gpt2"))
    table = read.table(vectors, names, k=4) if named else read.table(vectors, k=4)
    assert list(table) == ["vector", "side", "rank", "token", "token_id", "score"]
    scores = vectors.detach().double() @ plain_unembedding(plain_model("gpt2")).double().T
    for side in ("top", "bottom"):
        best = scores.topk(4, largest=side == "top")
        rows = table[table["side"] == side]
        assert rows["vector"].tolist() == [name for name in (names if named else range(3)) for _ in range(4)]
        assert rows["token_id"].tolist() == best.indices.flatten().tolist()
        assert rows["score"].tolist() == pytest.approx(best.values.flatten().tolist(), rel=1e-4)
        texts = [make_tokenizer().decode([token]) or f"<{token}>" for token in rows["token_id"]]
        assert rows["token"].tolist() == texts
        assert rows["rank"].tolist() == [1, 2, 3, 4] * 3
    one = read.table(vectors[1], ["cold"], k=4)
    assert one["token_id"].tolist() == read.table(vectors[1:2], k=4)["token_id"].tolist()


def test_the_table_reads_vectors_through_the_head(small_model, plain_model):
    vectors = torch.randn(2, D_MODEL, generator=torch.Generator().manual_seed(0))
    table = Projection.after_norm(small_model("gpt2")).table(vectors, k=1)
    normed = plain_norm("gpt2", plain_model("gpt2"), vectors) @ plain_unembedding(plain_model("gpt2")).T
    assert table[table["side"] == "top"]["token_id"].tolist() == normed.argmax(1).tolist()


@pytest.mark.parametrize(
    ("vectors", "names"),
    [
        (torch.ones(2, D_MODEL + 1), None), (torch.ones(1), None), (torch.ones(2, 2, D_MODEL), None),
        (torch.full((D_MODEL,), torch.nan), None), (torch.ones(2, D_MODEL) / 0, None),
        (torch.ones(D_MODEL, dtype=torch.long), None), (torch.ones(2, D_MODEL), ["one"]),
    ],
)  # fmt: skip
def test_vectors_that_the_table_cannot_read_are_refused(vectors, names, small_model):
    with pytest.raises(InputError):
        Projection.from_model(small_model("gpt2")).table(vectors, names)


@pytest.mark.parametrize("words", [["w7"], ["w7", "w30", "w11"]])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_vectors_that_promote_words_most_are_found_as_by_trying_all(
    name, words, small_model, plain_model
):
    model, plain, tokenizer = small_model(name), plain_model(name), make_tokenizer(bert=name == "bert")
    values, ids = ValueVectors(model), tokenizer.convert_tokens_to_ids(words)
    for read, normed in ((Projection.from_model(model), False), (Projection.after_norm(model), True)):
        vectors = all_plain_values(name, plain)
        vectors = plain_norm(name, plain, vectors) if normed else vectors
        whole = vectors @ plain_unembedding(plain).T
        score, lift = whole[:, ids].mean(1), whole[:, ids].mean(1) - whole.mean(1)
        best = lift.argsort(descending=True)[:6]
        table = read.promoting(values, words, 6, progress=False)
        assert table["value"].tolist() == [str(values.at(int(row))) for row in best]
        assert table["score"].tolist() == pytest.approx(score[best].tolist(), rel=1e-4)
        assert table["lift"].tolist() == pytest.approx(lift[best].tolist(), rel=1e-4)
    if len(words) == 1:
        assert table.equals(read.promoting(values, words[0], 6, progress=False))
    with pytest.raises(InputError, match=r"^n must be an integer from 1 to"):
        read.promoting(values, words, 10_000)


@pytest.mark.parametrize("words", [["w7"], ["w7", "w30", "w11"]])
def test_a_search_finds_every_list_with_a_word(words, small_model):
    model, tokenizer = small_model("gpt2"), make_tokenizer()
    values, read = ValueVectors(model), Projection.from_model(model)
    tokens = read.top_of_all(values, K, progress=False)
    expected = []
    for row, ids in enumerate(tokens.ids.tolist()):
        texts = [tokenizer.decode([token]) for token in ids]
        ranks = [texts.index(word) + 1 for word in words if word in texts]
        if ranks:
            score = float(tokens.scores[row, min(ranks) - 1])
            expected.append((str(values.at(row)), len(ranks), min(ranks), score))
    expected.sort(key=lambda one: (-one[1], one[2], -one[3]))
    table = read.search(values, tokens, words)
    columns = table[["value", "words", "rank", "score"]].itertuples(index=False, name=None)
    assert list(columns) == expected
    assert 0 < len(table) < len(values)
    nothing = TopTokens(torch.zeros(len(values), 2, dtype=torch.long), torch.zeros(len(values), 2))
    assert read.search(values, nothing, words).empty
    with pytest.raises(InputError, match=r"a row for each of 384 value vectors, got 3"):
        read.search(values, read.top(values.layer(0)[:3]), words)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "bert", "gemma2", "granite", "olmo2"])
def test_sub_updates_and_the_bias_add_up_to_the_plain_models_ffn(name, small_model, plain_model, sentences):
    model, plain = small_model(name), plain_model(name)
    examples = make_examples(model, sentences).head(4)
    updates = Updates.run(model, examples, progress=False)
    assert updates.layers == list(range(N_LAYERS))
    with pytest.raises(InputError):
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
    assert updates.values.scale(0, torch.zeros(2, D_MODEL)).tolist() == [
        1,
        1,
    ]  # where a norm has nothing to scale
    if updates.values.bias(0).any():  # the bias is a term of its own
        assert not torch.allclose(parts.sum(0), written, rtol=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2", "olmoe"])
def test_sub_updates_of_ffns_that_write_something_else_raise(name, small_model, sentences):
    """Replaced, or with a hook at the output: as where one dimension of one token is changed."""
    model = small_model(name)
    examples = make_examples(model, sentences).head(6)
    hook = ModelLayout.from_model(model).hook("ffn_out.1")

    def nudge(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value = value.clone()
        value[:, :, 3] += value.norm(dim=-1)
        return value

    nothing = Replacement(torch.zeros_like, Site("ffn_in", 1), Site("ffn_out", 1))
    contexts = [lambda: model.hooks(fwd_hooks=[(hook, nudge)]), lambda: matlens.patched(model, [nothing])]
    for context in contexts:
        for run in (Updates.run, Trace.run):
            with context(), pytest.raises(InputError, match="The sub-updates of layer 1 must add up"):
                run(model, examples, progress=False)
        sites = [
            f"{kind}.1" for kind in dict.fromkeys(("ffn_post", "ffn_out", ValueVectors(model).output_kind))
        ]
        with context():
            activations, values = matlens.collect(model, examples, sites, progress=False), ValueVectors(model)
            with pytest.raises(InputError, match="The sub-updates of layer 1 must add up"):
                Updates(values, activations)
    with controlled(model, [ValueVectors(model).at(3)], 2.0):  # which changes coefficients and outputs alike
        Updates.run(model, examples, progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "olmoe"])
def test_rounding_is_no_other_output(name, dtype, model_folder, sentences):
    model = matlens.load(str(model_folder(name)), device="cpu", dtype=dtype)
    examples = make_examples(model, sentences).head(6)
    Updates.run(model, examples, progress=False)


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


@pytest.mark.parametrize("words", ["w7", ["w7", "w30"]])
@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma3"])
def test_sub_updates_that_promote_a_word_are_found_by_trying_all(name, words, small_model, plain_model):
    model, plain, tokenizer = small_model(name), plain_model(name), make_tokenizer(bert=name == "bert")
    blank = "[MASK]" if name in MASKED else "w15"
    examples = make_prompts(model, [f"w3 {blank} w9", f"w3 w14 {blank} w9 w26"])
    updates, chosen = Updates.run(model, examples, [-1, 0], progress=False), (0, N_LAYERS - 1)
    ids = tokenizer.convert_tokens_to_ids([words] if isinstance(words, str) else words)
    for read, normed in ((Projection.from_model(model), False), (Projection.after_norm(model), True)):
        m = [plain_ffn(name, plain, examples, layer, 1)[0] for layer in chosen]
        written = [m[i][:, None] * plain_values(name, plain, layer) for i, layer in enumerate(chosen)]
        lengths = [vectors.norm(dim=1) for vectors in written]
        vectors = plain_norm(name, plain, torch.cat(written)) if normed else torch.cat(written)
        whole = vectors @ plain_unembedding(plain).T
        score, lift = whole[:, ids].mean(1), whole[:, ids].mean(1) - whole.mean(1)
        best = lift.argsort(descending=True)[:6]
        table = updates.promoting(read, words, 6, row=1)
        names = [f"L{chosen[int(i) // D_MLP[name]]}D{int(i) % D_MLP[name]}" for i in best]
        assert table["value"].tolist() == names
        assert [f"L{layer}D{index}" for layer, index in table[["layer", "index"]].to_numpy()] == names
        assert table["score"].tolist() == pytest.approx(score[best].tolist(), rel=1e-3)
        assert table["lift"].tolist() == pytest.approx(lift[best].tolist(), rel=1e-3)
        shares = torch.cat([of_layer / of_layer.sum() for of_layer in lengths])
        assert table["share"].tolist() == pytest.approx(shares[best].tolist(), rel=1e-3)
        scales = torch.cat([updates.scales(i)[1].expand(D_MLP[name]) for i in chosen])
        coefficients = torch.cat(m) / scales
        assert table["coefficient"].tolist() == pytest.approx(coefficients[best].tolist(), rel=1e-3)
    with pytest.raises(InputError):
        updates.promoting(read, words, 2 * D_MLP[name] + 1)
    with pytest.raises(InputError):
        updates.promoting(read, words, row=2)
    with pytest.raises(InputError):
        updates.table(read, row=2)
    with pytest.raises(InputError):
        updates.promoting(Projection.from_model(small_model("llama")), words)


MADE: dict[Reading, Callable[[Any], Projection]] = {
    "plain": Projection.from_model, "head": Projection.through_head
}  # fmt: skip


@pytest.fixture
def folder(request, model_folder, tmp_path, monkeypatch):
    """A folder of a model, and a cache, of this test alone."""
    monkeypatch.setenv("MATLENS_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(model_folder(getattr(request, "param", "llama")), tmp_path / "model"))


def entries() -> list[Any]:
    cache = default_cache()
    assert cache is not None
    return cache.entries()


@pytest.mark.parametrize("folder", ["gpt2", "bert", "granite", "olmo2"], indirect=True)
def test_the_cache_gives_what_the_model_gives(folder, monkeypatch):
    _ = Catalogue(folder, device="cpu").values
    model = matlens.load(folder, device="cpu")
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("the model is loaded"))
    ours, values = Catalogue(folder, device="cpu"), ValueVectors(model)
    assert (len(ours.values), ours.values.d_mlp) == (len(values), values.d_mlp)
    assert ours.values.identity == ModelIdentity.from_model(model)
    assert ours.values.output_kind == values.output_kind
    for layer in range(values.n_layers):
        assert torch.equal(ours.values.layer(layer), values.layer(layer))
        assert torch.equal(ours.values.bias(layer), values.bias(layer))
    with pytest.raises(InputError, match=r"from the cache, without norms. Use ValueVectors\(model\)"):
        ours.values.matrix(0)
    for reading, make in MADE.items():
        projection, expected = ours.projection(reading), make(model)
        assert projection.identity == expected.identity
        table = projection.table(ours.values, ["L1D7", "L-1D0"], k=4)
        pd.testing.assert_frame_equal(table, expected.table(values, ["L1D7", "L-1D0"], k=4))
        top = expected.top_of_all(values, 5, progress=False)
        for attempt in range(2):
            with monkeypatch.context() as patch:
                if attempt:
                    patch.setattr(Projection, "top_of_all", lambda *_, **__: pytest.fail("computed again"))
                cached = Catalogue(folder, device="cpu").top_tokens(reading, k=5, progress=False)
            assert torch.equal(cached.ids, top.ids)
            torch.testing.assert_close(cached.scores, top.scores)  # products of other copies of the weights


def test_a_model_in_memory_is_read_itself(folder):
    Catalogue(folder, device="cpu").projection()
    model = matlens.load(folder, device="cpu")
    with torch.no_grad():
        model.blocks[1].mlp.out.original_component.weight.add_(1)
        model.unembed.original_component.weight.mul_(2)
    ours = Catalogue(model)
    assert torch.equal(ours.values.layer(1), ValueVectors(model).layer(1))
    top = ours.top_tokens(k=3, progress=False)
    expected = Projection.from_model(model).top_of_all(ValueVectors(model), 3, progress=False)
    assert torch.equal(top.scores, expected.scores)
    assert not any(entry.kind == "tops" for entry in entries())


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_precisions_and_stacks_have_entries_of_their_own(folder):
    kinds = (("encoder", torch.float32), ("decoder", torch.float32), ("decoder", torch.bfloat16))
    options: list[dict[str, Any]] = [
        {"device": "cpu", "dtype": dtype, "stack": stack} for stack, dtype in kinds
    ]
    models = [matlens.load(folder, **of_kind) for of_kind in options]
    for model, of_kind in 2 * list(zip(models, options, strict=True)):
        ours = Catalogue(folder, **of_kind).values
        assert ours.identity == ModelIdentity.from_model(model)
        assert torch.equal(ours.layer(0), ValueVectors(model).layer(0))


def test_a_changed_file_is_another_model(folder):
    before = Catalogue(folder, device="cpu").values
    path, weight = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(path)
    tensors[weight] = tensors[weight] + 1
    path.unlink()  # models that are loaded still read the old file
    save_file(tensors, path, metadata={"format": "pt"})
    after = Catalogue(folder, device="cpu").values
    assert before.identity.fingerprint != after.identity.fingerprint
    assert torch.equal(after.layer(1), before.layer(1) + 1)


@pytest.mark.parametrize("folder", ["opt-narrow"], indirect=True)
def test_an_unembedding_of_two_matrices_is_their_product(folder):
    plain = load_plain("opt-narrow", folder)
    expected = plain.lm_head.weight.detach() @ plain.model.decoder.project_out.weight.detach()
    assert expected.shape == (60, D_MODEL)
    for _ in range(2):
        catalogue = Catalogue(folder, device="cpu")
        torch.testing.assert_close(catalogue.projection("plain").unembedding, expected)
        table = catalogue.projection("plain").table(catalogue.values, ["L1D3"], k=2)
        value = plain.model.decoder.layers[1].fc2.weight.detach()[:, 3]
        assert table["token_id"][0] == int((expected @ value).argmax())
    for reading in ("norm", "head"):
        with pytest.raises(InputError, match="has no final norm"):
            catalogue.projection(reading)


def test_a_projection_refuses_value_vectors_of_another_model(small_model):
    projection, other = Projection.from_model(small_model("gpt2")), small_model("llama")
    with pytest.raises(InputError, match="model"):
        projection.table(ValueVectors(other), ["L2D9"], k=3)
    with pytest.raises(InputError, match="model"):
        projection.check_same(Provenance(ModelIdentity.from_model(other)))
