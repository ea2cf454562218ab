"""A model's texts become the tokens of its tokenizer.json, whatever class its type has in transformers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece as spm
import transformers
from conftest import SMALL, WORDS, save_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformer_lens.model_bridge import TransformerBridge

import matlens
from matlens import InputError
from matlens.models.checkpoints import read_tokenizer

TEXTS = [
    "w1 w2  w3", " the cat", "Hello don't 1234,5", "  two\n\n x", "日本語 🙂 café", "The THE the",
    "<s> a [MASK]", "w1 w2:\n\n1 w3  2",
]  # fmt: skip
SPECIAL = ["[UNK]", "[PAD]", "[MASK]", "<s>", "<|endoftext|>"]


def of_words() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def of_bytes(*, prefix: bool = False, digits: bool = False, lowercase: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    split = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level]) if digits else level
    tokenizer.decoder = decoders.ByteLevel()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    return tokenizer


def with_bos() -> Tokenizer:
    tokenizer = of_bytes()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    return tokenizer


FILES: dict[str, Callable[[], Tokenizer]] = {
    "words": of_words, "bytes": of_bytes, "prefix": lambda: of_bytes(prefix=True),
    "digits": lambda: of_bytes(digits=True), "lowercase": lambda: of_bytes(lowercase=True), "bos": with_bos,
}  # fmt: skip
TYPES = ("qwen2", "gpt2", "gpt_neox", "llama", "gemma2", "bert", "roberta", "t5", "opt", "phi3", "mistral")


def folder_of(path: Path, model_type: str, tokenizer: Tokenizer, declared: bool) -> Path:
    path.mkdir()
    transformers.AutoConfig.for_model(model_type).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    if declared:
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<s>", chat_template="{{ messages }}"
        )
        fast.save_pretrained(path)
    return path


@pytest.mark.parametrize("declared", [False, True], ids=["only the file", "with its class"])
@pytest.mark.parametrize("file", FILES)
def test_tokens_are_those_of_the_file(file, declared, tmp_path):
    tokenizer = FILES[file]()
    for model_type in TYPES:
        ours = read_tokenizer(str(folder_of(tmp_path / model_type, model_type, tokenizer, declared)))
        for text in TEXTS:
            expected = tokenizer.encode(text).ids
            assert ours(text)["input_ids"] == expected, (model_type, text)
            assert ours.decode(expected) == tokenizer.decode(expected, skip_special_tokens=False)
        assert ours.get_vocab() == tokenizer.get_vocab(), model_type
        if declared:
            assert (ours.eos_token, ours.chat_template) == ("<s>", "{{ messages }}")


def test_special_tokens_that_the_file_has_are_kept(tmp_path):
    tokenizer = of_bytes(digits=True)
    ours = read_tokenizer(str(folder_of(tmp_path / "model", "qwen2", tokenizer, False)))
    assert ours.eos_token_id == tokenizer.token_to_id("<|endoftext|>")


def test_tokens_that_the_configuration_adds_are_kept(tmp_path):
    folder = folder_of(tmp_path / "model", "gpt2", of_bytes(), True)
    path = folder / "tokenizer_config.json"
    added = {"content": "<new>", "special": True, "lstrip": False, "rstrip": False, "normalized": False,
             "single_word": False}  # fmt: skip
    settings = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"400": added}}
    path.write_text(json.dumps(settings))
    ours, theirs = read_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    assert [ours(text)["input_ids"] for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]
    assert ours("<new>")["input_ids"] == theirs("<new>")["input_ids"]


def test_published_classes_that_agree_with_their_file_stay(tmp_path):
    """With BOS and EOS as they decide."""
    tokenizer = of_bytes()
    vocabulary = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in vocabulary["merges"]]
    published = transformers.GPT2Tokenizer(vocab=vocabulary["vocab"], merges=merges)
    published.save_pretrained(tmp_path)
    transformers.GPT2Config().save_pretrained(tmp_path)
    assert type(read_tokenizer(str(tmp_path))) is transformers.GPT2Tokenizer


def sentencepiece_model(*, prefix: bool) -> spm.SentencePieceProcessor:
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20), model_writer=written, vocab_size=320, model_type="bpe",
        byte_fallback=True, add_dummy_prefix=prefix, normalization_rule_name="identity", bos_id=1, eos_id=2,
        unk_id=0, hard_vocab_limit=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    return spm.SentencePieceProcessor(model_proto=written.getvalue())


@pytest.mark.parametrize("declared", [None, "LlamaTokenizer"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "phi3"])
def test_words_of_a_sentencepiece_model_are_its_own(model_type, declared, tmp_path):
    """A folder with tokenizer.model alone, with and without a space before the first word."""
    for prefix in (True, False):
        folder, model = tmp_path / str(prefix), sentencepiece_model(prefix=prefix)
        folder.mkdir()
        transformers.AutoConfig.for_model(model_type).save_pretrained(folder)
        (folder / "tokenizer.model").write_bytes(model.serialized_model_proto())
        if declared:
            (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": declared}))
        ours = read_tokenizer(str(folder))
        for text in ("a cat", "Hello don't 1234,5", "The THE the", "w1 w2"):
            assert ours.encode(text, add_special_tokens=False) == model.encode(text)


@pytest.fixture
def words_in_qwen2(tmp_path):
    """A folder whose model type has a class that does not fit its tokenizer.json."""
    config = transformers.Qwen2Config(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    save_model("llama", tmp_path)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def test_load_reads_texts_as_the_file_does(words_in_qwen2):
    model = matlens.load(words_in_qwen2, device="cpu")
    text = " ".join(WORDS[4:9])
    expected = Tokenizer.from_file(str(words_in_qwen2 / "tokenizer.json")).encode(text).ids
    assert matlens.make_examples(model, [text]).tokens.tolist() == expected
    assert model.to_tokens(text)[0].tolist() == expected


def test_wrap_refuses_a_tokenizer_unlike_its_file(words_in_qwen2):
    bridge = TransformerBridge.boot_transformers(str(words_in_qwen2), device="cpu")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        matlens.wrap(bridge)
    own = transformers.PreTrainedTokenizerFast.from_pretrained(words_in_qwen2)
    text = " ".join(WORDS[4:9])
    assert matlens.wrap(bridge, tokenizer=own).to_tokens(text)[0].tolist() == own(text)["input_ids"]


@pytest.mark.parametrize("name", ["gpt2", "bert", "roberta", "gemma2"])
def test_wrap_accepts_tokenizers_of_their_file(name, model_folder):
    assert name in SMALL
    bridge = TransformerBridge.boot_transformers(str(model_folder(name)), device="cpu")
    assert matlens.wrap(bridge) is bridge
