"""Sentences are read from every kind of source within bounds, counted, kept once and split at random."""

from __future__ import annotations

import gzip
import io
import json
import random
import socket
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub.constants
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matlens.data.corpus import MIN_WORDS, Corpus, _select_sentences, load_corpus
from matlens.data.texts import _universal
from matlens.errors import InputError

FIRST = "The first sentence has six words."
SECOND = "A second one is also here."
THIRD = "Schließlich gibt es noch eine dritte."


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def counts(corpus: Corpus) -> tuple[int, int, int, int]:
    return corpus.n_read, corpus.n_empty, corpus.n_short, corpus.n_duplicate


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


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.tsv", "a.jsonl"])
def test_lines_end_as_for_python(end, last, name, tmp_path):
    sentences = (FIRST, SECOND, THIRD)
    wrap = {"a.tsv": lambda text: f"1\t{text}", "a.jsonl": lambda text: json.dumps({"text": text})}
    written = end.join(map(wrap.get(name, str), sentences)) + end * last
    content = gzip.compress(written.encode()) if name.endswith(".gz") else written.encode()
    corpus = load_corpus(write(tmp_path / name, content))
    assert corpus.sentences == sentences
    assert corpus.n_read == 3


@settings(max_examples=200)
@given(text=st.text(alphabet="ab\r\n\u2028\x85é", max_size=30), n_bytes=st.integers(1, 9))
def test_lines_do_not_depend_on_the_pieces_they_are_read_in(text, n_bytes):
    data = text.encode()
    lines = b"".join(_universal(data[i : i + n_bytes] for i in range(0, len(data), n_bytes)))
    assert lines.decode() == io.StringIO(text, newline=None).read()


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


LINES = "".join(f"{FIRST} {random.Random(i).random()}\n" for i in range(300)).encode()
LEIPZIG = f"1\t{FIRST}\n2\t{SECOND}\n".encode()
DAMAGED = r"cannot be read: "


def tarred(members: list[tuple[str, bytes, bytes]], mode: str = "w:gz", **headers: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), "elsewhere"
            info.pax_headers = headers
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


SENTENCES = ("eng/eng-sentences.txt", LEIPZIG, tarfile.REGTYPE)
WORD_LIST = ("eng/eng-words.txt", b"1\tthe\t9" * 900, tarfile.REGTYPE)


def test_the_sentences_of_compressed_files_and_leipzig_archives_are_read(tmp_path):
    members = [("eng/", b"", tarfile.DIRTYPE), WORD_LIST, SENTENCES, ("x", b"1" * 5000, b"0")]
    files = {"eng.tar": tarred(members, "w"), "eng.TGZ": tarred(members)}
    files |= {"a.txt.gz": gzip.compress(f"{FIRST}\n{SECOND}\n".encode())}
    for name, content in files.items():
        assert load_corpus(write(tmp_path / name, content)).sentences == (FIRST, SECOND)


@settings(max_examples=40)
@given(share=st.floats(0, 0.999), limit=st.sampled_from([None, 2]))
def test_a_truncated_file_is_refused_wherever_it_ends(share, limit, tmp_path_factory):
    packed = gzip.compress(LINES)
    path = write(tmp_path_factory.mktemp("cut") / "a.gz", packed[: max(int(share * len(packed)), 1)])
    with pytest.raises(InputError, match=DAMAGED):
        load_corpus(path, limit=limit)


@settings(max_examples=60)
@given(packing=st.sampled_from(["gz", "tar.gz"]), place=st.floats(0, 0.999), bit=st.integers(0, 7),
       limit=st.sampled_from([None, 2]))  # fmt: skip
def test_an_altered_file_is_refused_or_the_same(packing, place, bit, limit, tmp_path_factory):
    leipzig = b"1\t" + LINES.replace(b"\n", b"\n1\t")[:-2]
    packed = bytearray(
        gzip.compress(LINES) if packing == "gz" else tarred([("a-sentences.txt", leipzig, tarfile.REGTYPE)])
    )
    path = tmp_path_factory.mktemp("altered") / f"a.{packing}"
    whole = load_corpus(write(path, bytes(packed)), limit=limit)
    packed[int(place * len(packed))] ^= 1 << bit
    try:
        corpus = load_corpus(write(path, bytes(packed)), limit=limit)
    except InputError:
        return
    assert corpus.sentences == whole.sentences


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("trailing", ["x", "cut", "altered"])
def test_a_later_stream_that_is_damaged_is_refused(trailing, limit, tmp_path):
    """It would otherwise be a shorter corpus."""
    another = gzip.compress(b"no\n")
    rest = {"x": b"x", "cut": another[:-3], "altered": b"\1" + another[1:]}[trailing]
    with pytest.raises(InputError, match=DAMAGED):
        load_corpus(write(tmp_path / "a.gz", gzip.compress(LINES) + rest), limit=limit)


@pytest.mark.parametrize("limit", [None, 1])
def test_a_damaged_archive_is_no_shorter_one(limit, tmp_path):
    content = bytearray(tarred([SENTENCES, ("b", b"x" * 600, tarfile.REGTYPE)], "w"))
    for end in (512, 1024, 1536, 2048):  # between its files
        with pytest.raises(InputError, match=DAMAGED):
            load_corpus(write(tmp_path / "a.tar", bytes(content[:end])))
    content[content.rindex(b"ustar") + 200] ^= 1
    with pytest.raises(InputError, match=DAMAGED):
        load_corpus(write(tmp_path / "a.tar.gz", gzip.compress(bytes(content))), limit=limit)
    for members in ([SENTENCES, ("deu-sentences.txt", LEIPZIG, tarfile.REGTYPE)], [WORD_LIST]):
        with pytest.raises(InputError, match=r"must hold one file that ends in '-sentences\.txt'"):
            load_corpus(write(tmp_path / "a.tgz", tarred(members)))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (THIRD.encode("latin-1"), 1),
        (f"{FIRST}\n{SECOND[:9]}\0{SECOND}\n".encode(), 2),
        (f"{FIRST}\n".encode() * 500 + b"\xff\n", 501),
        (gzip.compress(LINES), 1),
    ],
)
def test_a_line_that_is_no_text_is_named(content, line, tmp_path):
    with pytest.raises(InputError, match=rf"Line {line} of .*/a\.txt' must be text in UTF-8"):
        load_corpus(write(tmp_path / "a.txt", content))


def test_a_bomb_takes_no_memory(tmp_path):
    line = write(tmp_path / "a.txt.gz", gzip.compress(b"a" * 2**26))
    headers = write(tmp_path / "pax.tgz", tarred([SENTENCES], comment="x" * 2**25))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"Line 1 of '.*a\.txt\.gz'"):
            load_corpus(line)
        assert load_corpus(headers).sentences == (FIRST, SECOND)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()


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
