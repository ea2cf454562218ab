"""Text files that others wrote, plain or packed: read to their checksum.

Nothing is unpacked to disk or held in memory whole, so names and links in archives lead nowhere. The bounds
are those of `matlens.io.bounds`.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import shlex
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from matlens.errors import InputError, printable
from matlens.io.bounds import HEADER, LINE, MEMBERS, RATIO, UNPACKED, parse_json
from matlens.io.files import open_regular

LEIPZIG_NAME = "-sentences.txt"
ARCHIVE_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz", ".zip")
PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
JSON_SUFFIXES = (".jsonl", ".json")
_PIECE = 2**18  # bytes unpacked at once
_XZ_MEMORY = 2**28
_RATIO_FROM = 2**24  # bytes from which on the ratio counts: a small file may well hold one line many times
_DECODERS: dict[bytes, Callable[[], Any]] = {
    rb"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),
    rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)": bz2.BZ2Decompressor,
    rb"\xfd7zXZ\x00": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
}
_ZIP = rb"PK(?:\x03\x04|\x05\x06)"
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError,
    OverflowError, RuntimeError,
)  # fmt: skip

Lines = Iterator[tuple[int, str]]


def shown(path: Path | str) -> str:
    """A path as messages have it."""
    return f"'{printable(str(path), most=300)}'"


@contextmanager
def open_text(path: Path) -> Iterator[tuple[str, Lines]]:
    """The name of the text in a file, in small letters, and its lines, numbered from 1.

    The file is a text, plain or packed by gzip, bz2 or xz, a zip of one text, or an archive of Leipzig's.
    What is packed has been read to its checksum when all lines have, and on leaving in any case.

    Raises
    ------
    InputError
        The file cannot be read, is damaged, past a bound, or no text in UTF-8.
    """
    try:
        with open_regular(path) as file:
            name, pieces, is_packed = _text_in(cast(io.BufferedReader, file), path)
            yield name, _lines(_reader(pieces), path)
            if is_packed:
                for _ in pieces:
                    pass
    except InputError:
        raise
    except _DAMAGE as error:
        reason = printable(str(error).partition("\n")[0] or type(error).__name__, most=200)
        raise InputError(
            f"{shown(path)} could not be read ({reason}). Is it there, and not damaged?"
        ) from error


def json_rows(lines: Lines, path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Read JSON lines, each with words that say where it stands; a blank line is ``None``."""
    for number, line in lines:
        where = f"line {number} of {shown(path)}"
        row = parse_json(line, f"{where}, which should hold one JSON object a line") if line.strip() else None
        if line.strip() and not isinstance(row, dict):
            raise InputError(
                f"There is a JSON {type(row).__name__} in {where}. Expected one JSON object a line."
            )
        yield where, row


def _lines(text: IO[bytes], path: Path) -> Lines:
    most = LINE.limit
    for number, raw in enumerate(iter(partial(text.readline, most + 1), b""), 1):
        if len(raw) > most:
            raise LINE.error(f"Line {number} of {shown(path)}")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            if "\0" in line:
                raise ValueError("it has a NUL character")
        except ValueError as error:
            raise InputError(
                f"Line {number} of {shown(path)} is not text in UTF-8 ({error}). Convert a text from what it "
                "is saved in, such as LATIN1, CP1252 or UTF-16: iconv -f LATIN1 -t UTF-8 "
                f"{shlex.quote(path.name)} > utf8.txt"
            ) from error
        yield number, line


class _Pieces(io.RawIOBase):
    """A stream of the pieces that an iterator gives, none of them empty."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._piece = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._piece = self._piece or next(self._pieces, b"")
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size


def _reader(pieces: Iterator[bytes]) -> io.BufferedReader:
    return io.BufferedReader(_Pieces(pieces), _PIECE)


def _text_in(file: io.BufferedReader, path: Path) -> tuple[str, Iterator[bytes], bool]:
    """Name of the text in a file, its pieces, and whether it is packed."""
    name, head = path.name.lower(), file.peek()
    if re.match(_ZIP, head):
        archive = zipfile.ZipFile(_Bounded(file, path))
        member = _text_of_zip(archive, path)
        content = archive.open(member)
        pieces = iter(partial(content.read, _PIECE), b"")
        return member.filename.lower(), _metered(pieces, file.tell, path), True
    make = next((make for magic, make in _DECODERS.items() if re.match(magic, head)), None)
    if make is None:
        pieces = iter(partial(file.read, _PIECE), b"")
    else:
        pieces = _metered(_unpacked(file, make), file.tell, path)
    first = next(pieces, b"")
    pieces = chain([first] if first else [], pieces)
    if (first[257:262] == b"ustar" and b"\0" in first[:512]) or name.endswith(ARCHIVE_SUFFIXES):
        return LEIPZIG_NAME, _text_of_tar(_reader(pieces), path), True
    packed = next((suffix for suffix in PACKED_SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(packed), pieces, make is not None


def _unpacked(file: IO[bytes], make: Callable[[], Any]) -> Iterator[bytes]:
    """What is packed, stream after stream, each of which is checked at its end."""
    data = file.read(_PIECE)
    while data:
        decoder = make()
        while not decoder.eof:
            piece = decoder.decompress(data, _PIECE)
            if piece:
                yield piece
            elif not data and not decoder.eof:
                raise EOFError("it is cut short")
            data = getattr(decoder, "unconsumed_tail", b"")
            if not data and not decoder.eof and getattr(decoder, "needs_input", True):
                data = file.read(_PIECE)
        data = decoder.unused_data.lstrip(b"\0")  # zeros may fill up what follows a stream
        while not data and (more := file.read(_PIECE)):
            data = more.lstrip(b"\0")


def _metered(pieces: Iterator[bytes], n_packed: Callable[[], int], path: Path) -> Iterator[bytes]:
    """Pieces of what is unpacked, refused where they grow too large, or out of all proportion."""
    most, ratio, size = UNPACKED.limit, RATIO.limit, 0
    for piece in pieces:
        size += len(piece)
        if size > most:
            raise UNPACKED.error(shown(path))
        if size > _RATIO_FROM and size > ratio * n_packed():
            raise RATIO.error(shown(path))
        yield piece


class _Bounded:
    """A file as `zipfile` reads it, which holds the directory in memory: none larger than the bound."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        HEADER.check(size, shown(self._path))
        return self._file.read(size)


def _text_of_zip(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    """The member with the sentences of a Leipzig corpus, or the only file that there is."""
    members = archive.infolist()
    MEMBERS.check(len(members), shown(path))
    files = [member for member in members if not member.is_dir()]
    chosen = [member for member in files if member.filename.endswith(LEIPZIG_NAME)] or files
    _check_one_text(len(chosen), path)
    return chosen[0]


def _text_of_tar(archive: IO[bytes], path: Path) -> Iterator[bytes]:
    """The sentences of a Leipzig corpus; everything after them is read to the archive's end as well."""
    n_members = n_texts = 0
    while (header := archive.read(tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        n_members += 1
        MEMBERS.check(n_members, shown(path))
        is_text = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.name.endswith(LEIPZIG_NAME)
        n_texts += is_text
        left = size = 0 if member.isdir() else member.size
        while left > 0:
            piece = archive.read(min(left, _PIECE))
            if not piece:
                raise EOFError("the archive is cut short")
            left -= len(piece)
            if is_text and n_texts == 1:
                yield piece
        archive.read(-size % tarfile.BLOCKSIZE)
    _check_one_text(n_texts, path)
    while archive.read(_PIECE):
        pass


def _check_one_text(n_texts: int, path: Path) -> None:
    if n_texts != 1:
        raise InputError(
            f"{shown(path)} must hold one file that ends in {LEIPZIG_NAME!r}, as a Leipzig archive does, and "
            f"holds {n_texts}. Unpack the text that is meant, and give that."
        )
