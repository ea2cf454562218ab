"""Sentences are read from every kind of source, and what is wrong with a source is said at once."""

import io
import json
import random
import socket
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pandas as pd
import pytest
from corpus_files import FIRST, SECOND, THIRD, counts, write

from matlens.data.corpus import load_corpus
from matlens.errors import InputError


def archive(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


# Every format


def test_a_byte_order_mark_is_not_part_of_the_first_sentence(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "mine.txt", b"\xef\xbb\xbf" + FIRST.encode()))
    assert corpus.sentences == (FIRST,)


def test_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine.txt", FIRST)
    assert load_corpus("~/mine.txt").sentences == (FIRST,)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.json"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    rows = [
        {"text": FIRST, "other": SECOND},
        {"text": None, "other": THIRD},
        {"text": FIRST, "other": SECOND},
    ]
    source = write(tmp_path / name, "\n".join(map(json.dumps, rows)) + "\n\n")
    assert load_corpus(source).sentences == (FIRST,)
    assert counts(load_corpus(source)) == (4, 2, 0, 1)
    assert load_corpus(source, field="other").sentences == (SECOND, THIRD)


def test_half_of_a_surrogate_pair_does_not_reach_the_corpus(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "a.jsonl", '{"text": "one two three four \\ud83d"}'))
    assert corpus.sentences == ("one two three four \ufffd",)
    assert len(corpus.fingerprint) == 16


@pytest.mark.parametrize("name", ["eng_news-sentences.txt", "eng.tsv", "renamed.txt", "renamed"])
def test_leipzig_file(tmp_path: Path, name: str) -> None:
    corpus = load_corpus(write(tmp_path / name, f"1\t{FIRST}\n\n2\t{SECOND}\n3\t{FIRST}\n"))
    assert corpus.sentences == (FIRST, SECOND)
    assert counts(corpus) == (4, 1, 0, 1)


def test_text_with_one_numbered_line_is_not_taken_for_leipzig(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "a.txt", f"1\t{FIRST}\n{SECOND}\n"))
    assert corpus.sentences == (f"1 {FIRST}", SECOND)


@pytest.mark.parametrize("name", ["eng_news_2020_10K.tar.gz", "eng.tgz"])
def test_leipzig_archive(tmp_path: Path, name: str) -> None:
    members = {
        "eng/eng-words.txt": b"1\tthe\t9",
        "eng/eng-sentences.txt": f"1\t{FIRST}\n2\t{THIRD}\n".encode(),
    }
    assert load_corpus(archive(tmp_path / name, members)).sentences == (FIRST, THIRD)


def test_wikipedia_and_news_samples_are_sources() -> None:
    assert counts(load_corpus("wikipedia-sample", limit=20))[0] >= 20
    corpus = load_corpus("news-sample")
    assert corpus.name == "news-sample"
    assert len(corpus) + corpus.n_empty + corpus.n_short + corpus.n_duplicate == corpus.n_read


def texts() -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {
            "text": [f"{FIRST} {SECOND}\n\n{THIRD} Yes.", None, FIRST],
            "number": [1, 2, 3],
            "body": [SECOND, SECOND, SECOND],
        }
    )


def test_saved_dataset_is_split_into_sentences(tmp_path: Path) -> None:
    texts().save_to_disk(str(tmp_path / "saved"))
    corpus = load_corpus(str(tmp_path / "saved"))
    assert corpus.sentences == (FIRST, SECOND, THIRD)
    assert counts(corpus) == (6, 1, 1, 1)
    assert load_corpus(str(tmp_path / "saved"), field="body").sentences == (SECOND,)


def test_saved_dataset_with_splits(tmp_path: Path) -> None:
    parts = datasets.DatasetDict(train=texts(), test=texts().select([2]))
    parts.save_to_disk(str(tmp_path / "saved"))
    assert len(load_corpus(str(tmp_path / "saved"))) == 3
    assert load_corpus(str(tmp_path / "saved"), split="test").sentences == (FIRST,)
    with pytest.raises(InputError, match=r"no split 'dev', it has train, test.*split="):
        load_corpus(str(tmp_path / "saved"), split="dev")


def test_folder_of_data_files(tmp_path: Path) -> None:
    texts().to_parquet(str(tmp_path / "train.parquet"))
    assert load_corpus(str(tmp_path)).sentences == (FIRST, SECOND, THIRD)
    with pytest.raises(InputError, match=r"could not be loaded .*dev.*train"):
        load_corpus(str(tmp_path), split="dev")


@pytest.mark.parametrize(
    ("source", "expected"),
    [("wikitext:wikitext-2-raw-v1", ("wikitext", "wikitext-2-raw-v1")), ("a/b", ("a/b", None))],
)
def test_hub_id_with_and_without_configuration(
    monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[str, str | None]
) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, config, split, streaming))
        return [{"text": FIRST}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert load_corpus(source, split="validation").sentences == (FIRST,)
    assert asked == [(*expected, "validation", False)]


@pytest.mark.parametrize(
    "source", ["./nothing", "/no/such/file", "a/b/c", "nothing.txt", "data/x.TAR.GZ", "~/nothing", "c:\\x"]
)
def test_missing_file_is_named_with_the_choices(source: str) -> None:
    with pytest.raises(InputError, match="no file or folder") as caught:
        load_corpus(source)
    assert f"'{source}'" in str(caught.value)
    assert "wikipedia-sample, news-sample" in str(caught.value)


def test_no_source_at_all() -> None:
    with pytest.raises(InputError, match=r"^source must be"):
        load_corpus("")


def test_not_utf8_says_where_and_what_to_do(tmp_path: Path) -> None:
    source = write(
        tmp_path / "old.txt", f"{FIRST}\n".encode() + "Un café très bon pour vous".encode("latin-1")
    )
    position = len(FIRST) + 1 + len("Un caf")
    with pytest.raises(InputError, match=rf"not UTF-8: line 2, byte {position} .*iconv .*old\.txt"):
        load_corpus(source)


def test_json_line_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no JSON .* line 2 of .*a\.jsonl', .*one JSON object a line"):
        load_corpus(write(tmp_path / "a.jsonl", json.dumps({"text": FIRST}) + "\n{'text'}\n"))


def test_json_line_that_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"JSON list in line 1 of .*one JSON object a line"):
        load_corpus(write(tmp_path / "a.json", json.dumps([{"text": FIRST}])))


def test_json_line_without_the_field(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", json.dumps({"id": 1, "body": FIRST}))
    with pytest.raises(InputError, match=r"no field 'text' in line 1 of .*, it has id, body.*field="):
        load_corpus(source)
    with pytest.raises(InputError, match=r"'id' in line 1 of .* holds int\. Expected text"):
        load_corpus(source, field="id")


def test_dataset_without_the_field(tmp_path: Path) -> None:
    texts().save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(InputError, match=r"no field 'sentence' in row 1 of .*, it has text, number, body"):
        load_corpus(str(tmp_path / "saved"), field="sentence")


def test_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"could not be loaded \(.*data files.*wikipedia-sample"):
        load_corpus(str(tmp_path))


def test_leipzig_line_without_a_number(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Line 2 of .*number<TAB>sentence.*A second one"):
        load_corpus(write(tmp_path / "eng-sentences.txt", f"1\t{FIRST}\n{SECOND}\n"))


def test_archive_without_sentences(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not one file that ends in '-sentences\.txt'.*eng/eng-words\.txt"):
        load_corpus(archive(tmp_path / "eng.tar.gz", {"eng/eng-words.txt": b"1\tthe\t9"}))


def test_archive_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"eng\.tar\.gz' could not be read .*damaged"):
        load_corpus(write(tmp_path / "eng.tar.gz", "<html>Not found</html>"))


def test_archive_cut_short(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(50_000).hex()
    lines = "".join(f"{i}\t{FIRST} {noise[20 * i : 20 * i + 20]}\n" for i in range(5000)).encode()
    path = Path(archive(tmp_path / "eng.tar.gz", {"eng-sentences.txt": lines}))
    assert len(load_corpus(str(path))) == 5000
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=r"eng\.tar\.gz' could not be read .*damaged"):
        load_corpus(str(path))


def test_hub_that_does_not_answer_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:  # bound and not listening: refuses every connection
        reserved.bind(("127.0.0.1", 0))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{reserved.getsockname()[1]}")
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(urllib.request, "getproxies", dict)
        with pytest.raises(InputError, match="'nobody/nothing' could not be loaded") as caught:
            load_corpus("nobody/nothing")
    for part in ("does not answer", "HF_HUB_OFFLINE=1", "wikipedia-sample"):
        assert part in str(caught.value)


def test_offline_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"'nobody/nothing' could not be loaded.*news-sample"):
        load_corpus("nobody/nothing")


# Text that is none


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("sentence", [FIRST, THIRD, "日本語の文章です。\n猫が好きです。 One more."])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a-sentences.txt"])
def test_wide_encodings_are_called_by_their_name(
    tmp_path: Path, encoding: str, sentence: str, name: str
) -> None:
    text = "".join(f"{i}\t{sentence}\r\n" for i in range(5))
    with pytest.raises(InputError, match=rf"is {encoding[:6].upper()}.*not UTF-8.*iconv -f UTF-"):
        load_corpus(write(tmp_path / name, text.encode(encoding)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{FIRST}\n{SECOND[:9]}\0{SECOND}\n".encode(), r"Line 2 of .* has a NUL byte, byte 43 of the text"),
        (bytes(5000), "Line 1 of .* has a NUL byte"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "is a PDF. Expected text"),
        (b"PAR1\x15\x04\x15\x00", "is a Parquet file"),
        (b"\x28\xb5\x2f\xfd\x04", "is a Zstandard file"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a picture"),
        (b"7z\xbc\xaf\x27\x1c", "is a 7z archive"),
        (b"GGUF\x03\0\0\0", "is a model"),
    ],
)
def test_what_is_no_text_is_told(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_corpus(write(tmp_path / "a.txt", content))


@pytest.mark.parametrize(
    "start", ["PAR1 is a gene of five words", "GIF89 was it not I ask", "BZh9 what is this line"]
)
def test_text_that_begins_like_another_file_is_text(start: str, tmp_path: Path) -> None:
    assert load_corpus(write(tmp_path / "a.txt", start)).sentences == (start,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ' + "[" * 100_000, "more than 100 lists and objects .* MATLENS_MAX_NESTING"),
        ('{"text": ' + "9" * 5000 + "}", "no JSON in line 1 .*digits"),
        ('{"text": NaN}', r"holds float \(NaN\)\. Expected text"),
        ('{"text": 1e999}', "holds float. Expected text"),
        ('{"text": "a", "text": "b"}', "'text' is there twice"),
        ('{"text": "nul\\u0000nul"}', "has a NUL character, character 3"),
        ('{"text": {"a": []}}', "holds dict"),
        ('{"te\\u001b[2Jxt": 1}', r"it has te\\x1b\[2Jxt"),
        ("{" + ", ".join(f'"k{i}": 1' for i in range(3000)) + "}", "it has k0, k1, .* and 2,990 more"),
    ],
)
def test_odd_json_is_refused_in_a_line(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as raised:
        load_corpus(write(tmp_path / "a.jsonl", line))
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    "source", ["x" * 5000, "a\0b", "~nobody-here/a.txt", "-" * 300 + ".txt", "\x1b[2J/../x", " "]
)
def test_odd_names_of_files_are_refused_in_a_line(source: str) -> None:
    with pytest.raises(InputError) as raised:
        load_corpus(source)
    assert str(raised.value).isprintable()


# What users iterate over


def failing() -> Iterator[str]:
    yield FIRST
    yield SECOND
    raise KeyError("column \x1b[31m")


def test_sentences_can_be_given(tmp_path: Path) -> None:
    corpus = load_corpus([FIRST, "", None, "short", SECOND], name="mine")
    assert (corpus.name, corpus.sentences, counts(corpus)) == ("mine", (FIRST, SECOND), (5, 2, 1, 0))
    assert load_corpus(iter((FIRST, SECOND)), limit=1).sentences == (FIRST,)
    assert load_corpus(pd.Series([FIRST, SECOND])).name == "given sentences"
    assert load_corpus(texts()).sentences == (FIRST, SECOND, THIRD)
    assert load_corpus(texts().to_iterable_dataset(), field="body").sentences == (SECOND,)
    assert load_corpus(Path(write(tmp_path / "a.txt", FIRST))).name == str(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (failing(), r"fails after 2 rows \(KeyError: .column .*x1b\[31m.\)"),
        ([FIRST, 3], "^source must be"),
        ([FIRST, float("nan")], r"^source must be"),
        ([FIRST, b"bytes"], r"^source must be"),
        ([FIRST, "nul\0"], "Sentence 2 has a NUL character"),
        ([FIRST, {"text": 1}], "'text' in row 2 holds int"),
        ([{"body": "x"}], "no field 'text' in row 1, it has body"),
        ([{1: "x"}], "no field 'text' in row 1, it has 1"),
        (pd.Series([FIRST, None, float("nan")], dtype=object), r"Sentence 3 holds float \(NaN\)"),
        (7, r"^source must be"),
        (None, r"^source must be"),
        (b"wikipedia-sample", r"^source must be"),
        ({"text": [FIRST]}, "The source is {'text'"),
        (pd.DataFrame({"text": [FIRST]}), "The source is .* a column of a table"),
        ([], "'given sentences' is empty"),
    ],
)
def test_what_gives_no_sentences_is_told(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_corpus(source)


def test_a_dataset_that_fails_while_it_is_gone_over_is_told_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def __iter__(self) -> Iterator[dict[str, str]]:
            yield {"text": FIRST}
            raise datasets.exceptions.DatasetGenerationError(
                "An error occurred while generating the dataset"
            ) from OSError("disk \x07gone")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Broken())
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = r"The dataset 'a/b' fails after 1 rows \(DatasetGenerationError: disk .x07gone\)"
    with pytest.raises(InputError, match=message):
        load_corpus("a/b")
    assert load_corpus("a/b", limit=1).sentences == (FIRST,)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(InputError, match=r"'a/b' could not be loaded .division by zero"):
        load_corpus("a/b")


def test_a_damaged_folder_with_data_is_told(tmp_path: Path) -> None:
    texts().to_parquet(str(tmp_path / "train.parquet"))
    content = bytearray((tmp_path / "train.parquet").read_bytes())
    for place in range(8, len(content) - 8, 3):
        content[place] ^= 0xFF
    (tmp_path / "train.parquet").write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"could not be loaded|fails after"):
        load_corpus(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field": 3}, r"^field must be"),
        ({"split": None}, r"^split must be"),
        ({"limit": 1.5}, r"^limit must be"),
        ({"limit": 0}, r"^limit must be"),
        ({"limit": True}, r"^limit must be"),
        ({"name": 1}, r"^name must be"),
    ],
)
def test_odd_options_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_corpus([FIRST], **options)
