"""Text files and Leipzig archives, plain or gzip, read line by line.

Nothing is unpacked to disk, so names and links in an archive are harmless.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from matlens.errors import InputError

LEIPZIG_NAME = "-sentences.txt"
ARCHIVE_SUFFIXES = (".tar", ".tgz", ".tar.gz")
JSON_SUFFIXES = (".jsonl", ".json")
_PIECE = 2**18  # bytes read at once
LONGEST_LINE = 2**23  # bytes
_DAMAGE = (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, OverflowError)

Lines = Iterator[tuple[int, str]]


@contextmanager
def open_text(path: Path) -> Iterator[tuple[str, Lines]]:
    r"""The name of the text in a file, in lower case, and its lines, numbered from 1.

    Lines end with ``\n``, ``\r\n`` or ``\r``, as for Python's ``open``, and are given with ``\n``.

    A compressed file is read to its end on leaving, so that its checksum is verified.
    """
    name = path.name.lower()
    try:
        with path.open("rb") as opened:
            is_packed = name.endswith((".gz", ".tgz"))
            content: Any = gzip.GzipFile(fileobj=opened) if is_packed else opened
            if name.endswith(ARCHIVE_SUFFIXES):
                name, pieces = LEIPZIG_NAME, _lines_of_tar(content, path)
            else:
                pieces = iter(partial(content.readline, LONGEST_LINE + 1), b"")
            yield name.removesuffix(".gz"), _decoded(_universal(pieces), path)
            if is_packed:
                for _ in pieces:
                    pass
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(f"'{path}' cannot be read: {str(error) or type(error).__name__}.") from error


def _universal(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines, each ending with a line feed but for the last, from pieces that may end within one."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).splitlines(keepends=True)
        if rest.endswith(b"\n"):
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.rstrip(b"\r\n") + b"\n"
        if len(rest) > LONGEST_LINE:
            break
    if rest:
        yield rest.removesuffix(b"\r") + b"\n" if rest.endswith(b"\r") else rest


def _decoded(lines: Iterator[bytes], path: Path) -> Lines:
    for number, raw in enumerate(lines, 1):
        if len(raw) > LONGEST_LINE:
            raise InputError(f"Line {number} of '{path}' must be at most {LONGEST_LINE:,} bytes. Split it.")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            if "\0" in line:
                raise ValueError("it has a NUL character")
        except ValueError as error:
            where = f"Line {number} of '{path}'"
            raise InputError(
                f"{where} must be text in UTF-8, plain or gzip: {error}. iconv converts other text."
            ) from error
        yield number, line


def _lines_of_tar(archive: IO[bytes], path: Path) -> Iterator[bytes]:
    """Lines of the sentences of a Leipzig corpus; the rest of the archive is read, too."""
    n_texts = 0
    while (header := archive.read(tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
        # By hand, since tarfile reads headers of any size into memory.
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        is_text = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.name.endswith(LEIPZIG_NAME)
        n_texts += is_text
        remaining = size = 0 if member.isdir() else member.size
        while remaining > 0:
            is_line = is_text and n_texts == 1
            read, limit = (archive.readline, LONGEST_LINE + 1) if is_line else (archive.read, _PIECE)
            piece = read(min(remaining, limit))
            if not piece:
                raise EOFError("the archive is truncated")
            remaining -= len(piece)
            if is_line:
                yield piece
        archive.read(-size % tarfile.BLOCKSIZE)
    if n_texts != 1:
        raise InputError(
            f"'{path}' must hold one file that ends in {LEIPZIG_NAME!r}, as a Leipzig archive does, got "
            f"{n_texts}. Unpack the text, and give its path."
        )
    while archive.read(_PIECE):
        pass
