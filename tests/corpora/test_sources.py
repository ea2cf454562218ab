"""Sentences are read from every kind of source, and what is wrong with a source is said at once."""

import io
import json
import random
import socket
import tarfile
import time
import urllib.request
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
from corpus_files import FIRST, SECOND, THIRD, counts, write

from matlens.corpora.corpus import load_corpus
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
    with pytest.raises(InputError, match="wikipedia-sample"):
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
        start = time.monotonic()
        with pytest.raises(InputError, match="'nobody/nothing' could not be loaded") as caught:
            load_corpus("nobody/nothing")
    assert time.monotonic() - start < 8
    for part in ("does not answer", "HF_HUB_OFFLINE=1", "wikipedia-sample"):
        assert part in str(caught.value)


def test_offline_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"'nobody/nothing' could not be loaded.*news-sample"):
        load_corpus("nobody/nothing")
