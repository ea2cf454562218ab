"""How text becomes tokens is one policy: the bridge's own, seen in the identity and used for examples."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import ALL_SAMPLED, WORDS, make_sentences, make_tokenizer, save_with_ends
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import matlens
from matlens import InputError, MapSet
from matlens.data import Corpus
from matlens.models import ModelIdentity, token_policy
from matlens.models import tokens as module
from matlens.models.tokens import encode_text, token_texts, word_token, word_tokens

TEXT = " ".join(WORDS[:6])


@pytest.fixture(autouse=True)
def _all_pieces(monkeypatch):
    monkeypatch.setattr(module, "_SAMPLED", ALL_SAMPLED)


@pytest.mark.parametrize(("front", "end"), [(False, True), (True, False)])
def test_a_loaded_model_reads_what_its_tokenizer_makes(front, end, tmp_path):
    model = matlens.load(str(save_with_ends(tmp_path / "model", front=front, end=end)), device="cpu")
    own = model.tokenizer(TEXT)["input_ids"]
    assert encode_text(model, TEXT).ids == own == model.to_tokens(TEXT)[0].tolist()
    assert encode_text(model, TEXT).added == [True] * front + [False] * 6 + [True] * end
    assert encode_text(model, TEXT, longest=4).ids[:2] == own[:2]
    assert len(encode_text(model, TEXT, longest=4).ids) == 4
    words = [*["'w49' in front"] * front, *["'w48' at the end"] * end]
    assert token_policy(model).words == (" and ".join(words) or "nothing added")


def test_the_digest_tells_policies_and_vocabularies_apart(tmp_path):
    folder = save_with_ends(tmp_path / "model")
    model = matlens.load(str(folder), device="cpu")
    first = token_policy(model)
    assert first == token_policy(matlens.load(str(folder), device="cpu"))
    assert ModelIdentity.from_model(model).tokens == first.digest
    model.cfg.default_prepend_bos = True
    assert token_policy(model).digest != first.digest
    model.cfg.default_prepend_bos = False
    assert token_policy(model) == first
    # Two words change places, neither of them in any text that is probed.
    shutil.copytree(folder, tmp_path / "other")
    read = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = read["model"]["vocab"]
    vocabulary["w7"], vocabulary["w9"] = vocabulary["w9"], vocabulary["w7"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(read))
    other = matlens.load(str(tmp_path / "other"), device="cpu")
    assert token_policy(other).words == first.words
    assert token_policy(other).digest != first.digest


# A bridge of one's own


def test_a_bridge_with_another_policy_is_refused_until_it_is_wrapped(tmp_path):
    folder = str(save_with_ends(tmp_path / "model"))
    model, bridge = (
        matlens.load(folder, device="cpu"),
        TransformerBridge.boot_transformers(folder, device="cpu"),
    )
    examples = matlens.make_examples(model, make_sentences())
    maps = MapSet.fit(matlens.collect(model, examples, progress=False), pairs=[(0, 3)], progress=False)
    for _ in range(2):
        assert token_policy(bridge).words == "'w49' in front"
        with pytest.raises(InputError), matlens.patched(bridge, matlens.jump(maps, 0, 3)):
            pass
        assert matlens.wrap(bridge) is bridge  # as it does, unless it is told otherwise
    matlens.wrap(bridge, prepend_bos=False)
    assert token_policy(bridge) == token_policy(model)
    tokens = model.to_tokens(TEXT)
    assert torch.equal(bridge.to_tokens(TEXT), tokens)
    with matlens.patched(bridge, matlens.jump(maps, 0, 3)):
        logits = bridge(tokens)
    with matlens.patched(model, matlens.jump(maps, 0, 3)):
        assert torch.equal(logits, model(tokens))


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


def test_tokens_are_written_as_a_person_reads_them():
    tokenizer = byte_level()
    pieces = ["Ġtea", "Tea", "Ã©", "âĤ", "Ċ", "x"]
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert token_texts(tokenizer, ids) == [" tea", "Tea", "é", r"\xe2\x82", "\n", "x"]
    assert token_texts(tokenizer, torch.tensor(ids[:2])) == [" tea", "Tea"]
    assert token_texts(sentencepiece(), [1, 2]) == [" tea", "tea"]
    assert token_texts(tokenizer, [9999]) == ["<9999>"]


def test_a_word_is_taken_with_its_space():
    tokenizer = byte_level()
    for word in (" tea", "␣tea"):
        assert word_token(tokenizer, word) == tokenizer.convert_tokens_to_ids("Ġtea")
    assert word_token(sentencepiece(), "tea") == 1
    assert word_tokens(tokenizer, ["␣tea", "Tea", " tea"]) == tokenizer.convert_tokens_to_ids(["Ġtea", "Tea"])


def test_a_word_with_its_space_is_found_where_every_text_gets_a_space():
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
    with pytest.raises(InputError, match="'␣eat' must be one token"):
        word_token(tokenizer, "␣eat")


def test_bytes_are_written_alike_in_all_vocabularies():
    level, values = byte_level(), (0x80, 0xA5, 0xE2, 0xFF, 0x0A, 0x00, 0x20, 0x41, 0x7F)
    pieces = [f"<0x{byte:02X}>" for byte in values]  # as SentencePiece writes them
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")))
    expected = [chr(byte) if byte < 0x80 else f"\\x{byte:02x}" for byte in values]
    assert token_texts(plain, range(len(values))) == expected
    ids = level.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in values])
    assert token_texts(level, ids) == expected


@pytest.mark.parametrize(("front", "end", "prepend"), [(False, True, True), (True, True, False)])
def test_a_bridge_booted_elsewhere_is_followed(front, end, prepend, tmp_path):
    """Whatever the bridge itself reads is what examples are made of."""
    folder = save_with_ends(tmp_path / "model", front=front, end=end)
    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
    bridge.cfg.default_prepend_bos = prepend
    read = bridge.to_tokens(TEXT)[0].tolist()
    assert read == [51] * prepend + make_tokenizer()(TEXT)["input_ids"]
    assert encode_text(bridge, TEXT).ids == read
    assert encode_text(bridge, TEXT).added == [True] * prepend + [False] * 6
    examples = matlens.make_examples(bridge, Corpus("one", (TEXT,), 1, 0, 0, 0), sample_special=False)
    assert examples.tokens.tolist() == read
    assert examples.positions[0] >= prepend
    assert matlens.make_prompts(bridge, [TEXT]).tokens.tolist() == read


def test_the_digest_tells_normalisers_of_few_words_apart(tmp_path):
    model = matlens.load(str(save_with_ends(tmp_path)), device="cpu")
    before = token_policy(model).digest
    model.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert token_policy(model).digest != before
