"""Sentences are read from every kind of source, and what is wrong with a source is said at once."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub.constants
import pandas as pd
import pytest
from corpus_files import FIRST, SECOND, THIRD, counts, write

from matlens.data.corpus import load_corpus
from matlens.errors import InputError


def test_json_lines(tmp_path):
    rows = [
        {"text": FIRST, "other": SECOND},
        {"text": None, "other": THIRD},
        {"text": FIRST, "other": SECOND},
    ]
    source = write(tmp_path / "mine.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert load_corpus(source).sentences == (FIRST,)
    assert counts(load_corpus(source)) == (4, 2, 0, 1)
    assert load_corpus(source, field="other").sentences == (SECOND, THIRD)


def test_half_of_a_surrogate_pair_does_not_reach_the_corpus(tmp_path):
    corpus = load_corpus(write(tmp_path / "a.jsonl", '{"text": "one two three four \\ud83d"}'))
    assert corpus.sentences == ("one two three four \ufffd",)
    assert len(corpus.fingerprint) == 16


@pytest.mark.parametrize("name", ["eng_news-sentences.txt", "eng.tsv", "renamed.txt", "renamed"])
def test_leipzig_file(tmp_path, name):
    corpus = load_corpus(write(tmp_path / name, f"1\t{FIRST}\n\n2\t{SECOND}\n3\t{FIRST}\n"))
    assert corpus.sentences == (FIRST, SECOND)
    assert counts(corpus) == (4, 1, 0, 1)


def test_text_with_one_numbered_line_is_not_taken_for_leipzig(tmp_path):
    corpus = load_corpus(write(tmp_path / "a.txt", f"1\t{FIRST}\n{SECOND}\n"))
    assert corpus.sentences == (f"1 {FIRST}", SECOND)


# Datasets


def texts() -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {
            "text": [f"{FIRST} {SECOND}\n\n{THIRD} Yes.", None, FIRST],
            "number": [1, 2, 3],
            "body": [SECOND, SECOND, SECOND],
        }
    )


def test_saved_dataset_is_split_into_sentences(tmp_path):
    texts().save_to_disk(str(tmp_path / "saved"))
    corpus = load_corpus(str(tmp_path / "saved"))
    assert corpus.sentences == (FIRST, SECOND, THIRD)
    assert counts(corpus) == (6, 1, 1, 1)
    assert load_corpus(str(tmp_path / "saved"), field="body").sentences == (SECOND,)
    with pytest.raises(InputError, match=r"^field .* one of text, number, body in row 1"):
        load_corpus(str(tmp_path / "saved"), field="sentence")


def test_saved_dataset_with_splits_and_folder_of_data_files(tmp_path):
    parts = datasets.DatasetDict(train=texts(), test=texts().select([2]))
    parts.save_to_disk(str(tmp_path / "saved"))
    assert len(load_corpus(str(tmp_path / "saved"))) == 3
    assert load_corpus(str(tmp_path / "saved"), split="test").sentences == (FIRST,)
    with pytest.raises(InputError, match=r"cannot be read.*'dev'"):
        load_corpus(str(tmp_path / "saved"), split="dev")
    (tmp_path / "files").mkdir()
    with pytest.raises(InputError, match=r"cannot be read.*data files.*wikipedia-sample"):
        load_corpus(str(tmp_path / "files"))
    texts().to_parquet(str(tmp_path / "files" / "train.parquet"))
    assert load_corpus(str(tmp_path / "files")).sentences == (FIRST, SECOND, THIRD)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("wikitext:wikitext-2-raw-v1", ("wikitext", "wikitext-2-raw-v1")), ("a/b", ("a/b", None))],
)
def test_hub_id_with_and_without_configuration(monkeypatch, source, expected):
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, config, split, streaming))
        return [{"text": FIRST}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert load_corpus(source, split="validation").sentences == (FIRST,)
    assert asked == [(*expected, "validation", False)]


def test_hub_that_does_not_answer_is_told_at_once(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it would try for long"))
    with socket.socket() as reserved:  # bound and not listening: refuses every connection
        reserved.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        with pytest.raises(InputError, match="'nobody/nothing' cannot be read") as caught:
            load_corpus("nobody/nothing")
    for part in ("refused", "HF_HUB_OFFLINE=1", "wikipedia-sample"):
        assert part in str(caught.value)


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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([FIRST, "nul\0"], "Sentence 2 has a NUL character"),
        ([{"body": "x"}], "one of body in row 1"),
        (pd.Series([FIRST, None, float("nan")], dtype=object), "must be a str"),
        ({"text": [FIRST]}, "source must be"),
        (pd.DataFrame({"text": [FIRST]}), "source must be a list or a column"),
        ([], "source must have sentences"),
    ],
)
def test_an_iterable_without_sentences_is_refused(source, message):
    with pytest.raises(InputError, match=message):
        load_corpus(source)
