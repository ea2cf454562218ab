"""Positions depend on the seed and the text alone and are uniform; tokens are the tokenizer's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import N_CTX, WORDS, make_tokenizer
from scipy.stats import chi2
from sentences import corpus_of, many

import matlens
from matlens import InputError, make_examples
from matlens.activations import Activations
from matlens.data import Corpus, Examples, make_pairs


def positions(examples: Examples, corpus: Corpus) -> dict[str, int]:
    return dict(zip(corpus.sentences, examples.positions.tolist(), strict=True))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_position_does_not_depend_on_the_corpus_around_the_sentence(name, small_model, sentences):
    model = small_model(name)
    whole = positions(make_examples(model, sentences, seed=3), sentences)
    backwards = corpus_of(list(sentences.sentences[::-1]))
    parts = sentences.split(n_train=20, n_validation=15, seed=1)
    alone = [corpus_of([text]) for text in sentences.sentences[:5]]
    renamed = replace(sentences, name="another name")
    for part in (backwards, *parts, *alone, renamed):
        drawn = positions(make_examples(model, part, seed=3), part)
        assert drawn == {text: whole[text] for text in part.sentences}


def test_position_depends_on_seed_and_sentence(small_model):
    """With another seed a position is the same as often as chance has it, one time in ten."""
    corpus = corpus_of(many(2000, 10))
    first, other, again = (
        make_examples(small_model("llama"), corpus, seed=seed).positions for seed in (0, 1, 0)
    )
    assert np.array_equal(first, again)
    same = float((first == other).mean())
    assert abs(same - 0.1) < 4 * (0.1 * 0.9 / 2000) ** 0.5
    assert len(set(first.tolist())) == 10  # not the same one for all


@pytest.mark.parametrize(("name", "first"), [("llama", 0), ("bert", 1)])
def test_positions_are_uniform(name, first, small_model):
    """Chi-square over the eight words."""
    examples = make_examples(
        small_model(name), corpus_of(many(4000, 8)), seed=5, sample_special=name != "bert"
    )
    observed = np.bincount(examples.positions, minlength=first + 8)[first:]
    assert (len(observed), observed.sum()) == (8, 4000)
    statistic = float(((observed - 500) ** 2 / 500).sum())
    assert chi2.ppf(1e-4, df=7) < statistic < chi2.ppf(1 - 1e-4, df=7)


@pytest.mark.parametrize(("name", "sample_special"), [("gpt2", True), ("bert", False)])
def test_tokens_are_the_tokenizers_with_one_mask_in_masked_models(
    name, sample_special, small_model, sentences
):
    tokenizer = make_tokenizer(bert=name == "bert")
    examples = make_examples(small_model(name), sentences, seed=2, sample_special=sample_special)
    for s, text in enumerate(sentences.sentences):
        ids = tokenizer(text)["input_ids"]
        if name == "bert":
            assert tokenizer.mask_token_id not in ids
            ids[examples.positions[s]] = tokenizer.mask_token_id
        tokens = examples.tokens[examples.offsets[s] : examples.offsets[s + 1]]
        assert tokens.tolist() == ids
        assert examples.lengths[s] == len(ids)
        assert 0 <= examples.positions[s] < len(ids)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_sentences_longer_than_the_context_are_cut_and_counted(name, small_model):
    tokenizer = make_tokenizer(bert=name == "bert")
    added = len(tokenizer("")["input_ids"])
    lengths = [5, N_CTX - added - 1, N_CTX - added, N_CTX - added + 1, 3 * N_CTX]
    corpus = corpus_of([many(1, length)[0] for length in lengths])
    examples = make_examples(small_model(name), corpus, seed=1)
    assert examples.n_truncated == examples.provenance["n_truncated"] == 2
    assert examples.lengths.tolist() == [5 + added, N_CTX - 1, N_CTX, N_CTX, N_CTX]
    for s, text in enumerate(corpus.sentences):
        ids = tokenizer(text, truncation=True, max_length=N_CTX)["input_ids"]
        if name == "bert":
            ids[examples.positions[s]] = tokenizer.mask_token_id
        assert examples.tokens[examples.offsets[s] : examples.offsets[s + 1]].tolist() == ids
    long = corpus_of(many(400, 2 * N_CTX))
    drawn = make_examples(small_model(name), long).positions
    assert drawn.max() >= N_CTX - 3
    assert drawn.min() <= 2


def test_the_shorter_of_the_models_and_the_tokenizers_context_counts(model_folder):
    model = matlens.load(str(model_folder("gpt2")), device="cpu")
    corpus = corpus_of(many(3, N_CTX + 10))
    model.tokenizer.model_max_length = 10**30  # what tokenizers say that know of no limit
    assert set(make_examples(model, corpus).lengths.tolist()) == {N_CTX}
    model.tokenizer.model_max_length = 12
    assert set(make_examples(model, corpus).lengths.tolist()) == {12}


# A list of texts in place of a corpus


# Pairs

SOURCES = [" ".join(WORDS[(3 * i + j) % 50] for j in range(4 + i)) for i in range(5)]
TARGETS = [" ".join(WORDS[(7 * i + 2 * j) % 50] for j in range(8 - i)) for i in range(5)]


@pytest.fixture(scope="module")
def decoder(model_folder):
    return matlens.load(str(model_folder("t5")), device="cpu", stack="decoder")


def test_pairs_are_shifted_as_in_training_and_kept_in_folders(decoder, tmp_path):
    examples = make_pairs(decoder, SOURCES, TARGETS, seed=3)
    for number, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        start, end = examples.offsets[number : number + 2]
        first, last = examples.source_offsets[number : number + 2]
        ids = decoder.tokenizer(target)["input_ids"]
        assert examples.source_tokens[first:last].tolist() == decoder.tokenizer(source)["input_ids"]
        assert examples.tokens[start:end].tolist() == [0, *ids[:-1]]
    alone = make_pairs(decoder, SOURCES[2:3], TARGETS[2:3], seed=3)
    assert alone.positions[0] == examples.positions[2]
    matlens.collect(decoder, examples, folder=tmp_path / "kept", progress=False)
    kept = Activations.load(tmp_path / "kept").examples
    assert kept.fingerprint == examples.fingerprint
    assert kept.head(2).fingerprint == make_pairs(decoder, SOURCES[:2], TARGETS[:2], seed=3).fingerprint
    # Other sources are other examples.
    others = make_pairs(decoder, SOURCES[::-1], TARGETS, seed=3)
    assert others.fingerprint != examples.fingerprint


def test_what_is_no_pair_is_refused(decoder, small_model):
    with pytest.raises(InputError, match="stack='decoder'"):
        make_pairs(small_model("gpt2"), SOURCES, TARGETS)
    for sources, targets in ((SOURCES, TARGETS[1:]), ([], [])):
        with pytest.raises(InputError, match=r"^sources and targets"):
            make_pairs(decoder, sources, targets)
    with pytest.raises(InputError, match="got 0"):
        make_pairs(decoder, [""], ["w1"])
