"""Text files are read in pieces, to their checksum and within bounds."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import tracemalloc

import pytest
from corpus_files import FIRST, SECOND, THIRD, write
from hypothesis import given, settings
from hypothesis import strategies as st

from matlens.data.corpus import load_corpus
from matlens.errors import InputError

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
WORDS = ("eng/eng-words.txt", b"1\tthe\t9" * 900, tarfile.REGTYPE)


def test_the_sentences_of_compressed_files_and_leipzig_archives_are_read(tmp_path):
    members = [("eng/", b"", tarfile.DIRTYPE), WORDS, SENTENCES, ("x", b"1" * 5000, b"0")]
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
    for members in ([SENTENCES, ("deu-sentences.txt", LEIPZIG, tarfile.REGTYPE)], [WORDS]):
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


def test_a_bomb_takes_no_memory(tmp_path, monkeypatch):
    line = write(tmp_path / "a.txt.gz", gzip.compress(b"a" * 2**26))
    lines = write(tmp_path / "b.txt.gz", gzip.compress(f"{FIRST * 30}\n".encode() * 2**12))
    headers = write(tmp_path / "pax.tgz", tarred([SENTENCES], comment="x" * 2**25))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="MATLENS_MAX_LINE_MIB"):
            load_corpus(line)
        assert load_corpus(headers).sentences == (FIRST, SECOND)
        monkeypatch.setenv("MATLENS_MAX_UNPACKED_MIB", "2")
        with pytest.raises(InputError, match="MATLENS_MAX_UNPACKED_MIB"):
            load_corpus(lines)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()
