"""Scores, top tokens and searches are those written out from the plain weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import D_MODEL, assert_near, make_tokenizer
from plain_values import D_VOCAB, all_plain_values, plain_norm, plain_unembedding, plain_values

from matlens import InputError
from matlens.ffn import projection
from matlens.ffn.projection import Projection, TopTokens
from matlens.ffn.values import ValueVectors

Models = Callable[[str], Any]
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
