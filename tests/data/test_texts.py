"""Text files are read in pieces, to their checksum and within bounds."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from corpus_files import FIRST, SECOND, THIRD, write
from hypothesis import given, settings
from hypothesis import strategies as st

from matlens.data.corpus import load_corpus
from matlens.errors import InputError

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda text: gzip.compress(text, mtime=0), "bz2": bz2.compress, "xz": lzma.compress,
}  # fmt: skip
LINES = "".join(f"{FIRST} {random.Random(i).random()}\n" for i in range(300)).encode()
LEIPZIG = f"1\t{FIRST}\n2\t{SECOND}\n".encode()
DAMAGED = r"could not be read .*damaged"


def zipped(members: dict[str, bytes], *, modes: dict[str, int] | None = None, kind: int = 8) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", kind) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = kind
            info.external_attr = (modes or {}).get(name, 0o100644) << 16
            archive.writestr(info, data)
    return content.getvalue()


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


# Every packing


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("name", ["mine.txt", "mine.jsonl", "eng-sentences.txt", "mine"])
def test_a_packed_file_is_read_as_what_is_in_it(packing: str, name: str, tmp_path: Path) -> None:
    text = {"mine.jsonl": f'{{"text": "{FIRST}"}}\n{{"text": "{SECOND}"}}\n'.encode(),
            "eng-sentences.txt": LEIPZIG}.get(name, f"{FIRST}\n{SECOND}\n".encode())  # fmt: skip
    source = write(tmp_path / f"{name}.{packing}", PACKERS[packing](text))
    assert load_corpus(source).sentences == (FIRST, SECOND)
    # What a file is packed by is seen from its bytes, not from its name.
    assert load_corpus(write(tmp_path / name, PACKERS[packing](text))).sentences == (FIRST, SECOND)


@pytest.mark.parametrize(
    "kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_a_zip_holds_the_sentences_of_leipzig_or_one_file(kind: int, tmp_path: Path) -> None:
    members = {name: data for name, data, _ in (WORDS, SENTENCES)} | {"eng/": b""}
    source = write(tmp_path / "a.zip", zipped(members, kind=kind))
    assert load_corpus(source).sentences == (FIRST, SECOND)
    single = zipped({"text.jsonl": f'{{"text": "{THIRD}"}}'.encode()}, kind=kind)
    assert load_corpus(write(tmp_path / "b.zip", single)).sentences == (THIRD,)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("name", ["eng", "eng.tgz"])
def test_an_archive_of_leipzig_however_it_is_packed(mode: str, name: str, tmp_path: Path) -> None:
    content = tarred([("eng/", b"", tarfile.DIRTYPE), WORDS, SENTENCES, ("x", b"1" * 5000, b"0")], mode)
    assert load_corpus(write(tmp_path / name, content)).sentences == (FIRST, SECOND)


@pytest.mark.parametrize("packing", PACKERS)
def test_streams_that_follow_each_other_are_one(packing: str, tmp_path: Path) -> None:
    first, second = (PACKERS[packing](f"{text}\n".encode()) for text in (FIRST, SECOND))
    source = write(tmp_path / "a", first + second + bytes(2**19) + first + bytes(512))
    assert load_corpus(source).sentences == (FIRST, SECOND)
    assert load_corpus(source).n_read == 3


# To the checksum


@settings(max_examples=40)
@given(packing=st.sampled_from(sorted(PACKERS)), share=st.floats(0, 0.999), limit=st.sampled_from([None, 2]))
def test_what_is_cut_short_is_refused_wherever_that_is(
    packing: str, share: float, limit: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packed = PACKERS[packing](LINES)
    cut = packed[: max(int(share * len(packed)), 40)]
    with pytest.raises(InputError, match=rf"a' {DAMAGED}"):
        load_corpus(write(tmp_path_factory.mktemp("cut") / "a", cut), limit=limit)


@settings(max_examples=60)
@given(packing=st.sampled_from(["gz", "bz2", "xz", "zip", "tar.gz"]), place=st.floats(0, 0.999),
       bit=st.integers(0, 7), limit=st.sampled_from([None, 2]))  # fmt: skip
def test_what_is_altered_is_refused_or_the_same(
    packing: str, place: float, bit: int, limit: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = LINES.replace(b"\n", b" \n")
    made = {"zip": lambda text: zipped({"a.txt": text}),
            "tar.gz": lambda text: tarred([("a-sentences.txt", b"1\t" + text.replace(b"\n", b"\n1\t")[:-2],
                                            tarfile.REGTYPE)])}  # fmt: skip
    packed = bytearray({**PACKERS, **made}[packing](lines))
    path = tmp_path_factory.mktemp("altered") / f"a.{packing}"
    whole = load_corpus(write(path, bytes(packed)), limit=limit)
    packed[int(place * len(packed))] ^= 1 << bit
    try:
        corpus = load_corpus(write(path, bytes(packed)), limit=limit)
    except InputError as error:
        assert len(str(error)) < 800  # noqa: PT017
    else:
        assert corpus.sentences == whole.sentences


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("trailing", ["x", "zip", "cut", "altered"])
def test_what_follows_the_end_is_a_whole_stream(
    packing: str, trailing: str, limit: int | None, tmp_path: Path
) -> None:
    """A later stream that is altered would otherwise be a shorter corpus."""
    another = PACKERS[packing](b"no\n")
    rest = {"x": b"x", "zip": b"PK\x03\x04", "cut": another[:-3], "altered": b"\1" + another[1:]}[trailing]
    with pytest.raises(InputError, match=DAMAGED):
        load_corpus(write(tmp_path / "a.gz", PACKERS[packing](LINES) + rest), limit=limit)


@pytest.mark.parametrize("limit", [None, 1])
def test_an_archive_whose_later_header_is_altered_is_no_shorter_one(
    limit: int | None, tmp_path: Path
) -> None:
    content = bytearray(tarred([SENTENCES, ("b", b"x" * 600, tarfile.REGTYPE)], "w"))
    content[content.rindex(b"ustar") + 200] ^= 1
    with pytest.raises(InputError, match=DAMAGED):
        load_corpus(write(tmp_path / "a.tar.gz", gzip.compress(bytes(content))), limit=limit)


@pytest.mark.parametrize("end", [512, 1024, 1536, 2048])
def test_an_archive_that_ends_between_its_files_is_cut_short(end: int, tmp_path: Path) -> None:
    content = tarred([SENTENCES, ("b", b"x" * 600, tarfile.REGTYPE)], "w")[:end]
    with pytest.raises(InputError, match=DAMAGED):
        load_corpus(write(tmp_path / "a.tar", content))


def test_a_packed_file_of_which_little_is_read_is_read_to_its_checksum(tmp_path: Path) -> None:
    packed = gzip.compress("".join(f"{FIRST} {i}\n" for i in range(20_000)).encode())
    assert len(load_corpus(write(tmp_path / "a.gz", packed), limit=3)) == 3
    with pytest.raises(InputError, match=DAMAGED):
        load_corpus(write(tmp_path / "b.gz", packed[:-8] + b"\0\0\0\0" + packed[-4:]), limit=3)


def test_an_archive_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"eng\.tar\.gz' {DAMAGED}"):
        load_corpus(write(tmp_path / "eng.tar.gz", "<html>Not found</html>"))


# No other text


@pytest.mark.parametrize(
    "content",
    [
        tarred([SENTENCES, ("deu-sentences.txt", LEIPZIG, tarfile.REGTYPE)]),
        tarred([WORDS]),
        zipped({"eng-sentences.txt": LEIPZIG, "deu-sentences.txt": LEIPZIG}),
        zipped({"a.txt": b"x", "b.txt": b"y"}),
        zipped({}),
    ],
    ids=["two in a tar", "none in a tar", "two in a zip", "two others in a zip", "empty zip"],
)
def test_an_archive_without_one_text_is_no_corpus(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must hold one file that ends in '-sentences\.txt'"):
        load_corpus(write(tmp_path / "a.tar", content))


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "loop"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(InputError):
        load_corpus("/dev/zero" if kind == "device" else str(path))


# Text that is none


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
@pytest.mark.parametrize("sentence", [FIRST, THIRD, "日本語の文章です。\n猫が好きです。 One more."])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a-sentences.txt", "a.txt.gz"])
def test_other_encodings_are_refused(encoding: str, sentence: str, name: str, tmp_path: Path) -> None:
    if encoding == "latin-1":
        sentence = THIRD
    content = "".join(f"{i}\t{sentence}\r\n" for i in range(5)).encode(encoding)
    with pytest.raises(InputError, match=r"Line 1 of .*not text in UTF-8.*iconv -f LATIN1 -t UTF-8 a"):
        load_corpus(write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (f"{FIRST}\n{SECOND[:9]}\0{SECOND}\n".encode(), 2),
        (f"{FIRST}\n".encode() * 500 + b"\xff\n", 501),
        (bytes(5000), 1),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", 2),
        (b"PAR1\x15\x04\x15\x00", 1),
        (gzip.compress(gzip.compress(LINES)), 1),
    ],
    ids=["a NUL", "late", "zeros", "PDF", "Parquet", "packed twice"],
)
def test_what_is_no_text_is_told_by_its_line(content: bytes, line: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"Line {line} of .*/a\.txt' is not text in UTF-8"):
        load_corpus(write(tmp_path / "a.txt", content))


@pytest.mark.parametrize(
    "start", ["PAR1 is a gene of five words", "GIF89 was it not I ask", "BZh9 what is this line"]
)
def test_text_that_begins_like_another_file_is_text(start: str, tmp_path: Path) -> None:
    assert load_corpus(write(tmp_path / "a.txt", start)).sentences == (start,)


# Bounds


def bomb(line: bytes = b"\0" * 2**16, n: int = 600) -> bytes:
    packer = io.BytesIO()
    with gzip.open(packer, "wb") as stream:
        for _ in range(n):
            stream.write(line)
    return packer.getvalue()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (bomb(b"a" * 2**16), "MATLENS_MAX_LINE_MIB"),
        (bomb((100 * FIRST.encode() + b"\n") * 20), "MATLENS_MAX_RATIO"),
        (tarred([("a" * 99, b"\0" * 2**25, tarfile.REGTYPE), SENTENCES]), "MATLENS_MAX_RATIO"),
    ],
    ids=["a line", "many lines", "another file of the archive"],
)
def test_what_grows_out_of_all_proportion_takes_no_memory(
    content: bytes, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named == "MATLENS_MAX_RATIO":
        monkeypatch.setattr("matlens.data.texts._RATIO_FROM", 2**20)
    source = write(tmp_path / "a.txt.gz", content)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=named):
            load_corpus(source)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()


def test_headers_of_an_archive_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of a tar are passed over; a zip's directory is held, and bounded."""
    sources = [write(tmp_path / "pax.tgz", tarred([SENTENCES], comment="x" * 2**25))]
    long_name = io.BytesIO()
    with tarfile.open(fileobj=long_name, mode="w:gz", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("n" * 2**25))
        info = tarfile.TarInfo(SENTENCES[0])
        info.size = len(LEIPZIG)
        archive.addfile(info, io.BytesIO(LEIPZIG))
    sources.append(write(tmp_path / "gnu.tgz", long_name.getvalue()))
    monkeypatch.setenv("MATLENS_MAX_RATIO", "100000")
    tracemalloc.start()
    try:
        for source in sources:
            assert load_corpus(source).sentences == (FIRST, SECOND)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()
    monkeypatch.setenv("MATLENS_MAX_HEADER_MIB", "1")
    directory = zipped({f"{i:08}{'n' * 100}": b"" for i in range(9000)})
    with pytest.raises(InputError, match=r"MiB of names and headers.*MATLENS_MAX_HEADER_MIB"):
        load_corpus(write(tmp_path / "a.zip", directory))


def test_members_lines_sizes_and_sentences_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(variable: str, content: bytes, name: str = "a", most: str = "1") -> None:
        source = write(tmp_path / name, content)
        load_corpus(source)
        monkeypatch.setenv(variable, most)
        with pytest.raises(InputError, match=variable):
            load_corpus(source)
        monkeypatch.delenv(variable)

    members = [(f"m{i}", b"", tarfile.REGTYPE) for i in range(3)]
    refused("MATLENS_MAX_MEMBERS", tarred([*members, SENTENCES]), most="3")
    refused("MATLENS_MAX_MEMBERS", zipped({"m": b"", "a-sentences.txt": LEIPZIG}), most="1")
    distinct = "".join(f"{FIRST} {i} {random.Random(i).random()}\n" for i in range(30_000)).encode()
    refused("MATLENS_MAX_UNPACKED_MIB", gzip.compress(distinct))
    refused("MATLENS_MAX_CORPUS_MIB", distinct)
    refused("MATLENS_MAX_SENTENCES", distinct, most="29999")
    refused("MATLENS_MAX_LINE_MIB", b"w " * 600_000)


def test_a_dictionary_larger_than_memory_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**29}]
    packer = lzma.LZMACompressor(lzma.FORMAT_XZ, filters=filters)
    source = write(tmp_path / "a.xz", packer.compress(LINES) + packer.flush())
    with pytest.raises(InputError, match=r"could not be read .*[Mm]emory"):
        load_corpus(source)
