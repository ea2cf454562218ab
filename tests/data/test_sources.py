"""Sentences are read from every kind of source, and what is wrong with a source is said at once."""

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pandas as pd
import pytest
from corpus_files import FIRST, SECOND, THIRD, counts, write

from matlens.data.corpus import load_corpus
from matlens.errors import InputError


def test_json_lines(tmp_path):
    rows = [{"text": of, "other": other} for of, other in ((FIRST, SECOND), (None, THIRD), (FIRST, SECOND))]
    source = write(tmp_path / "mine.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert load_corpus(source).sentences == (FIRST,)
    assert counts(load_corpus(source)) == (4, 2, 0, 1)
    assert load_corpus(source, field="other").sentences == (SECOND, THIRD)


@pytest.mark.parametrize("name", ["eng_news-sentences.txt", "eng.tsv", "renamed"])
def test_leipzig_file(tmp_path, name):
    corpus = load_corpus(write(tmp_path / name, f"1\t{FIRST}\n\n2\t{SECOND}\n3\t{FIRST}\n"))
    assert corpus.sentences == (FIRST, SECOND)
    assert counts(corpus) == (4, 1, 0, 1)


# Datasets


def texts() -> datasets.Dataset:
    whole = [f"{FIRST} {SECOND}\n\n{THIRD} Yes.", None, FIRST]
    return datasets.Dataset.from_dict({"text": whole, "number": [1, 2, 3], "body": [SECOND] * 3})


def test_saved_dataset_is_split_into_sentences(tmp_path):
    texts().save_to_disk(str(tmp_path / "saved"))
    corpus = load_corpus(str(tmp_path / "saved"))
    assert corpus.sentences == (FIRST, SECOND, THIRD)
    assert counts(corpus) == (6, 1, 1, 1)
    assert load_corpus(str(tmp_path / "saved"), field="body").sentences == (SECOND,)
    with pytest.raises(InputError, match=r"^field .* one of text, number, body in row 1"):
        load_corpus(str(tmp_path / "saved"), field="sentence")


# What is refused


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", f"text\n{FIRST}", "got a table"),
        ("eng-sentences.txt", f"1\t{FIRST}\n{SECOND}\n", r"Line 2 of .*number<TAB>sentence.*A second one"),
        ("a.jsonl", json.dumps({"text": FIRST}) + "\n{'text'}\n", r"line 2 of .*a\.jsonl' must be JSON"),
        ("a.jsonl", '{"id": 1, "body": "x"}', r"one of id, body in line 1 of .*, got 'text'"),
        ("a.jsonl", '{"text": 7}', "'text' in line 1 of .* must be a str or null, got 7"),
        ("a.jsonl", '{"text": "nul\\u0000nul"}', "has a NUL character"),
    ],
)
def test_lines_that_hold_no_sentence_are_named(name, text, message, tmp_path):
    with pytest.raises(InputError, match=message) as raised:
        load_corpus(write(tmp_path / name, text))
    assert len(str(raised.value)) < 700


# What users iterate over


def failing() -> Iterator[str]:
    yield FIRST
    yield SECOND
    raise KeyError("column")


def test_sentences_can_be_given(tmp_path):
    corpus = load_corpus([FIRST, "", None, "short", SECOND], name="mine")
    assert (corpus.name, corpus.sentences, counts(corpus)) == ("mine", (FIRST, SECOND), (5, 2, 1, 0))
    assert load_corpus(iter((FIRST, SECOND)), limit=1).sentences == (FIRST,)
    assert load_corpus(pd.Series([FIRST, SECOND])).name == "given sentences"
    assert load_corpus(texts()).sentences == (FIRST, SECOND, THIRD)
    assert load_corpus(texts().to_iterable_dataset(), field="body").sentences == (SECOND,)
    assert load_corpus(Path(write(tmp_path / "a.txt", FIRST))).name == str(tmp_path / "a.txt")
    with pytest.raises(KeyError, match="column"):
        load_corpus(failing())
