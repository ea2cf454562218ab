"""Value vectors are the plain model's own weights, and the vocabulary reads them as written out by hand."""

from __future__ import annotations

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
    N_LAYERS,
    SITE_MODULES,
    assert_near,
    load_plain,
    make_tokenizer,
    save_model,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import matlens
from matlens import InputError
from matlens.ffn import projection
from matlens.ffn.overlap import iou, norm_overlap
from matlens.ffn.projection import (
    Projection,
    token_table,
    top_tokens_of_all,
    values_promoting,
    values_with_tokens,
)
from matlens.ffn.values import ValueVector, ValueVectors
from matlens.models.vocabulary import token_texts, word_token, word_tokens

D_MLP = {name: 128 if name in ("gpt2", "gptj") else 48 for name in ARCHITECTURES}
D_VOCAB = 60
K = 7


def plain_values(name: str, plain: Any, layer: int) -> Tensor:
    """Rows of a layer's output matrix: Conv1D keeps it as it multiplies, Linear transposed."""
    block = plain.get_submodule(LAYERS[name][0])[layer]
    weight = block.get_submodule(SITE_MODULES[name]["ffn_post"][0]).weight.detach()
    return weight if name == "gpt2" else weight.T


def all_plain_values(name: str, plain: Any) -> Tensor:
    return torch.cat([plain_values(name, plain, layer) for layer in range(N_LAYERS)])


def plain_unembedding(plain: Any) -> Tensor:
    return plain.get_output_embeddings().weight.detach()


@torch.inference_mode()
def plain_norm(name: str, plain: Any, vectors: Tensor) -> Tensor:
    path = "cls.predictions.transform.LayerNorm" if name == "bert" else LAYERS[name][1]
    return plain.get_submodule(path)(vectors)


# Names


@pytest.mark.parametrize(("text", "value"), [
    ("L0D0", ValueVector(0, 0)), ("L12D3071", ValueVector(12, 3071)), ("l3d5", ValueVector(3, 5)),
    ("L-1D-2", ValueVector(-1, -2)),
    ((4, 7), ValueVector(4, 7)), ([4, 7], ValueVector(4, 7)), (ValueVector(1, 2), ValueVector(1, 2)),
])  # fmt: skip
def test_names_are_read_and_written(text: Any, value: ValueVector) -> None:
    assert ValueVector.parse(text) == value
    assert ValueVector.parse(str(value)) == value


@pytest.mark.parametrize(
    "text", ["", "L3", "D3", "3D4", "L3D", "L3.D4", "L3D4 ", "L1D2D3", (1,), (1, 2, 3), (1.0, 2), 7, None]
)
def test_what_is_no_name_says_what_is(text: Any) -> None:
    with pytest.raises(InputError, match=r"is not a value vector\. Expected L\{layer\}D\{index\}"):
        ValueVector.parse(text)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ranges_are_those_of_the_model(name: str, small_model: Callable[[str], Any]) -> None:
    values = ValueVectors(small_model(name))
    assert (values.n_layers, values.d_mlp, values.d_model) == (N_LAYERS, D_MLP[name], D_MODEL)
    assert len(values) == N_LAYERS * D_MLP[name]
    assert str(values.resolve("L-1D-1")) == f"L{N_LAYERS - 1}D{D_MLP[name] - 1}"
    assert [str(values.at(row)) for row in (0, D_MLP[name], len(values) - 1)] == [
        "L0D0", "L1D0", f"L{N_LAYERS - 1}D{D_MLP[name] - 1}",
    ]  # fmt: skip
    for wrong, told in [
        (f"L{N_LAYERS}D0", f"Layer {N_LAYERS} is out of range: .* in the layers 0 to {N_LAYERS - 1}"),
        (f"L-{N_LAYERS + 1}D0", f"Layer -{N_LAYERS + 1} is .* in the layers 0 to {N_LAYERS - 1}"),
        (f"L0D{D_MLP[name]}", f"of L0D{D_MLP[name]} is out of range: .* vectors 0 to {D_MLP[name] - 1}"),
    ]:
        with pytest.raises(InputError, match=told):
            values.resolve(wrong)
    with pytest.raises(InputError, match="No value vectors are named"):
        values.vectors([])


# Weights


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors_are_the_rows_of_the_plain_output_matrix(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    values, plain = ValueVectors(small_model(name)), plain_model(name)
    for layer in range(N_LAYERS):
        assert torch.equal(values.layer(layer), plain_values(name, plain, layer))
        assert torch.equal(values.norms(layer), plain_values(name, plain, layer).norm(dim=1))
        module = plain.get_submodule(LAYERS[name][0])[layer].get_submodule(SITE_MODULES[name]["ffn_post"][0])
        expected = torch.zeros(D_MODEL) if module.bias is None else module.bias.detach()
        assert torch.equal(values.bias(layer), expected)
        assert bool(expected.any()) == (name not in ("llama", "gemma2", "gemma3"))
    chosen = values.vectors(["L2D5", (0, 3), "L-1D-1"])
    rows = [plain_values(name, plain, layer)[index] for layer, index in ((2, 5), (0, 3), (-1, -1))]
    assert torch.equal(chosen, torch.stack(rows))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_square_output_matrices_are_not_turned_round(name: str, tmp_path: Path) -> None:
    """Where d_mlp is d_model, only what the layer does tells rows from columns."""
    torch.manual_seed(0)
    folder = save_model(name, tmp_path)
    plain = load_plain(name, folder)
    config = plain.config
    setattr(config, "n_inner" if name == "gpt2" else "intermediate_size", D_MODEL)
    plain = type(plain)(config)
    plain.save_pretrained(folder)
    values = ValueVectors(matlens.load(str(folder), device="cpu"))
    assert values.d_mlp == values.d_model == D_MODEL
    assert torch.equal(values.layer(1), plain_values(name, plain, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_half_precision_is_read_in_float32(
    name: str, dtype: torch.dtype, model_folder: Callable[[str], Path]
) -> None:
    model = matlens.load(str(model_folder(name)), device="cpu", dtype=dtype)
    plain = load_plain(name, model_folder(name), dtype=dtype)
    values, read = ValueVectors(model), Projection.from_model(model)
    assert torch.equal(values.layer(1), plain_values(name, plain, 1).float())
    expected = plain_values(name, plain, 1).float() @ plain_unembedding(plain).float().T
    assert read.scores(values.layer(1)).dtype == values.norms(1).dtype == torch.float32
    assert_near(read.scores(values.layer(1)), expected, 1e-6)
    assert Projection.after_norm(model).scores(values.layer(1)).dtype == torch.float32
    assert {parameter.dtype for parameter in model.original_model.parameters()} == {dtype}


def test_blocks_whose_wiring_is_not_known_are_refused(small_model: Callable[[str], Any]) -> None:
    with pytest.raises(InputError, match=r"no value vectors that are known \(its blocks are stream-only\)"):
        ValueVectors(small_model("granite"))


def test_weights_that_the_layer_does_not_use_as_they_are_are_refused(
    model_folder: Callable[[str], Path],
) -> None:
    """As packed weights and adapters do, the layer adds what its weight does not say."""
    model = matlens.load(str(model_folder("llama")), device="cpu")
    layer = model.blocks[1].mlp.out.original_component
    usual = layer.forward
    layer.forward = lambda x: usual(x) * 1.01
    with pytest.raises(InputError, match=r"not a plain matrix of 48 x 32.*without quantisation or adapters"):
        ValueVectors(model)


def test_models_that_cannot_be_read_are_refused(model_folder: Callable[[str], Path]) -> None:
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    del model._modules["ln_final"]
    with pytest.raises(InputError, match="has no final norm"):
        Projection.after_norm(model)
    del model._modules["unembed"]
    for read in (Projection.from_model, Projection.after_norm):
        with pytest.raises(InputError, match=r"has no unembedding.*ForCausalLM or \.\.\.ForMaskedLM"):
            read(model)
    folded = matlens.load(str(model_folder("gpt2")), device="cpu")
    folded.enable_compatibility_mode(disable_warnings=True)
    for read in (ValueVectors, Projection.from_model):
        with pytest.raises(InputError, match="compatibility mode"):
            read(folded)


# Projection


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_are_the_plain_unembedding_times_the_vector(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain = small_model(name), plain_model(name)
    vectors = plain_values(name, plain, 1)
    expected = vectors @ plain_unembedding(plain).T
    assert_near(Projection.from_model(model).scores(vectors), expected, 1e-6)
    assert_near(Projection.from_model(model).scores(vectors[3]), expected[3], 1e-6)
    normed = plain_norm(name, plain, vectors) @ plain_unembedding(plain).T
    assert_near(Projection.after_norm(model).scores(vectors), normed, 1e-6)
    assert not torch.allclose(normed, expected, rtol=1e-2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_odds_change_by_the_exponential_of_the_score_where_the_readout_is_linear(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    """p(w | x + m v) is p(w | x) exp(e_w . m v), normalised (definitions, section 8)."""
    generator = torch.Generator().manual_seed(3)
    head = plain_model(name).get_output_embeddings()
    x, m = torch.randn(5, D_MODEL, generator=generator), 100 * torch.randn(5, 1, generator=generator)
    v = plain_values(name, plain_model(name), 2)[:5]
    with torch.inference_mode():
        before, after = head(x).double().softmax(-1), head(x + m * v).double().softmax(-1)
    scaled = before * (m * Projection.from_model(small_model(name)).scores(v)).double().exp()
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, scaled / scaled.sum(-1, keepdim=True), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("held", [1, D_VOCAB * 5, 2**25])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_streamed_lists_are_those_of_all_scores_at_once(
    name: str,
    held: int,
    small_model: Callable[[str], Any],
    plain_model: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(projection, "_SCORES", held)
    model, plain = small_model(name), plain_model(name)
    whole = all_plain_values(name, plain) @ plain_unembedding(plain).T
    best, order = whole.sort(dim=1, descending=True)
    found = top_tokens_of_all(ValueVectors(model), Projection.from_model(model), k=K, progress=False)
    assert torch.equal(found.ids, order[:, :K])
    assert_near(found.scores, best[:, :K], 1e-6)
    lowest = Projection.from_model(model).bottom(all_plain_values(name, plain), K)
    assert torch.equal(lowest.ids, order.flip(1)[:, :K])
    assert_near(lowest.scores, best.flip(1)[:, :K], 1e-6)


def test_all_scores_are_never_held(
    small_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "_SCORES", D_VOCAB * 5)
    sizes: list[int] = []
    usual = Projection.scores

    def watched(self: Projection, vectors: Tensor) -> Tensor:
        scores = usual(self, vectors)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(Projection, "scores", watched)
    model = small_model("llama")
    top_tokens_of_all(ValueVectors(model), Projection.from_model(model), progress=False)
    assert max(sizes) == 5 * D_VOCAB
    assert sum(sizes) == N_LAYERS * 48 * D_VOCAB


@pytest.mark.parametrize("k", [0, -1, D_VOCAB + 1])
def test_more_tokens_than_there_are_are_refused(k: int, small_model: Callable[[str], Any]) -> None:
    model = small_model("llama")
    with pytest.raises(InputError, match=f"{k} tokens were asked for. Expected 1 to {D_VOCAB}"):
        Projection.from_model(model).top(torch.zeros(2, D_MODEL), k)


def test_the_table_has_both_ends_of_each_vector(
    small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain, tokenizer = small_model("gpt2"), plain_model("gpt2"), make_tokenizer()
    table = token_table(ValueVectors(model), Projection.from_model(model), ["L2D9", (0, -1)], k=3)
    assert tuple(table.columns) == projection.COLUMNS
    assert len(table) == 12
    for name, layer, index in (("L2D9", 2, 9), ("L0D127", 0, 127)):
        scores = plain_values("gpt2", plain, layer)[index] @ plain_unembedding(plain).T
        for side, order in (("top", scores.argsort(descending=True)), ("bottom", scores.argsort())):
            own = table[(table["value"] == name) & (table["side"] == side)]
            assert own["token_id"].tolist() == order[:3].tolist()
            # The unembedding has rows for which the tokenizer has no token.
            texts = [tokenizer.decode([token]) or f"<{token}>" for token in order[:3].tolist()]
            assert own["token"].tolist() == texts
            assert own["score"].tolist() == pytest.approx(scores[order[:3]].tolist(), rel=1e-4, abs=1e-6)
            assert own["rank"].tolist() == [1, 2, 3]
            assert set(zip(own["layer"], own["index"], strict=True)) == {(layer, index)}


# The reverse


@pytest.mark.parametrize("words", [["w7"], ["w7", "w30", "w11"]])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_what_promotes_words_most_is_found_as_by_trying_all(
    name: str, words: list[str], small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain, tokenizer = small_model(name), plain_model(name), make_tokenizer(bert=name == "bert")
    values, ids = ValueVectors(model), tokenizer.convert_tokens_to_ids(words)
    for read, normed in ((Projection.from_model(model), False), (Projection.after_norm(model), True)):
        vectors = all_plain_values(name, plain)
        vectors = plain_norm(name, plain, vectors) if normed else vectors
        whole = vectors @ plain_unembedding(plain).T
        score, lift = whole[:, ids].mean(1), whole[:, ids].mean(1) - whole.mean(1)
        best = lift.argsort(descending=True)[:6]
        found = values_promoting(values, read, words, n=6, progress=False)
        assert found["value"].tolist() == [str(values.at(int(row))) for row in best]
        assert found["score"].tolist() == pytest.approx(score[best].tolist(), rel=1e-4)
        assert found["lift"].tolist() == pytest.approx(lift[best].tolist(), rel=1e-4)
        for value, layer, index in found[["value", "layer", "index"]].itertuples(index=False, name=None):
            assert value == f"L{layer}D{index}"


@pytest.mark.parametrize("words", [["w7"], ["w7", "w30", "w11"]])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_search_finds_every_list_that_has_a_word(
    name: str, words: list[str], small_model: Callable[[str], Any]
) -> None:
    model, tokenizer = small_model(name), make_tokenizer(bert=name == "bert")
    values, read = ValueVectors(model), Projection.from_model(model)
    tokens = top_tokens_of_all(values, read, k=K, progress=False)
    expected = []
    for row, ids in enumerate(tokens.ids.tolist()):
        texts = [tokenizer.decode([token]) for token in ids]
        ranks = [texts.index(word) + 1 for word in words if word in texts]
        if ranks:
            score = float(tokens.scores[row, min(ranks) - 1])
            expected.append((str(values.at(row)), len(ranks), min(ranks), score))
    expected.sort(key=lambda one: (-one[1], one[2], -one[3]))
    found = values_with_tokens(values, read, tokens, words)
    columns = found[["value", "words", "rank", "score"]].itertuples(index=False, name=None)
    assert list(columns) == expected
    assert 0 < len(found) < len(values)


def test_a_word_in_no_list_gives_an_empty_table(small_model: Callable[[str], Any]) -> None:
    model = small_model("gpt2")
    values, read = ValueVectors(model), Projection.from_model(model)
    nothing = projection.TopTokens(torch.zeros(len(values), 2, dtype=torch.long), torch.zeros(len(values), 2))
    found = values_with_tokens(values, read, nothing, ["w7"])
    assert found.columns.tolist() == ["value", "layer", "index", "words", "rank", "score"]
    assert found.empty
    with pytest.raises(
        InputError, match=r"Top tokens of 3 vectors for 384 value vectors\. Expected those of all"
    ):
        values_with_tokens(values, read, read.top(values.layer(0)[:3]), ["w7"])


@pytest.mark.parametrize("n", [0, 10_000])
def test_more_vectors_than_there_are_are_refused(n: int, small_model: Callable[[str], Any]) -> None:
    model = small_model("llama")
    with pytest.raises(InputError, match=f"{n} value vectors were asked for. Expected 1 to 144"):
        values_promoting(ValueVectors(model), Projection.from_model(model), ["w7"], n=n)


# Words


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes as GPT-2's, in which " tea" and "Tea" are tokens and "tea" is not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ġt", "e"), ("Ġte", "a"), ("T", "e"), ("Te", "a"), ("Ã", "©"), ("â", "Ĥ")]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before every text and drops it when it decodes, as Llama 2's."""
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "▁tea", "tea", "▁"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_tokens_are_written_as_a_person_reads_them() -> None:
    tokenizer = byte_level()
    pieces = ["Ġtea", "Tea", "Ã©", "âĤ", "Ċ", "x"]
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert token_texts(tokenizer, ids) == [" tea", "Tea", "é", r"\xe2\x82", "\n", "x"]
    assert token_texts(tokenizer, torch.tensor(ids[:2])) == [" tea", "Tea"]
    assert token_texts(sentencepiece(), [1, 2]) == [" tea", "tea"]
    assert token_texts(tokenizer, [9999]) == ["<9999>"]


@pytest.mark.parametrize("word", [" tea", "␣tea"])
def test_a_word_is_taken_with_its_space(word: str) -> None:
    tokenizer = byte_level()
    assert word_token(tokenizer, word) == tokenizer.convert_tokens_to_ids("Ġtea")
    assert word_token(sentencepiece(), "tea") == 1
    assert word_tokens(tokenizer, [word, "Tea", " tea"]) == tokenizer.convert_tokens_to_ids(["Ġtea", "Tea"])


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("tea", "'tea' is 3 tokens: 't', 'e', 'a'. Expected a word that is one token; these are: '␣tea'"),
        (" TEA", "'␣TEA' is 4 tokens: '␣', 'T', 'E', 'A'. Expected a word that is one token; these are"),
        ("of", "'of' is 2 tokens: 'o', 'f'. Expected a word that is one token; one of its parts is."),
    ],
)  # fmt: skip
def test_a_word_of_several_tokens_is_told_with_the_choice(word: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        word_token(byte_level(), word)
    assert told in str(caught.value)


def test_words_that_are_not_there_are_told() -> None:
    for word in ("coffee", "", " "):
        with pytest.raises(InputError, match="is not in the model's vocabulary"):
            word_token(make_tokenizer(), word)
    for none in ([], "w1"):
        with pytest.raises(InputError, match=r"No words are given\. Expected a list"):
            word_tokens(make_tokenizer(), none)
    with pytest.raises(InputError, match="'w1 w2' is 2 tokens: 'w1', 'w2'"):
        word_token(make_tokenizer(), "w1 w2")


# Overlap (Figure 4)


def test_iou_by_hand() -> None:
    one = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    other = torch.tensor([[4, 3, 2, 1], [5, 6, 7, 8], [9, 4, 8, 2]])
    assert iou(one, other).tolist() == pytest.approx([1, 0, 2 / 6])
    with pytest.raises(InputError, match="cannot be compared"):
        iou(one, other[:, :3])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_overlap_is_that_of_the_plain_models_lists(
    name: str, small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain = small_model(name), plain_model(name)
    table = norm_overlap(model, n_random=20, k=K, seed=2, progress=False)
    assert table["n"].tolist() == [D_MLP[name], 20] * N_LAYERS
    assert table["method"].tolist() == ["values", "random"] * N_LAYERS
    assert (set(table["metric"]), set(table["k"])) == ({"iou"}, {K})
    drawn = [ValueVectors(model).random(layer, 20, seed=2) for layer in range(N_LAYERS)]
    real = [plain_values(name, plain, layer) for layer in range(N_LAYERS)]
    e = plain_unembedding(plain)
    for method, vectors in (("values", real), ("random", drawn)):
        for layer, own in enumerate(vectors):
            first = (own @ e.T).topk(K).indices.tolist()
            second = (plain_norm(name, plain, own) @ e.T).topk(K).indices.tolist()
            each = [len({*a} & {*b}) / len({*a} | {*b}) for a, b in zip(first, second, strict=True)]
            (row,) = table[(table["method"] == method) & (table["layer"] == layer)].itertuples()
            assert row.value == pytest.approx(sum(each) / len(each))
            assert row.low <= row.value <= row.high


def test_layers_may_be_numpy_integers(small_model: Callable[[str], Any]) -> None:
    values = ValueVectors(small_model("llama"))
    for layer in np.arange(-N_LAYERS, N_LAYERS):
        assert torch.equal(values.random(layer, 3), values.random(int(layer), 3))
        assert torch.equal(values.layer(layer), values.layer(int(layer)))


def test_random_vectors_look_like_the_layer_and_are_the_seeds_own(small_model: Callable[[str], Any]) -> None:
    values = ValueVectors(small_model("gpt2"))
    drawn, real = values.random(1, 50_000, seed=4), values.layer(1)
    deviation = real.std(0)
    assert ((drawn.mean(0) - real.mean(0)).abs() / deviation).max() < 0.03
    assert ((drawn.std(0) - deviation).abs() / deviation).max() < 0.03
    assert torch.equal(drawn, values.random(-2, 50_000, seed=4))
    assert torch.equal(drawn[:3], values.random(1, 50_000, seed=4)[:3])
    for other in (values.random(1, 5, seed=5), values.random(0, 5, seed=4)):
        assert not torch.allclose(drawn[:5], other)
    with pytest.raises(InputError, match="0 random vectors were asked for"):
        values.random(0, 0)
