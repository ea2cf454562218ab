"""How text becomes tokens is one policy: the bridge's own, seen in the identity and used for examples."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import ALL_SAMPLED, SMALL, WORDS, make_sentences, make_tokenizer, save_with_ends
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import matlens
from matlens import InputError, MapSet
from matlens.data import Corpus
from matlens.models import ModelIdentity, token_policy
from matlens.models import tokens as module
from matlens.models.tokens import encode_text, token_texts, visible, word_token, word_tokens

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


@pytest.mark.parametrize(("front", "end"), [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_special_tokens_that_a_text_spells_are_not_added_again(front, end, starts, ends, tmp_path):
    model = matlens.load(str(save_with_ends(tmp_path / "model", front=front, end=end)), device="cpu")
    text = " ".join(["w49"] * starts + [TEXT] + ["w48"] * ends)
    ids, added = encode_text(model, text)
    start, own, last = [51] * (front or starts), make_tokenizer()(TEXT)["input_ids"], [50] * (end or ends)
    assert ids == start + own + last
    # Those that are added to every text count as added.
    assert added == [front] * len(start) + [False] * len(own) + [end] * len(last)
    cut = encode_text(model, text, longest=4)
    assert len(cut.ids) == 4
    assert (cut.ids[:1] == start, cut.ids[-1:] == [50]) == ((front or starts), end)


def test_a_text_of_special_tokens_alone_keeps_them(tmp_path):
    model = matlens.load(str(save_with_ends(tmp_path / "model", front=True, end=True)), device="cpu")
    for text, ids in {"w49": [51, 50], "w48": [51, 50], "w49 w48": [51, 50], "w49 w49": [51, 51, 50]}.items():
        read, added = encode_text(model, text)
        assert read == ids
        assert not all(added)


@pytest.mark.parametrize(
    ("by_tokenizer", "prepend"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_a_bridge_adds_no_second_bos_to_a_text_that_has_one(by_tokenizer, prepend, tmp_path):
    folder = save_with_ends(tmp_path / "model", front=by_tokenizer)
    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
    bridge.cfg.default_prepend_bos = prepend
    own = make_tokenizer()(TEXT)["input_ids"]
    assert encode_text(bridge, TEXT).ids == [51] * prepend + own
    assert encode_text(bridge, f"w49 {TEXT}").ids == [51, *own]
    assert encode_text(bridge, f"w49 {TEXT}").added == [prepend] + [False] * 6


def test_masked_models_and_encoders_get_their_special_tokens_once(small_model):
    model = small_model("bert")
    (cls, *own, sep), added = encode_text(model, TEXT)
    for text in (f"[CLS] {TEXT}", f"{TEXT} [SEP]", f"[CLS] {TEXT} [SEP]"):
        assert encode_text(model, text) == ([cls, *own, sep], added)
    prompts = ["[CLS] w1 [MASK] [SEP]", "w1 [MASK]"]
    one, two = (matlens.make_prompts(model, [prompt]) for prompt in prompts)
    assert one.fingerprint == two.fingerprint


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
    pieces = ["<unk>", "▁tea", "tea", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *"tea\n"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    made.add_tokens(["▁wine", "é"])
    return made


def wordpiece() -> PreTrainedTokenizerFast:
    """A tokenizer of words and their parts as BERT's, in lower case."""
    pieces = ["[UNK]", "[SEP]", "tea", "##tea", "te", "##a", ",", "##,", "'", "▁"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = {"unk_token": "[UNK]", "sep_token": "[SEP]", "clean_up_tokenization_spaces": True}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def with_word_ends() -> PreTrainedTokenizerFast:
    """A tokenizer that marks the last piece of a word, as GPT-1's."""
    pieces = ["<unk>", "t", "e", "a", "a</w>", "te", "tea", "tea</w>"]
    merges = [("t", "e"), ("te", "a"), ("te", "a</w>")]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", end_of_word_suffix="</w>"
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.BertPreTokenizer(),
        decoders.BPEDecoder("</w>"),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_level_with_more() -> PreTrainedTokenizerFast:
    """Added tokens with the text of another piece, with bytes' characters, and like an id."""
    tokenizer = byte_level()
    tokenizer.add_tokens([" tea", "é", "Ġx", "<300>", r"\xe2\x82", "▁y"])
    return tokenizer


KINDS = [byte_level, byte_level_with_more, sentencepiece, wordpiece, with_word_ends, ByT5Tokenizer]


@pytest.mark.parametrize("make", KINDS)
def test_the_text_of_a_token_reads_back_as_that_token(make):
    tokenizer = make()
    ids = range(len(tokenizer) + 100)  # as in vocabularies padded to a multiple
    texts = token_texts(tokenizer, ids)
    assert len({*texts}) == len(texts)
    assert [word_token(tokenizer, text) for text in texts] == [*ids]
    shown = [visible(text) for text in texts]
    assert [word_token(tokenizer, text) for text in shown] == [*ids]


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        (byte_level, {"Ġtea": " tea", "Ã©": "é", "âĤ": r"\xe2\x82", "Ġ": " ", "Ċ": "\n"}),
        (byte_level_with_more, {" tea": " tea", "Ġtea": "Ġtea", "Ġx": "Ġx", "é": "é", "▁y": "▁y"}),
        (sentencepiece, {"▁tea": " tea", "tea": "tea", "t": "t", "<0x74>": "<0x74>", "▁": " ", "é": "é"}),
        (sentencepiece, {"<0x41>": "A", "<0x0A>": "<0x0A>", "\n": "\n", "<0xC3>": r"\xc3", "▁wine": "▁wine"}),
        (wordpiece, {"tea": "tea", "##tea": "##tea", ",": ",", "[SEP]": "[SEP]", "▁": "▁"}),
        (with_word_ends, {"tea</w>": "tea", "tea": "tea@@", "a</w>": "a", "a": "a@@", "<unk>": "<unk>"}),
        (ByT5Tokenizer, {"é": r"\xe9", "a": "a", "</s>": "</s>"}),
    ],
)
def test_a_token_has_the_text_it_stands_for(make, pieces):
    tokenizer = make()
    assert token_texts(tokenizer, tokenizer.convert_tokens_to_ids([*pieces])) == [*pieces.values()]


@pytest.mark.parametrize(
    ("make", "word", "piece"), [(wordpiece, "Tea", "tea"), (with_word_ends, "tea", "tea</w>")]
)
def test_a_word_without_a_token_of_its_text_is_read_as_text(make, word, piece):
    tokenizer = make()
    assert word_token(tokenizer, word) == tokenizer.convert_tokens_to_ids(piece)


def test_texts_follow_tokens_that_are_added_later():
    tokenizer = byte_level()
    n = len(tokenizer)
    assert token_texts(tokenizer, [n]) == [f"<{n}>"]
    tokenizer.add_tokens(["wine"])
    assert token_texts(tokenizer, [n]) == ["wine"]
    assert word_token(tokenizer, "wine") == n
    with pytest.raises(InputError, match=f"must be a token of the model, which has {n}"):
        word_token(tokenizer, "wine", n_tokens=n)
    assert token_texts(None, [3]) == ["<3>"]


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
    assert [word_token(sentencepiece(), word) for word in ("tea", " tea", "␣tea")] == [2, 1, 1]
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


def test_every_view_of_a_prediction_shows_the_text_of_its_token(tmp_path):
    torch.manual_seed(0)
    tokenizer = sentencepiece()
    config = SMALL["llama"].config()
    config.vocab_size = size = len(tokenizer) + 6
    plain = AutoModelForCausalLM.from_config(config)
    for weight in plain.parameters():
        weight.data.normal_(std=0.5)
    plain.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = matlens.load(tmp_path, device="cpu")
    lens, last = matlens.Lens.identity(model), model.cfg.n_layers
    trajectory = lens.trajectory("tea tea", k=size)
    assert trajectory.tokens == (" tea", " tea")
    ids = trajectory.top_ids[-1, -1].tolist()
    texts = token_texts(tokenizer, ids)
    assert trajectory.top_tokens()[last][-1] == texts
    for token in (1, 2, tokenizer.convert_tokens_to_ids("<0xC3>"), size - 1):
        (text,) = token_texts(tokenizer, [token])
        assert torch.equal(trajectory.probability(text)[last], trajectory.probability(token)[last])
    table = trajectory.to_dataframe()
    assert table["predicted"].tolist() == token_texts(tokenizer, table["predicted_id"])
    vector = matlens.collect(model, matlens.make_prompts(model, ["tea tea"]), [last], progress=False)[last][0]
    assert [text for text, _ in matlens.Readout(model).top_tokens(vector, size)] == texts
    values, projection = matlens.ValueVectors(model), matlens.Projection.from_model(model)
    table = projection.table(values, ["L0D1"], k=20)
    assert table["token"].tolist() == token_texts(tokenizer, table["token_id"])
    page = matlens.explorer.explore(model, "tea tea", progress=False)
    assert list(page.texts.values()) == [visible(text) for text in token_texts(tokenizer, [*page.texts])]
