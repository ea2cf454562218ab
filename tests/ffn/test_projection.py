"""The vocabulary reads vectors as written out by hand, and finds the value vectors that a word needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, D_MODEL, N_LAYERS, assert_near, make_tokenizer
from plain_values import D_VOCAB, all_plain_values, plain_norm, plain_unembedding, plain_values
from torch.utils._python_dispatch import TorchDispatchMode

from matlens import InputError
from matlens.ffn import projection
from matlens.ffn.projection import (
    Projection,
    token_table,
    top_tokens_of_all,
    values_promoting,
    values_with_tokens,
)
from matlens.ffn.values import ValueVectors

K = 7


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
    """p(w | x + m v) is p(w | x) exp(e_w . m v), normalised (definitions)."""
    generator = torch.Generator().manual_seed(3)
    head = plain_model(name).get_output_embeddings()
    x, m = torch.randn(5, D_MODEL, generator=generator), 100 * torch.randn(5, 1, generator=generator)
    v = plain_values(name, plain_model(name), 2)[:5]
    with torch.inference_mode():
        before, after = head(x).double().softmax(-1), head(x + m * v).double().softmax(-1)
    scaled = before * (m * Projection.from_model(small_model(name)).scores(v)).double().exp()
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, scaled / scaled.sum(-1, keepdim=True), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("way", [Projection.from_model, Projection.after_norm])
def test_a_model_without_words_is_refused(
    way: Callable[[Any], Any], small_model: Callable[[str], Any]
) -> None:
    with pytest.raises(InputError, match="has no tokenizer"):
        way(small_model("vit"))


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
    tokens = top_tokens_of_all(ValueVectors(model), Projection.from_model(model), k=K, progress=False)
    assert torch.equal(tokens.ids, order[:, :K])
    assert_near(tokens.scores, best[:, :K], 1e-6)
    lowest = Projection.from_model(model).bottom(all_plain_values(name, plain), K)
    assert torch.equal(lowest.ids, order.flip(1)[:, :K])
    assert_near(lowest.scores, best.flip(1)[:, :K], 1e-6)


def test_all_scores_are_never_held(
    small_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "_SCORES", D_VOCAB * 5)
    sizes: list[int] = []

    class Products(TorchDispatchMode):
        """Keeps the sizes of all products of matrices."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if any(name in str(function) for name in ("mm", "matmul")):
                sizes.append(result.numel())
            return result

    model = small_model("llama")
    values, read = ValueVectors(model), Projection.from_model(model)
    with Products():
        top_tokens_of_all(values, read, progress=False)
    assert max(sizes) == 5 * D_VOCAB
    assert sum(sizes) == N_LAYERS * 48 * D_VOCAB


@pytest.mark.parametrize("k", [0, -1, D_VOCAB + 1])
def test_more_tokens_than_there_are_are_refused(k: int, small_model: Callable[[str], Any]) -> None:
    model = small_model("llama")
    with pytest.raises(InputError, match=f"^k must be an integer from 1 to {D_VOCAB}, got {k}"):
        Projection.from_model(model).top(torch.zeros(2, D_MODEL), k)


def test_the_table_has_both_ends_of_each_vector(
    small_model: Callable[[str], Any], plain_model: Callable[[str], Any]
) -> None:
    model, plain, tokenizer = small_model("gpt2"), plain_model("gpt2"), make_tokenizer()
    table = token_table(ValueVectors(model), Projection.from_model(model), ["L2D9", (0, -1)], k=3)
    assert tuple(table.columns) == projection.TOKEN_COLUMNS
    assert len(table) == 12
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
        promoting = values_promoting(values, read, words, n=6, progress=False)
        assert promoting["value"].tolist() == [str(values.at(int(row))) for row in best]
        assert promoting["score"].tolist() == pytest.approx(score[best].tolist(), rel=1e-4)
        assert promoting["lift"].tolist() == pytest.approx(lift[best].tolist(), rel=1e-4)
        for value, layer, index in promoting[["value", "layer", "index"]].itertuples(index=False, name=None):
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
    table = values_with_tokens(values, read, tokens, words)
    columns = table[["value", "words", "rank", "score"]].itertuples(index=False, name=None)
    assert list(columns) == expected
    assert 0 < len(table) < len(values)


def test_a_word_in_no_list_gives_an_empty_table(small_model: Callable[[str], Any]) -> None:
    model = small_model("gpt2")
    values, read = ValueVectors(model), Projection.from_model(model)
    nothing = projection.TopTokens(torch.zeros(len(values), 2, dtype=torch.long), torch.zeros(len(values), 2))
    table = values_with_tokens(values, read, nothing, ["w7"])
    assert table.columns.tolist() == ["value", "layer", "index", "words", "rank", "score"]
    assert table.empty
    with pytest.raises(
        InputError, match=r"Top tokens of 3 vectors for 384 value vectors\. Expected those of all"
    ):
        values_with_tokens(values, read, read.top(values.layer(0)[:3]), ["w7"])


@pytest.mark.parametrize("n", [0, 10_000])
def test_more_vectors_than_there_are_are_refused(n: int, small_model: Callable[[str], Any]) -> None:
    model = small_model("llama")
    with pytest.raises(
        InputError, match=f"The number of value vectors must be an integer from 1 to 144, got {n}"
    ):
        values_promoting(ValueVectors(model), Projection.from_model(model), ["w7"], n=n)
