"""Text files, packed or not, read in pieces: within the bounds, and to the checksum.

A file that was cut short or altered is refused after its last line at the latest, and what is no text in
UTF-8 is called by its name.
"""

from __future__ import annotations

import lzma
import re
import shlex
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from matlens.data.packing import HEAD, PIECE, Reader, packing_of, shown, text_name, texts
from matlens.errors import InputError, printable
from matlens.io.bounds import LINE
from matlens.io.files import open_regular
from matlens.parallel import waiting

_OTHER_KINDS = (
    (rb"\x28\xb5\x2f\xfd", "a Zstandard file"), (rb"7z\xbc\xaf", "a 7z archive"), (rb"Rar!", "a RAR archive"),
    (rb"PAR1", "a Parquet file, which is read from a folder of its own"), (rb"%PDF-", "a PDF"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8", "a picture"), (rb"SQLite format 3", "a database"),
    (rb"\xd0\xcf\x11\xe0", "a document of an office program"), (rb"GGUF", "a model"),
)  # fmt: skip
_MARKS = ((b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"),
          (b"\xfe\xff", "UTF-16"))  # fmt: skip
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError,
    OverflowError, RecursionError, NotImplementedError, RuntimeError,
)  # fmt: skip


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a text file, packed or not, or of the sentences inside an archive, with their numbers from 1.

    Raises
    ------
    InputError
        The file cannot be read, is damaged or past a bound, or is no text in UTF-8.
    """
    with _read_errors(path):
        for text in texts(path):
            yield from _lines(_checked_text(text, path), path)


def check_to_the_end(path: Path) -> None:
    """Read a packed file to its checksum, as reading all of its lines does.

    Raises
    ------
    InputError
        The file is damaged or past a bound.
    """
    with _read_errors(path):
        with open_regular(path) as file:
            if packing_of(file.read(HEAD)) is None:
                return
        with waiting("checking"):
            for text in texts(path):
                while text.read(PIECE):
                    pass


def inner_name(path: Path) -> str:
    """Name of the text in a file, see `text_name`.

    Raises
    ------
    InputError
        It is an archive that cannot be read.
    """
    with _read_errors(path):
        return text_name(path)


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as error:
        reason = printable(str(error).partition("\n")[0] or type(error).__name__, most=200)
        denied = isinstance(error, PermissionError | FileNotFoundError | IsADirectoryError)
        advice = "Expected a file that can be read." if denied else "It may be damaged. Fetch it again."
        raise InputError(f"{shown(path)} could not be read ({reason}). {advice}") from error


def _lines(text: IO[bytes], path: Path) -> Iterator[tuple[int, str]]:
    offset = 0
    number, most = 0, LINE.limit
    while raw := text.readline(most + 1):
        number += 1
        if len(raw) > most:
            raise LINE.error(f"Line {number} of {shown(path)}")
        if b"\0" in raw:
            raise InputError(
                f"Line {number} of {shown(path)} has a NUL byte, byte {offset + raw.index(0)} of the text: "
                "it is no text, or it is damaged. Expected text in UTF-8."
            )
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{shown(path)} is not UTF-8: line {number}, byte {offset + error.start} of the text. "
                "Convert it from what it is saved in, such as LATIN1 or CP1252: iconv -f LATIN1 -t UTF-8 "
                f"{shlex.quote(path.name)} > utf8.txt"
            ) from error
        yield number, line.removeprefix("\ufeff") if number == 1 else line
        offset += len(raw)


def _checked_text(text: Reader, path: Path) -> IO[bytes]:
    """Refuse at the first bytes what is no text in UTF-8, by its name."""
    head = text.peek_at(HEAD)
    name = shlex.quote(path.name)
    other = next((kind for magic, kind in _OTHER_KINDS if re.match(magic, head)), None)
    if other and not _is_plain(head):
        raise InputError(f"{shown(path)} is {other}. Expected text in UTF-8.")
    encoding = wide_encoding(head)
    if encoding:
        raise InputError(
            f"{shown(path)} is {encoding}, not UTF-8. Convert it: iconv -f {encoding} -t UTF-8 {name} "
            "> utf8.txt"
        )
    if packing_of(head):
        raise InputError(
            f"{shown(path)} is packed twice: there is {packing_of(head)} inside it. Unpack it once more."
        )
    return text


def _is_plain(head: bytes) -> bool:
    try:
        return b"\0" not in head and bool(head.decode(errors="strict"))
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4  # the last character may be cut


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, if a text is in it: by the mark at its beginning, or by where its NUL bytes stand."""
    marked = next((encoding for mark, encoding in _MARKS if head.startswith(mark)), None)
    if marked:
        return marked
    zeros = [head[i::4].count(0) for i in range(4)]
    quarter = len(head) / 4
    if not head.strip(b"\0"):
        return None
    if head.count(0) > 0.6 * len(head):
        return "UTF-32LE" if zeros[0] < zeros[3] else "UTF-32BE"
    big, little = zeros[0] + zeros[2], zeros[1] + zeros[3]
    for few, many, encoding in ((big, little, "UTF-16LE"), (little, big, "UTF-16BE")):
        if many > 0.4 * quarter and many > 4 * few:
            return encoding
    if head.count(0) and not _is_plain(head.replace(b"\0", b"")):
        for encoding in ("UTF-16LE", "UTF-16BE"):
            text = head[: len(head) // 2 * 2].decode(encoding, errors="replace")
            if (
                sum(c.isprintable() or c.isspace() for c in text) > 0.95 * len(text)
                and "\ufffd" not in text[:-1]
            ):
                return encoding
    return None
