"""Files and what is packed in them, opened without trust: in pieces, within bounds, and no way out of them.

Nothing is unpacked to disk or held whole. What is packed (gzip, bz2, xz, zip, and Leipzig's archives) is read
to the checksum.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

from matlens.errors import InputError, printable
from matlens.io.bounds import HEADER, MEMBERS, RATIO, UNPACKED
from matlens.io.files import open_regular

LEIPZIG_NAME = "-sentences.txt"
ARCHIVE_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz", ".zip")
PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
PIECE = 2**18  # bytes unpacked at once
HEAD = 4096  # bytes that say what a file is
_XZ_MEMORY = 2**28
_RATIO_FROM = 2**24  # bytes from which on the ratio counts: a small file may well hold one line many times
_MAGIC: dict[str, tuple[bytes, Callable[[], Any]]] = {
    "gzip": (rb"\x1f\x8b", lambda: zlib.decompressobj(wbits=31)),
    "bz2": (rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", bz2.BZ2Decompressor),
    "xz": (rb"\xfd7zXZ\x00", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)),
}
_ZIP = re.compile(rb"PK(?:\x03\x04|\x05\x06)")


def shown(path: Path | str) -> str:
    """A path as messages have it."""
    return f"'{printable(str(path), most=300)}'"


def text_name(path: Path) -> str:
    """Name of the text in a file, in small letters: its own, without the ending of what it is packed by."""
    name = path.name.lower()
    with open_regular(path) as file:
        head = file.read(HEAD)
        if _ZIP.match(head):
            with zipfile.ZipFile(_Guarded(file, path)) as archive:
                return _text_of_zip(archive, path).filename.lower()
    if name.endswith(ARCHIVE_SUFFIXES):
        return LEIPZIG_NAME
    return name.removesuffix(next((end for end in PACKED_SUFFIXES if name.endswith(end)), ""))


def texts(path: Path) -> Iterator[Reader]:
    """The one text in a file. What is packed after it is read when the next is asked for, to the checksum."""
    with open_regular(path) as file:
        head = file.read(HEAD)
        file.seek(0)
        if _ZIP.match(head):
            with zipfile.ZipFile(_Guarded(file, path)) as archive:
                member = _text_of_zip(archive, path)
                with archive.open(member) as content:
                    pieces = iter(lambda: content.read(PIECE), b"")
                    yield _reader(_metered(pieces, file.tell, path))
            return
        kind = packing_of(head)
        packed = _unpacked(file, kind, path) if kind else iter(lambda: file.read(PIECE), b"")
        stream = _reader(_metered(packed, file.tell, path) if kind else packed)
        head = stream.peek_at(HEAD)
        if (head[257:262] == b"ustar" and b"\0" in head) or path.name.lower().endswith(ARCHIVE_SUFFIXES):
            yield from _texts_of_tar(stream, path)
        else:
            yield stream
        while stream.read(PIECE):  # to the checksum
            pass


def packing_of(head: bytes) -> str | None:
    """What the first bytes of a file say that it is packed by, if it is."""
    for kind, (magic, _) in _MAGIC.items():
        if re.match(magic, head):
            return kind
    return "zip" if _ZIP.match(head) else None


class Reader(io.BufferedReader):
    """A stream of the pieces that an iterator gives, whose beginning can be looked at."""

    def peek_at(self, size: int) -> bytes:
        """The first bytes, or fewer where there are no more; to be asked for before anything is read."""
        raw = self.raw
        assert isinstance(raw, _Pieces)
        return raw.head(size)


class _Pieces(io.RawIOBase):
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._piece = pieces, b""

    def readable(self) -> bool:
        return True

    def head(self, size: int) -> bytes:
        first: list[bytes] = []
        for piece in self._pieces:
            first.append(piece)
            if sum(map(len, first)) >= size:
                break
        self._pieces = chain(first, self._pieces)
        return b"".join(first)[:size]

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = piece
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size


def _reader(pieces: Iterator[bytes]) -> Reader:
    return Reader(_Pieces(pieces), PIECE)


def _unpacked(file: IO[bytes], kind: str, path: Path) -> Iterator[bytes]:
    """What is packed, stream after stream; each is checked at its end, and there has to be one."""
    make = _MAGIC[kind][1]
    decoder: Any = None
    data, ended, n_streams = b"", False, 0
    while True:
        if not data and (decoder is None or getattr(decoder, "needs_input", True)):
            data = file.read(PIECE)
            ended = not data
        if decoder is None:
            if n_streams:
                data = data.lstrip(b"\0")  # which may fill up what follows a stream
            if not data and ended:
                return
            if not data:
                continue
            decoder = make()
        piece = decoder.decompress(data, PIECE)
        if decoder.eof:
            data, decoder = decoder.unused_data, None
            n_streams += 1
        else:
            data = getattr(decoder, "unconsumed_tail", b"")
            if ended and not piece:
                raise EOFError(f"the {kind} stream ends before its end, it is cut short")
        if piece:
            yield piece


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


# Archives


class _Guarded:
    """A file as `zipfile` reads it, which holds a directory in memory, and none larger than the bound."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        most = HEADER.limit
        if size > most:
            raise HEADER.error(shown(self._path))
        data = self._file.read(size if size >= 0 else most + 1)
        if len(data) > most:
            raise HEADER.error(shown(self._path))
        return data


def _text_of_zip(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    """The member with the sentences of a Leipzig corpus, or the only file that there is."""
    members = archive.infolist()
    MEMBERS.check(len(members), shown(path))
    for member in members:
        mode = member.external_attr >> 16
        _check_plain_member(
            member.filename, not stat.S_IFMT(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode), path
        )
    files = [member for member in members if not member.is_dir()]
    chosen = [member for member in files if member.filename.endswith(LEIPZIG_NAME)] or files
    if len(chosen) != 1:
        raise _no_text([member.filename for member in chosen], path)
    if chosen[0].flag_bits & 1:
        raise InputError(f"{shown(path)} is locked by a password. Expected an archive without one.")
    return chosen[0]


class _Forward:
    """A stream as `tarfile` reads it: forward only, with headers no larger than the bound."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path, self._place, self._left = stream, path, 0, HEADER.limit
        self.last = b""

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        if place < self._place:
            raise tarfile.ReadError("a header points backwards")
        while self._place < place:
            if not self.take(min(place - self._place, PIECE)):
                return

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._left:
            raise HEADER.error(shown(self._path))
        self._left -= size
        self.last = self.take(size)
        return self.last

    def take(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._place += len(data)
        return data

    def renew(self) -> None:
        self._left = HEADER.limit


def _texts_of_tar(stream: IO[bytes], path: Path) -> Iterator[Reader]:
    forward = _Forward(stream, path)
    names: list[str] = []
    n_texts = 0
    with tarfile.open(fileobj=forward, mode="r:") as archive:  # type: ignore[call-overload]
        while (member := archive.next()) is not None:
            names.append(member.name)
            MEMBERS.check(len(names), shown(path))
            _check_plain_member(
                member.name, (member.isreg() and not member.issparse()) or member.isdir(), path
            )
            if member.isreg() and member.name.endswith(LEIPZIG_NAME):
                n_texts += 1
                if n_texts > 1:
                    raise _no_text([name for name in names if name.endswith(LEIPZIG_NAME)], path)
                content = _reader(_member_pieces(forward, member.size))
                yield content
                while content.read(PIECE):
                    pass
            archive.members.clear()
            forward.renew()
        # Where a header is altered, tarfile takes it for the end, which has to be a block of zeros.
        if len(forward.last) < tarfile.BLOCKSIZE or any(forward.last):
            raise tarfile.ReadError("the archive ends in the middle, it is cut short or altered")
    if not n_texts:
        raise _no_text(names, path)


def _member_pieces(forward: _Forward, size: int) -> Iterator[bytes]:
    while size:
        piece = forward.take(min(size, PIECE))
        if not piece:
            raise EOFError("the archive ends in the middle, it is cut short")
        size -= len(piece)
        yield piece


def _check_plain_member(name: str, plain: bool, path: Path) -> None:
    outside = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
    if outside or ".." in (*PurePosixPath(name).parts, *PureWindowsPath(name).parts) or "\0" in name:
        raise InputError(
            f"{shown(path)} has a file whose path leads out of it: {shown(name)}. An archive like that is "
            "not read; pack the sentences anew."
        )
    if not plain:
        raise InputError(
            f"{shown(path)} has a link, a device or the like in it: {shown(name)}. Expected files and "
            "folders alone; pack the sentences anew."
        )


def _no_text(names: list[str], path: Path) -> InputError:
    listed = ", ".join(printable(name, most=60) for name in names[:5]) or "nothing"
    return InputError(
        f"{shown(path)} has not one file that ends in {LEIPZIG_NAME!r}, as a Leipzig archive does; it has: "
        f"{listed}. Unpack the text that is meant, and give that."
    )
