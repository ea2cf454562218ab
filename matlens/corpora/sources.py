"""Reading sentences lazily from samples, files and datasets; which of them count is `corpus`'s part."""

import json
import re
import socket
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from sentencex import segment

from matlens.corpora.samples import news_sample, wikipedia_sample
from matlens.errors import InputError

_SAMPLES: dict[str, Callable[[], Iterator[str]]] = {
    "wikipedia-sample": wikipedia_sample,
    "news-sample": news_sample,
}
_CHOICES = (
    f"Give one of the samples ({', '.join(_SAMPLES)}), the path of a text file with one sentence a line, "
    "of a .jsonl file or of a Leipzig corpus, or the id of a dataset on the Hugging Face Hub (name or "
    "name:config)."
)
_ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar")
_FILE_SUFFIXES = (*_ARCHIVE_SUFFIXES, ".txt", ".tsv", ".csv", ".jsonl", ".json")
_LEIPZIG_NAME = "-sentences.txt"
_LEIPZIG_LINE = re.compile(rb"(?:\xef\xbb\xbf)?\d+\t")
_SNIFFED_LINES = 10
_CONNECT_SECONDS = 5.0


def open_source(source: str, field: str, split: str) -> Iterator[str]:
    """Read a source sentence by sentence; `load_corpus` says what sources there are.

    Parameters
    ----------
    source
        The source as the user gives it.
    field
        Name of the field that holds the text, in JSON lines and datasets.
    split
        Name of the split to read, in datasets.

    Raises
    ------
    InputError
        The source is not there, or a line of it cannot be read.
    """
    if source in _SAMPLES:
        return _SAMPLES[source]()
    path = Path(source).expanduser()
    if path.is_file():
        return _file_sentences(path, field)
    # The id of a dataset has one slash at most; what looks more like a path is not sent to the hub.
    looks_like_path = source.startswith((".", "/", "~")) or "\\" in source or source.count("/") > 1
    if not source or (not path.is_dir() and (looks_like_path or source.lower().endswith(_FILE_SUFFIXES))):
        raise InputError(f"There is no file or folder {source!r}. {_CHOICES}")
    return _dataset_sentences(source, path, field, split)


def _file_sentences(path: Path, field: str) -> Iterator[str]:
    name = path.name.lower()
    if name.endswith(".csv"):
        raise InputError(
            f"{str(path)!r} is a table, whose columns would be read as text. Expected one sentence a line "
            "(.txt) or JSON lines (.jsonl)."
        )
    if name.endswith((".jsonl", ".json")):
        return _json_sentences(path, field)
    if name.endswith((*_ARCHIVE_SUFFIXES, _LEIPZIG_NAME, ".tsv")) or _looks_like_leipzig(path):
        return _leipzig_sentences(path)
    return (line for _, line in numbered_lines(path))


def _looks_like_leipzig(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            head = [line for line in islice(stream, _SNIFFED_LINES) if line.strip()]
    except OSError:
        return False  # reading it says why
    return bool(head) and all(map(_LEIPZIG_LINE.match, head))


def _leipzig_sentences(path: Path) -> Iterator[str]:
    for number, line in numbered_lines(path):
        identifier, tab, sentence = line.partition("\t")
        if line.strip() and not (tab and identifier.strip().isdecimal()):
            raise InputError(
                f"Line {number} of {str(path)!r} is not 'number<TAB>sentence', as in a Leipzig corpus: "
                f"{line.strip()[:60]!r}. Remove it, or give the sentences one a line in a file named .txt."
            )
        yield sentence


def _json_sentences(path: Path, field: str) -> Iterator[str]:
    for where, row in json_rows(path):
        yield replace_surrogates(text_of_row(row, field, where) if row is not None else "")


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Read JSON lines, each with words that say where it stands; a blank line is ``None``.

    Raises
    ------
    InputError
        A line is no JSON object, or the file cannot be read.
    """
    for number, line in numbered_lines(path):
        where = f"line {number} of {str(path)!r}"
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise InputError(
                f"There is no JSON in {where} ({error}). Expected one JSON object a line."
            ) from error
        if not isinstance(row, dict) and line.strip():
            raise InputError(
                f"There is a JSON {type(row).__name__} in {where}. Expected one JSON object a line."
            )
        yield where, row


def replace_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can spell and no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_of_row(row: Mapping[str, Any], field: str, where: str) -> str:
    """The text in a field of a row; it is empty where the field is null.

    Parameters
    ----------
    row
        The row.
    field
        Name of the field.
    where
        Words that say in messages where the row stands.

    Raises
    ------
    InputError
        There is no such field, or something else is in it.
    """
    if field not in row:
        raise InputError(
            f"There is no field {field!r} in {where}, it has {', '.join(row)}. Say which with --field "
            "(field= in Python)."
        )
    if not isinstance(row[field], str | None):
        raise InputError(f"The field {field!r} in {where} holds {type(row[field]).__name__}. Expected text.")
    return row[field] or ""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file, or of the sentences inside an archive, with their numbers from 1.

    Raises
    ------
    InputError
        The file cannot be read, or is not UTF-8.
    """
    offset = 0
    try:
        with _opened(path) as stream:
            for number, raw in enumerate(stream, 1):
                text = raw.decode()
                yield number, text.removeprefix("\ufeff") if number == 1 else text
                offset += len(raw)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{str(path)!r} is not UTF-8: line {number}, byte {offset + error.start} of the text. Convert "
            f"it, for example: iconv -f LATIN1 -t UTF-8 {path.name} > utf8.txt"
        ) from error
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{str(path)!r} could not be read ({reason}): it may be damaged. Fetch it again."
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    if not path.name.lower().endswith(_ARCHIVE_SUFFIXES):
        with path.open("rb") as stream:
            yield stream
        return
    with tarfile.open(path) as archive:
        names = []
        for member in archive:
            content = archive.extractfile(member)
            if content is not None and member.name.endswith(_LEIPZIG_NAME):
                yield content
                return
            names.append(member.name)
    raise InputError(
        f"{str(path)!r} has no file that ends in {_LEIPZIG_NAME!r}, as a Leipzig archive does; "
        f"it has: {', '.join(names[:5]) or 'nothing'}."
    )


def _dataset_sentences(source: str, path: Path, field: str, split: str) -> Iterator[str]:
    for number, row in enumerate(_dataset_rows(source, path, split), 1):
        pieces = segment("en", text_of_row(row, field, f"row {number} of {source!r}"))
        # Blank lines between paragraphs are no sentences; a text without any is one that is empty.
        yield from [piece for piece in pieces if piece.strip()] or [""]


def _dataset_rows(source: str, path: Path, split: str) -> Iterable[Mapping[str, Any]]:
    import datasets  # takes a second to import, and most sources do without it

    try:
        if (path / "dataset_dict.json").is_file():
            parts = datasets.load_from_disk(str(path))
            if split not in parts:
                raise InputError(
                    f"{source!r} has no split {split!r}, it has {', '.join(parts)}. Say which with --split "
                    "(split= in Python)."
                )
            return parts[split]
        if (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        if path.is_dir():
            return datasets.load_dataset(str(path), split=split, streaming=True)
        name, _, config = source.partition(":")
        offline = datasets.config.HF_HUB_OFFLINE
        if not offline:
            _check_connection(datasets.config.HF_ENDPOINT)
        # Offline, what was downloaded before can be read from the cache, but not streamed.
        return datasets.load_dataset(name, config or None, split=split, streaming=not offline)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"The dataset {source!r} could not be loaded ({reason}). {_CHOICES}") from error


def _check_connection(endpoint: str) -> None:
    """Fail at once without a network, where `datasets` would retry for half a minute."""
    if urllib.request.getproxies():
        return  # the proxy finds the host, this machine need not
    url = urlsplit(endpoint)
    try:
        address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
        socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(
            f"{endpoint} does not answer: {error}; a dataset downloaded before is read with HF_HUB_OFFLINE=1"
        ) from error
