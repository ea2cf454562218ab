"""Tokens are told as a person reads them, and words are found as the tokens that they are."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    make_tokenizer,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from matlens import InputError
from matlens.models.tokens import token_texts, word_token, word_tokens


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
        with pytest.raises(InputError, match=r"^words must"):
            word_tokens(make_tokenizer(), none)
    with pytest.raises(InputError, match="'w1 w2' is 2 tokens: 'w1', 'w2'"):
        word_token(make_tokenizer(), "w1 w2")


def test_a_word_with_its_space_is_found_where_every_text_gets_a_space() -> None:
    tokenizer = sentencepiece()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("\0", "isolated")
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(  # as Llama 2's and Mistral's
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.backend_tokenizer.model = models.BPE(
        {piece: i for i, piece in enumerate(["<unk>", "▁tea", "▁", "t", "e", "a", "▁t", "▁te"])},
        [("▁", "t"), ("▁t", "e"), ("▁te", "a")],
        unk_token="<unk>",
    )
    assert tokenizer(" tea", add_special_tokens=False)["input_ids"] == [2, 1]
    assert token_texts(tokenizer, [1]) == [" tea"]
    for word in ("tea", " tea", "␣tea"):
        assert word_token(tokenizer, word) == 1
    with pytest.raises(InputError, match="'␣eat' is"):
        word_token(tokenizer, "␣eat")


def test_the_token_of_unknown_words_is_itself_by_its_own_spelling() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.bos_token = tokenizer.unk_token = "<|end|>"  # as GPT-2 has it
    assert word_token(tokenizer, "<|end|>") == tokenizer.eos_token_id
    assert word_token(make_tokenizer(), "[UNK]") == make_tokenizer().unk_token_id
    with pytest.raises(InputError, match="is not in the model's vocabulary"):
        word_token(make_tokenizer(), "coffee")


def byte_fallback() -> PreTrainedTokenizerFast:
    """A vocabulary of SentencePiece with a piece for every byte, as Llama 2's and Gemma's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁tea", "é"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_bytes_are_written_alike_in_all_vocabularies() -> None:
    level, fallback = byte_level(), byte_fallback()
    for byte in (0x80, 0xA5, 0xE2, 0xFF, 0x0A, 0x00, 0x20, 0x41, 0x7F):
        (ours,) = token_texts(level, level.convert_tokens_to_ids([bytes_to_unicode()[byte]]))
        (theirs,) = token_texts(fallback, fallback.convert_tokens_to_ids([f"<0x{byte:02X}>"]))
        assert ours == theirs == (chr(byte) if byte < 0x80 else f"\\x{byte:02x}")
    assert token_texts(fallback, fallback.convert_tokens_to_ids(["▁tea", "é"])) == [" tea", "é"]
    # In a vocabulary that has such pieces without a decoder of bytes, too.
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<0xE2>": 0}, unk_token="a"))
    )
    assert token_texts(plain, [0]) == [r"\xe2"]


@pytest.mark.refused
def test_what_are_no_tokens_is_refused() -> None:
    for token in (-1, 10**40, 1.5, "a", None):
        with pytest.raises(InputError, match=r"^tokens must be"):
            token_texts(byte_level(), [token])  # type: ignore[list-item]
    for attempt in (lambda: token_texts(b"x", [1]), lambda: word_token(None, "tea")):
        with pytest.raises(InputError, match=r"^tokenizer must be"):
            attempt()
    with pytest.raises(InputError, match=r"^word must be"):
        word_token(byte_level(), 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"is 100000 tokens: .* and 99988 more") as caught:
        word_token(byte_level(), "x" * 100_000)
    assert len(str(caught.value)) < 500
