"""Sentences are counted, kept once and split at random, and a corpus says what was left out."""

import pytest
from corpus_files import FIRST, SECOND, THIRD, counts, write
from hypothesis import given
from hypothesis import strategies as st

from matlens.data.corpus import MIN_WORDS, Corpus, _select_sentences, load_corpus
from matlens.errors import InputError


def made_up(n: int) -> Corpus:
    return Corpus("made up", tuple(f"This is sentence number {i}." for i in range(n)), n, 0, 0, 0)


# Reading


def test_text_file_counts_what_it_leaves_out(tmp_path):
    again = "The  first\tsentence has six\u00a0words. "
    text = f"\ufeff  {FIRST}\n\nToo short a one\n{SECOND}\r\n \t \n{again}\n{FIRST}\n{THIRD}"
    corpus = load_corpus(write(tmp_path / "mine.txt", text))
    assert corpus.sentences == (FIRST, SECOND, THIRD)
    assert counts(corpus) == (8, 2, 1, 2)
    assert len(corpus) == 3


@pytest.mark.parametrize(
    ("kept", "left_out"),
    [
        ("今天天气很好，我们去公园。", "今天天气很好。"), ("ฉันไปตลาดวันนี้", "ฉันไป"),
        ("我们 去 公园 散步 了", "我们 去 公园"),  # somebody has put spaces
    ],
)  # fmt: skip
def test_scripts_without_spaces_are_counted_by_their_characters(kept, left_out):
    corpus = load_corpus([kept, left_out, "The city of 東京都 is"])
    assert corpus.sentences == (kept, "The city of 東京都 is")
    assert corpus.n_short == 1
    with pytest.raises(InputError, match="2 shorter than 5 words"):
        load_corpus([left_out, "Tokyo (東京都) is big"])


def test_limit_counts_kept_sentences_and_reads_no_further(tmp_path):
    # The last line is not UTF-8, so that reading on would fail.
    text = f"{FIRST}\n{FIRST}\n{SECOND}\n{THIRD}\n" + "\n" * 9
    source = write(tmp_path / "a.txt", text.encode() + b"\xff\n")
    corpus = load_corpus(source, limit=2)
    assert corpus.sentences == (FIRST, SECOND)
    assert counts(corpus) == (3, 0, 0, 1)


@given(st.lists(st.text(alphabet="ab \t", max_size=14), max_size=30))
def test_counts_add_up_and_sentences_are_normal_and_different(lines):
    corpus = _select_sentences("made up", lines, None)
    assert len(corpus) + corpus.n_empty + corpus.n_short + corpus.n_duplicate == corpus.n_read == len(lines)
    assert len(set(corpus.sentences)) == len(corpus)
    assert all(s == " ".join(s.split()) and len(s.split()) >= MIN_WORDS for s in corpus.sentences)
    assert set(corpus.sentences) == {" ".join(s.split()) for s in lines if len(s.split()) >= MIN_WORDS}


# What a corpus says of itself


def test_fingerprint_follows_sentences_and_their_order_only():
    corpus = Corpus("a", (FIRST, SECOND), 2, 0, 0, 0)
    assert corpus.fingerprint == Corpus("b", (FIRST, SECOND), 9, 1, 2, 4).fingerprint
    others = [(SECOND, FIRST), (FIRST,), (FIRST, SECOND, THIRD), (f"{FIRST} {SECOND}",)]
    assert len({Corpus("a", s, 2, 0, 0, 0).fingerprint for s in others} | {corpus.fingerprint}) == 5
    assert corpus.fingerprint == "bc323f55377f96bf"  # the same on every machine


# Splitting


@given(data=st.data(), n=st.integers(3, 60), seed=st.integers(0, 2**32 - 1))
def test_split_parts_are_disjoint_sized_and_repeatable(data, n, seed):
    n_validation = data.draw(st.integers(2, n - 1))
    n_train = data.draw(st.integers(1, n - n_validation))
    corpus = made_up(n)
    train, validation = corpus.split(n_train=n_train, n_validation=n_validation, seed=seed)
    assert (len(train), len(validation)) == (n_train, n_validation)
    assert (train.name, validation.name) == ("made up (train)", "made up (validation)")
    drawn = set(train.sentences) | set(validation.sentences)
    assert len(drawn) == n_train + n_validation
    assert drawn <= set(corpus.sentences)
    assert (train, validation) == corpus.split(n_train=n_train, n_validation=n_validation, seed=seed)


def test_validation_does_not_depend_on_the_size_of_training():
    corpus = made_up(100)
    small_train, small = corpus.split(n_train=10, n_validation=20, seed=3)
    large_train, large = corpus.split(n_train=80, n_validation=20, seed=3)
    assert small.sentences == large.sentences
    assert small != corpus.split(n_train=10, n_validation=20, seed=4)[1]
    assert large_train.sentences[:10] == small_train.sentences
    with pytest.raises(InputError, match=r"must be at most 100, .*, got 50 \+ 51"):
        corpus.split(n_train=50, n_validation=51)
