"""Reading sentences from every kind of source, counting what is left out, and splitting."""

import io
import json
import random
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matlens.corpora.corpus import MIN_WORDS, Corpus, load_corpus
from matlens.errors import InputError

ONE = "The first sentence has six words."
TWO = "A second one is also here."
THREE = "Schließlich gibt es noch eine dritte."


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def archive(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def made_up(n: int) -> Corpus:
    return Corpus("made up", tuple(f"This is sentence number {i}." for i in range(n)), n, 0, 0, 0)


def counts(corpus: Corpus) -> tuple[int, int, int, int]:
    return corpus.n_read, corpus.n_empty, corpus.n_short, corpus.n_duplicate


# Every format


def test_text_file_counts_what_it_leaves_out(tmp_path: Path) -> None:
    again = "The  first\tsentence has six\u00a0words. "
    text = f"  {ONE}\n\nToo short a one\n{TWO}\r\n \t \n{again}\n{ONE}\n{THREE}"
    corpus = load_corpus(write(tmp_path / "mine.txt", text))
    assert corpus.sentences == (ONE, TWO, THREE)
    assert counts(corpus) == (8, 2, 1, 2)
    assert len(corpus) == 3


def test_the_shortest_sentence_kept_has_min_words(tmp_path: Path) -> None:
    words = ["word"] * MIN_WORDS
    corpus = load_corpus(write(tmp_path / "a", " ".join(words) + "\n" + " ".join(words[1:])))
    assert corpus.sentences == (" ".join(words),)
    assert corpus.n_short == 1


def test_a_byte_order_mark_is_not_part_of_the_first_sentence(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "mine.txt", b"\xef\xbb\xbf" + ONE.encode()))
    assert corpus.sentences == (ONE,)


def test_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine.txt", ONE)
    assert load_corpus("~/mine.txt").sentences == (ONE,)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.json"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    rows = [{"text": ONE, "other": TWO}, {"text": None, "other": THREE}, {"text": ONE, "other": TWO}]
    source = write(tmp_path / name, "\n".join(map(json.dumps, rows)) + "\n\n")
    assert load_corpus(source).sentences == (ONE,)
    assert counts(load_corpus(source)) == (4, 2, 0, 1)
    assert load_corpus(source, field="other").sentences == (TWO, THREE)


def test_half_of_a_surrogate_pair_does_not_reach_the_corpus(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "a.jsonl", '{"text": "one two three four \\ud83d"}'))
    assert corpus.sentences == ("one two three four \ufffd",)
    assert len(corpus.fingerprint) == 16


@pytest.mark.parametrize("name", ["eng_news-sentences.txt", "eng.tsv", "renamed.txt", "renamed"])
def test_leipzig_file(tmp_path: Path, name: str) -> None:
    corpus = load_corpus(write(tmp_path / name, f"1\t{ONE}\n\n2\t{TWO}\n3\t{ONE}\n"))
    assert corpus.sentences == (ONE, TWO)
    assert counts(corpus) == (4, 1, 0, 1)


def test_text_with_one_numbered_line_is_not_taken_for_leipzig(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "a.txt", f"1\t{ONE}\n{TWO}\n"))
    assert corpus.sentences == (f"1 {ONE}", TWO)


@pytest.mark.parametrize("name", ["eng_news_2020_10K.tar.gz", "eng.tgz"])
def test_leipzig_archive(tmp_path: Path, name: str) -> None:
    members = {"eng/eng-words.txt": b"1\tthe\t9", "eng/eng-sentences.txt": f"1\t{ONE}\n2\t{THREE}\n".encode()}
    assert load_corpus(archive(tmp_path / name, members)).sentences == (ONE, THREE)


def test_wikipedia_and_news_samples_are_sources() -> None:
    assert counts(load_corpus("wikipedia-sample", limit=20))[0] >= 20
    corpus = load_corpus("news-sample")
    assert corpus.name == "news-sample"
    assert len(corpus) + corpus.n_empty + corpus.n_short + corpus.n_duplicate == corpus.n_read


def texts() -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"text": [f"{ONE} {TWO}\n\n{THREE} Yes.", None, ONE], "number": [1, 2, 3], "body": [TWO, TWO, TWO]}
    )


def test_saved_dataset_is_split_into_sentences(tmp_path: Path) -> None:
    texts().save_to_disk(str(tmp_path / "saved"))
    corpus = load_corpus(str(tmp_path / "saved"))
    assert corpus.sentences == (ONE, TWO, THREE)
    assert counts(corpus) == (6, 1, 1, 1)
    assert load_corpus(str(tmp_path / "saved"), field="body").sentences == (TWO,)


def test_saved_dataset_with_splits(tmp_path: Path) -> None:
    parts = datasets.DatasetDict(train=texts(), test=texts().select([2]))
    parts.save_to_disk(str(tmp_path / "saved"))
    assert len(load_corpus(str(tmp_path / "saved"))) == 3
    assert load_corpus(str(tmp_path / "saved"), split="test").sentences == (ONE,)
    with pytest.raises(InputError, match=r"no split 'dev', it has train, test.*split="):
        load_corpus(str(tmp_path / "saved"), split="dev")


def test_folder_of_data_files(tmp_path: Path) -> None:
    texts().to_parquet(str(tmp_path / "train.parquet"))
    assert load_corpus(str(tmp_path)).sentences == (ONE, TWO, THREE)
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
        return [{"text": ONE}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert load_corpus(source, split="validation").sentences == (ONE,)
    assert asked == [(*expected, "validation", False)]


def test_limit_counts_kept_sentences_and_reads_no_further(tmp_path: Path) -> None:
    # The last line is not UTF-8, so that reading on would fail.
    source = write(tmp_path / "a.txt", f"{ONE}\n{ONE}\n{TWO}\n{THREE}\n".encode() + b"\xff\n")
    corpus = load_corpus(source, limit=2)
    assert corpus.sentences == (ONE, TWO)
    assert counts(corpus) == (3, 0, 0, 1)


@given(st.lists(st.text(alphabet="ab \t", max_size=14), max_size=30))
def test_counts_add_up_and_sentences_are_normal_and_different(lines: list[str]) -> None:
    from matlens.corpora.corpus import _select

    corpus = _select("made up", lines, None)
    assert len(corpus) + corpus.n_empty + corpus.n_short + corpus.n_duplicate == corpus.n_read == len(lines)
    assert len(set(corpus.sentences)) == len(corpus)
    assert all(s == " ".join(s.split()) and len(s.split()) >= MIN_WORDS for s in corpus.sentences)
    assert set(corpus.sentences) == {" ".join(s.split()) for s in lines if len(s.split()) >= MIN_WORDS}


# What a corpus says of itself


def test_report_is_one_line_with_every_count() -> None:
    report = Corpus("mine.txt", (ONE,) * 1200, 12345, 12, 34, 56).report()
    assert report == (
        "1,200 sentences of mine.txt (read 12,345; left out: "
        "12 empty, 34 shorter than 5 words, 56 duplicates)"
    )


def test_fingerprint_follows_sentences_and_their_order_only() -> None:
    corpus = Corpus("a", (ONE, TWO), 2, 0, 0, 0)
    assert corpus.fingerprint == Corpus("b", (ONE, TWO), 9, 1, 2, 4).fingerprint
    others = [(TWO, ONE), (ONE,), (ONE, TWO, THREE), (f"{ONE} {TWO}",)]
    assert len({Corpus("a", s, 2, 0, 0, 0).fingerprint for s in others} | {corpus.fingerprint}) == 5
    assert corpus.fingerprint == "bc323f55377f96bf"  # the same on every machine


# Splitting


@given(data=st.data(), n=st.integers(3, 60), seed=st.integers(0, 2**32))
def test_split_parts_are_disjoint_sized_and_repeatable(data: st.DataObject, n: int, seed: int) -> None:
    n_validation = data.draw(st.integers(2, n - 1))
    n_train = data.draw(st.integers(1, n - n_validation))
    corpus = made_up(n)
    train, validation = corpus.split(n_train=n_train, n_validation=n_validation, seed=seed)
    assert (len(train), len(validation)) == (n_train, n_validation)
    drawn = set(train.sentences) | set(validation.sentences)
    assert len(drawn) == n_train + n_validation
    assert drawn <= set(corpus.sentences)
    assert (train, validation) == corpus.split(n_train=n_train, n_validation=n_validation, seed=seed)


def test_a_split_of_everything_covers_everything() -> None:
    corpus = made_up(50)
    train, validation = corpus.split(n_train=40, n_validation=10)
    assert sorted(train.sentences + validation.sentences) == sorted(corpus.sentences)


def test_seed_decides_the_split_and_nothing_else_does() -> None:
    corpus = made_up(200)
    random.seed(1)
    first = corpus.split(n_train=100, n_validation=50)
    random.seed(2)
    assert first == corpus.split(n_train=100, n_validation=50, seed=0)
    other = corpus.split(n_train=100, n_validation=50, seed=1)
    assert set(first[0].sentences) != set(other[0].sentences)
    assert set(first[1].sentences) != set(other[1].sentences)


def test_every_sentence_can_be_drawn() -> None:
    corpus = made_up(10)
    parts = [corpus.split(n_train=1, n_validation=2, seed=seed) for seed in range(100)]
    assert {s for train, _ in parts for s in train.sentences} == set(corpus.sentences)
    assert {s for _, validation in parts for s in validation.sentences} == set(corpus.sentences)


def test_validation_does_not_depend_on_the_size_of_training() -> None:
    corpus = made_up(100)
    small_train, small = corpus.split(n_train=10, n_validation=20, seed=3)
    large_train, large = corpus.split(n_train=80, n_validation=20, seed=3)
    assert small.sentences == large.sentences
    assert large_train.sentences[:10] == small_train.sentences


def test_parts_are_named_for_their_role() -> None:
    train, validation = made_up(3).split(n_train=1, n_validation=2)
    assert (train.name, validation.name) == ("made up (train)", "made up (validation)")


def test_split_asks_for_no_more_than_there_is(tmp_path: Path) -> None:
    single = load_corpus(write(tmp_path / "one.txt", ONE))
    assert len(single) == 1
    with pytest.raises(InputError, match=r"asked for 4000\+1000 .*one\.txt has 1: .*fewer"):
        single.split(n_train=4000, n_validation=1000)
    with pytest.raises(InputError, match="at least 1 and at least 2"):
        made_up(9).split(n_train=0, n_validation=2)
    with pytest.raises(InputError, match="at least 1 and at least 2"):
        made_up(9).split(n_train=1, n_validation=1)


# Errors


@pytest.mark.parametrize(
    "source", ["./nothing", "/no/such/file", "a/b/c", "nothing.txt", "data/x.TAR.GZ", "~/nothing", "c:\\x"]
)
def test_missing_file_is_named_with_the_choices(source: str) -> None:
    with pytest.raises(InputError, match="no file or folder") as caught:
        load_corpus(source)
    assert repr(source) in str(caught.value)
    assert "wikipedia-sample, news-sample" in str(caught.value)


def test_no_source_at_all() -> None:
    with pytest.raises(InputError, match="wikipedia-sample"):
        load_corpus("")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"nothing\.txt' is empty"):
        load_corpus(write(tmp_path / "nothing.txt", text))


def test_file_of_short_lines_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no sentence to use.*2 shorter than 5 words"):
        load_corpus(write(tmp_path / "a.txt", "Yes.\nNo.\n"))


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_below_one(limit: int) -> None:
    with pytest.raises(InputError, match=f"limit is {limit}"):
        load_corpus("news-sample", limit=limit)


def test_not_utf8_says_where_and_what_to_do(tmp_path: Path) -> None:
    source = write(tmp_path / "old.txt", f"{ONE}\n".encode() + "Un café très bon pour vous".encode("latin-1"))
    position = len(ONE) + 1 + len("Un caf")
    with pytest.raises(InputError, match=rf"not UTF-8: line 2, byte {position} .*iconv .*old\.txt"):
        load_corpus(source)


def test_json_line_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 2 of .*a\.jsonl' is not JSON .*one JSON object a line"):
        load_corpus(write(tmp_path / "a.jsonl", json.dumps({"text": ONE}) + "\n{'text'}\n"))


def test_json_line_that_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1 .*JSON list.*one JSON object a line"):
        load_corpus(write(tmp_path / "a.json", json.dumps([{"text": ONE}])))


def test_json_line_without_the_field(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", json.dumps({"id": 1, "body": ONE}))
    with pytest.raises(InputError, match=r"line 1 .*no field 'text', it has id, body.*field="):
        load_corpus(source)
    with pytest.raises(InputError, match=r"line 1 .*int in 'id': expected text"):
        load_corpus(source, field="id")


def test_dataset_without_the_field(tmp_path: Path) -> None:
    texts().save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(InputError, match=r"row 1 .*no field 'sentence', it has text, number, body"):
        load_corpus(str(tmp_path / "saved"), field="sentence")


def test_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"could not be loaded \(.*data files.*wikipedia-sample"):
        load_corpus(str(tmp_path))


def test_leipzig_line_without_a_number(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 2 of .*number<TAB>sentence.*A second one"):
        load_corpus(write(tmp_path / "eng-sentences.txt", f"1\t{ONE}\n{TWO}\n"))


def test_archive_without_sentences(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file that ends in '-sentences\.txt'.*eng/eng-words\.txt"):
        load_corpus(archive(tmp_path / "eng.tar.gz", {"eng/eng-words.txt": b"1\tthe\t9"}))


def test_archive_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"eng\.tar\.gz' could not be read .*damaged"):
        load_corpus(write(tmp_path / "eng.tar.gz", "<html>Not found</html>"))


def test_archive_cut_short(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(50_000).hex()
    lines = "".join(f"{i}\t{ONE} {noise[20 * i : 20 * i + 20]}\n" for i in range(5000)).encode()
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


def test_sentences_are_read_without_torch() -> None:
    code = "import sys, matlens.corpora; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
