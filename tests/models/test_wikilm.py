"""WikiLM is what its weights compute by torch alone, from fairseq's files, also behind a bridge."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_near, make_sentences
from fairseq_by_hand import BANDS, EMBEDDINGS, LAYERS, N_WORDS, SOFTMAX, run, save, settings, weights
from torch import Tensor
from training.wikilm import write_wikilm

import matlens
from matlens import InputError, ffn
from matlens.models import ModelIdentity, ModelLayout, active_hooks, token_policy
from matlens.models.families.dictionary import SPECIAL, WordDictionary, words_of
from matlens.models.families.fairseq import read_wikilm
from matlens.models.sizes import read_sizes

SENTENCES = [[2, 5, 40, 17, 55, 6, 31], [2, 13, 14], [2, 30, 29, 8, 9]]
HEAD = f"{SOFTMAX}.head.word_proj.weight"
WITH_NORM = settings(no_decoder_final_norm=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("wikilm"))


@pytest.fixture(scope="module")
def plain(path):
    return read_wikilm(path)[0]


@pytest.fixture(scope="module")
def model(path):
    return matlens.load(path, device="cpu")


def by_hand(tokens: list[int] = SENTENCES[0], args: Any = None) -> dict[str, Tensor]:
    args = settings() if args is None else args
    return run(args, weights(args), tokens)


def tokens_of(sentence: str) -> list[int]:
    return [2, *(4 + int(word[1:]) for word in sentence.split())]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Equal but for rounding, of values of up to 32 in float32."""
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def logits_of(path: Path) -> Tensor:
    model, dictionary = read_wikilm(path)
    assert len(dictionary) == model.config.vocab_size == N_WORDS
    return model(torch.tensor(SENTENCES[:1])).logits[0]


# The model


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side_changes_nothing(plain, side):
    length = max(map(len, SENTENCES))
    tokens, mask = torch.ones(3, length, dtype=torch.int64), torch.zeros(3, length, dtype=torch.int64)
    spans = [slice(0, len(s)) if side == "right" else slice(length - len(s), length) for s in SENTENCES]
    for row, (span, sentence) in enumerate(zip(spans, SENTENCES, strict=True)):
        tokens[row, span], mask[row, span] = torch.tensor(sentence), 1
    with torch.no_grad():
        logits = plain(tokens, attention_mask=mask).logits
    for row, (span, sentence) in enumerate(zip(spans, SENTENCES, strict=True)):
        assert_close(logits[row, span], by_hand(sentence)["logits"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_its_probabilities_sum_to_one_in_half_precision(dtype, path):
    half = read_wikilm(path, dtype=dtype)[0]
    with torch.no_grad():
        total = half(torch.tensor([SENTENCES[0]])).logits.double().exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-4)


def test_generation_takes_the_likeliest_word_each_time(plain):
    """With a cache, and padding on the left."""
    tokens = [2, 5]
    for _ in range(4):
        tokens.append(int(by_hand(tokens)["logits"][-1].argmax()))
    made = plain.generate(
        torch.tensor([[1, 2, 5]]), attention_mask=torch.tensor([[0, 1, 1]]), max_new_tokens=4,
        min_new_tokens=4, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert made[0, 1:].tolist() == tokens


# Behind a bridge


def test_every_site_carries_what_the_weights_compute(model, path):
    layout, sentences = ModelLayout.from_model(model), make_sentences().sentences
    assert (layout.wiring.name, layout.n_layers, layout.d_model, layout.d_mlp) == ("pre-norm", 3, 16, 24)
    assert active_hooks(model) == ()
    assert token_policy(model).words == "'</s>' in front"
    samples = matlens.collect(
        model, matlens.make_examples(model, make_sentences()), sites=layout.sites, progress=False
    )
    tensors, values, readout = weights(settings()), ffn.ValueVectors(model), matlens.Readout(model)
    expected = [by_hand(tokens_of(sentence)) for sentence in sentences]
    positions = samples.examples.positions
    for site in expected[0].keys() - {"logits"}:
        rows = [vectors[site][position] for vectors, position in zip(expected, positions, strict=True)]
        assert_near(samples[site], torch.stack(rows))
    for layer in range(LAYERS):
        second = tensors[f"decoder.layers.{layer}.fc2.weight"].T
        torch.testing.assert_close(values.layer(layer), second)
    logits = torch.stack([e["logits"][position] for e, position in zip(expected, positions, strict=True)])
    h = samples[f"h.{LAYERS}"]
    assert_close(readout.log_probs(h), logits)
    tops, ranks = readout.top_ids_and_ranks(h, torch.full((len(h),), 40))
    assert tops.tolist() == logits.argmax(1).tolist()
    assert ranks.tolist() == (1 + (logits > logits[:, 40:41]).sum(1)).tolist()
    some = torch.tensor([3, 17, 50])
    assert_close(readout.logits(h, tokens=some), logits[:, some])


def test_value_vectors_are_read_by_the_whole_unembedding(model):
    """Each word's row, with the projection of its band where that is not the first."""
    tensors, rows, projection = weights(settings()), [], ffn.Projection.from_model(model)
    for band in range(len(BANDS)):
        for word in tensors[f"{EMBEDDINGS}.{band}.0.weight"]:
            rows.append(tensors[f"{EMBEDDINGS}.{band}.1.weight"] @ word if band else word)
    torch.testing.assert_close(projection.unembedding, torch.stack(rows))
    value = ffn.ValueVectors(model).layer(1)
    assert_close(projection.scores(value), value @ torch.stack(rows).T)


def test_a_norm_after_the_last_block_is_part_of_the_readout(tmp_path):
    model = matlens.load(save(tmp_path, WITH_NORM), device="cpu")
    seen = by_hand(args=WITH_NORM)
    assert_close(matlens.Readout(model).log_probs(seen[f"h.{LAYERS}"]), seen["logits"])
    assert ffn.Projection.after_norm(model).norm is not None


def test_passes_longer_than_the_context_leave_the_model_as_it_is(path):
    model = matlens.load(path, device="cpu")
    positions, before = model.original_model.model.embed_positions, ModelIdentity.from_model(model)
    model(torch.full((1, 60), 5), return_type="logits")
    assert len(positions.weights) > 50
    assert ModelIdentity.from_model(model) == before


# Checkpoints


def test_a_checkpoint_is_written_as_fairseq_does(path, tmp_path):
    """The file that is written is loaded by torch alone, and run by hand."""
    again = write_wikilm(*read_wikilm(path), tmp_path)
    written = torch.load(again, weights_only=False)
    assert isinstance(written["args"], Namespace)
    assert written["args"].arch == "transformer_lm_wiki103"
    expected = by_hand()["logits"]
    torch.testing.assert_close(run(written["args"], written["model"], SENTENCES[0])["logits"], expected)
    assert_close(logits_of(again), expected)
    assert (tmp_path / "dict.txt").read_text() == (path.parent / "dict.txt").read_text()


def test_old_names_and_half_precision_are_read(tmp_path):
    args = settings()
    tensors = {name: tensor.half() for name, tensor in weights(args).items()}
    expected = run(args, {name: tensor.float() for name, tensor in tensors.items()}, SENTENCES[0])["logits"]
    for layer in range(args.decoder_layers):
        place = f"decoder.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{place}.self_attn.{letter}_proj.{kind}") for letter in "qkv"]
            tensors[f"{place}.self_attn.in_proj_{kind}"] = torch.cat(parts)
            for number, norm in ((0, "self_attn_layer_norm"), (2, "final_layer_norm")):
                tensors[f"{place}.layer_norms.{number}.{kind}"] = tensors.pop(f"{place}.{norm}.{kind}")
    assert_close(logits_of(save(tmp_path, args, tensors)), expected)


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(("where", "zipped"), [("args", True), ("extra_state", True), ("model", False)])
def test_code_in_a_checkpoint_is_refused_and_not_run(where, zipped, tmp_path):
    path = save(tmp_path)
    content = torch.load(path, weights_only=False) | {where: Harm(tmp_path / "done")}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=r"mkdir, which may be code"):
        read_wikilm(path)
    assert not (tmp_path / "done").exists()


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in weights(settings()).items() if key != name}


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


OTHERS: list[tuple[Any, Any, str]] = [
    (settings(adaptive_input_cutoff=None), None, "cannot be used"),
    (settings(add_bos_token=True), None, "add_bos_token"),
    (settings(max_target_positions=10**6), weights(settings()), "positions"),
    (settings(decoder_layers=10**9), weights(settings()), "decoder_layers"),
    (settings(), weights(settings()) | {HEAD: torch.ones(14, 16)}, "must be equal"),
    ("args", weights(settings()), "cannot be used"),
]


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (_half, "truncated"),
    (lambda path: (path.parent / "dict.txt").write_text("a 1\n"), "cutoffs must"),
]


def test_other_models_and_damaged_files_are_refused(tmp_path):
    for args, tensors, reason in OTHERS:
        with pytest.raises(InputError, match=reason):
            read_wikilm(save(tmp_path, args, tensors))
    for number, (damage, reason) in enumerate(DAMAGE):
        path = save(tmp_path / str(number))
        assert read_sizes(str(path))["d_vocab"] == N_WORDS
        damage(path)
        with pytest.raises(InputError):
            read_sizes(str(path))
        with pytest.raises(InputError, match=reason):
            read_wikilm(path)


# Dictionaries

TEXTS = {
    "The well-known 1,000 men didn't go, at 3.5 km.":
        "The well @-@ known 1 @,@ 000 men didn 't go , at 3 @.@ 5 km .",
    "It's 'old' (sic)": "It 's ' old ' ( sic )",
    "a well @-@ known <unk> , it 's 1 @,@ 000": "a well @-@ known <unk> , it 's 1 @,@ 000",
    "Straße — 日本": "Straße — 日本",
}  # fmt: skip


def made_of(counts: dict[str, int]) -> WordDictionary:
    own = {word: count for word, count in counts.items() if word not in SPECIAL}
    return WordDictionary((*SPECIAL, *own), (*(0,) * len(SPECIAL), *own.values()))


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_taken_apart_as_in_wikitext(text):
    words = TEXTS[text].split()
    assert words_of([text]) == [words]
    numbered = made_of(dict.fromkeys(words, 1))
    ids = numbered.tokenizer()(text)["input_ids"]
    assert [numbered.words[i] for i in ids] == ["</s>", *words]
    assert numbered.tokenizer().decode(ids[1:]) == " ".join(words)


def test_words_of_the_dictionary_stay_whole_between_spaces():
    """Words of WikiText have signs in them; a last word with its full stop does not count, though seen."""
    seen = {
        "U.S.": 900,
        "H.": 40,
        "H": 30,
        "...": 5,
        ".": 9000,
        "in": 80,
        "the": 80,
        "album.": 3,
        "album": 400,
        "No": 9,
        "No.": 9,
        "a^b|c": 2,
        "@-@": 7,
        '"': 8,
        "based": 2,
        "vol.": 9,
        "vol": 80,
    }
    dictionary = made_of(seen)
    tokenizer = dictionary.tokenizer()
    apart = 'the U.S. @-@ based H. album . No. ... a^b|c "'
    for text, words in {
        apart: apart.split(),
        "in the U.S. No... album.": ["in", "the", "U.S.", "No", ".", ".", ".", "album", "."],
        "vol. in": ["vol.", "in"],
        "a^bc 5.5": ["<unk>", "<unk>", "<unk>", "<unk>", ".", "<unk>"],  # no @.@ where there is none
    }.items():
        assert [dictionary.words[i] for i in tokenizer(text).input_ids[1:]] == words, text


def test_dictionaries_are_read_and_others_refused(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text("the 10\nof a 3\n\u2028\u0085 2\nthe 1 #fairseq:overwrite\n\n\n")
    dictionary = WordDictionary.read(path)
    assert dictionary.words[4:] == ("<overwritten 4>", "of a", "\u2028\u0085", "the")
    assert dictionary.counts[4:] == (10, 3, 2, 1)
    for content in ("word\n", "a 1\na 2\n", "a " + "9" * 40 + "\n", "</s> 3\n"):
        path.write_text(content)
        with pytest.raises(InputError, match=r"^Line \d of"):
            WordDictionary.read(path)
