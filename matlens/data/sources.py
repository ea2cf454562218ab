"""Reading sentences lazily from samples, files and datasets; which of them count is `corpus`'s part."""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sentencex import segment

from matlens.data.packing import ARCHIVE_SUFFIXES, LEIPZIG_NAME, PACKED_SUFFIXES, shown
from matlens.data.samples import news_sample, wikipedia_sample
from matlens.data.streams import inner_name, numbered_lines
from matlens.data.translations import LANGUAGES, messages
from matlens.errors import InputError, did_you_mean, printable, short
from matlens.io.bounds import LINE, parse_json
from matlens.io.files import open_regular

Source = str | os.PathLike[str] | Iterable[str | Mapping[str, Any] | None]
"""What sentences are read from."""

SAMPLES: dict[str, Callable[[], Iterator[str]]] = {
    "wikipedia-sample": wikipedia_sample,
    "news-sample": news_sample,
    **{f"messages-{language}": partial(messages, language) for language in LANGUAGES},
}
"""The samples that come with packages, by their names."""
_CHOICES = (
    "Give one of the samples (wikipedia-sample, news-sample, or messages-LANGUAGE for "
    f"{', '.join(LANGUAGES)}), the path of a text file with one sentence a line, of a .jsonl file or of a "
    "Leipzig corpus, or the id of a dataset on the Hugging Face Hub (name or name:config)."
)
_FILE_SUFFIXES = (*ARCHIVE_SUFFIXES, *PACKED_SUFFIXES, ".txt", ".tsv", ".csv", ".jsonl", ".json")
_LEIPZIG_LINE = re.compile(r"[0-9]+\t")
_SNIFFED_LINES = 10
_NAMED_FIELDS = 10
_CONNECT_SECONDS = 5.0
_REASON = 300  # characters of what another package says
_ID = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?(?::[^\0/\\]{1,200})?", re.ASCII)


def open_source(source: Source, field: str, split: str) -> Iterator[str]:
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
    if not field:
        raise InputError("field is empty. Expected the name of a field of JSON lines or of a dataset.")
    if not isinstance(source, str | os.PathLike):
        return _given_sentences(source, field)
    path = file_of_source(source)
    if path is not None:
        return _file_sentences(path, field)
    source = os.fspath(source)
    if source in SAMPLES:
        return SAMPLES[source]()
    path = Path(source).expanduser() if source.startswith("~/") else Path(source)
    # The id of a dataset has one slash at most; what looks more like a path is not sent to the hub.
    looks_like_path = source.startswith((".", "/", "~")) or "\\" in source or source.count("/") > 1
    if not source or (
        not os.path.isdir(path) and (looks_like_path or source.lower().endswith(_FILE_SUFFIXES))
    ):
        raise InputError(f"There is no file or folder {shown(source)}. {_CHOICES}")
    try:
        rows = _dataset_rows(source, path, split)
    except InputError as error:
        raise InputError(f"{error}{did_you_mean(source, SAMPLES)}") from error
    return _dataset_sentences(source, rows, field)


def file_of_source(source: Source) -> Path | None:
    """The file that sentences are read from, if they are; nothing is read of it.

    Raises
    ------
    InputError
        It is there and no file that can be read: a pipe, a device, or denied.
    """
    if not isinstance(source, str | os.PathLike) or source in SAMPLES:
        return None
    try:
        text = os.fspath(source)
        path = Path(text).expanduser()
        if not text or not os.path.lexists(path) or os.path.isdir(path):
            return None
        open_regular(path).close()
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, denied
        reason = printable(str(error).partition("\n")[0], most=200)
        raise InputError(f"{shown(text)} cannot be read ({reason}). {_CHOICES}") from error
    return path


def _file_sentences(path: Path, field: str) -> Iterator[str]:
    name = inner_name(path)
    if name.endswith(".csv"):
        raise InputError(
            f"{shown(path)} is a table, whose columns would be read as text. Expected one sentence a line "
            "(.txt) or JSON lines (.jsonl)."
        )
    if name.endswith((".jsonl", ".json")):
        return _json_sentences(path, field)
    if name.endswith((LEIPZIG_NAME, ".tsv")) or _looks_like_leipzig(path):
        return _leipzig_sentences(path)
    return (line for _, line in numbered_lines(path))


def _looks_like_leipzig(path: Path) -> bool:
    try:
        head = [line for _, line in islice(numbered_lines(path), _SNIFFED_LINES) if line.strip()]
    except InputError:
        return False  # reading it says why
    return bool(head) and all(map(_LEIPZIG_LINE.match, head))


def _leipzig_sentences(path: Path) -> Iterator[str]:
    for number, line in numbered_lines(path):
        identifier, tab, sentence = line.partition("\t")
        if line.strip() and not (tab and identifier.strip().isdecimal()):
            raise InputError(
                f"Line {number} of {shown(path)} is not 'number<TAB>sentence', as in a Leipzig corpus: "
                f"{line.strip()[:60]!r}. Remove it, or give the sentences one a line in a file named .txt."
            )
        yield sentence


def _json_sentences(path: Path, field: str) -> Iterator[str]:
    for where, row in json_rows(path):
        yield text_of_row(row, field, where) if row is not None else ""


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Read JSON lines, each with words that say where it stands; a blank line is ``None``.

    Raises
    ------
    InputError
        A line is no JSON object, or the file cannot be read.
    """
    for number, line in numbered_lines(path):
        where = f"line {number} of {shown(path)}"
        if not line.strip():
            yield where, None
            continue
        row = parse_json(line, f"{where}, which should hold one JSON object a line")
        if not isinstance(row, dict):
            raise InputError(
                f"There is a JSON {type(row).__name__} in {where}. Expected one JSON object a line."
            )
        yield where, row


def replace_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can spell and no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_of_row(row: Any, field: str, where: str) -> str:
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
        There is no such field, or something else than text is in it.
    """
    if not isinstance(row, Mapping):
        raise InputError(f"There is {_kind_of(row)} in {where}. Expected a row with fields.")
    if field not in row:
        names = [printable(str(name), most=60) for name in islice(row, _NAMED_FIELDS)]
        more = f" and {len(row) - _NAMED_FIELDS:,} more" if len(row) > _NAMED_FIELDS else ""
        raise InputError(
            f"There is no field {short(field)} in {where}, it has {', '.join(names) or 'none'}{more}. Say "
            "which with --field (field= in Python)."
        )
    return checked_text(row[field], f"The field {short(field)} in {where}")


def checked_text(text: Any, where: str) -> str:
    """A text that a row holds; ``None`` is an empty one.

    Raises
    ------
    InputError
        It is no text, too long, or has a NUL character.
    """
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InputError(f"{where} holds {_kind_of(text)}. Expected text, or nothing (null, None).")
    LINE.check(len(text), where)
    if "\0" in text:
        raise InputError(
            f"{where} has a NUL character, character {text.index(chr(0))} of the text: it is no text, or it "
            "is damaged."
        )
    return replace_surrogates(text)


def _kind_of(value: Any) -> str:
    empty = isinstance(value, float) and value != value
    return f"{type(value).__name__}{' (NaN)' if empty else ''}"


def _dataset_sentences(source: str, rows: Iterator[Any], field: str) -> Iterator[str]:
    for number, row in enumerate(rows, 1):
        yield from _sentences(text_of_row(row, field, f"row {number} of {shown(source)}"))


def _given_sentences(rows: Any, field: str) -> Iterator[str]:
    """Sentences that are given one by one, or texts in rows such as those of a dataset."""
    try:
        # Going over a table gives the names of its columns, and over bytes numbers.
        is_other = isinstance(rows, bytes | bytearray | Mapping) or hasattr(rows, "columns")
        iterator = None if is_other else iter(rows)
    except TypeError:
        iterator = None
    if iterator is None:
        raise InputError(
            f"The source is {short(rows)}. {_CHOICES} Or give the sentences themselves, such as a list "
            "or a column of a table."
        )
    for number, row in enumerate(_iterated(iterator, "What gives the sentences"), 1):
        if isinstance(row, Mapping):
            yield from _sentences(text_of_row(row, field, f"row {number}"))
        else:
            yield checked_text(row, f"Sentence {number}")


def _sentences(text: str) -> list[str]:
    # Blank lines between paragraphs are no sentences; a text without any is one that is empty.
    return [piece for piece in segment("en", text) if piece.strip()] or [""]


def _dataset_rows(source: str, path: Path, split: str) -> Iterator[Any]:
    """Rows of a dataset, of the hub or of a folder, in their order."""
    # What opens a dataset is code of others, for every format and every server, and fails in their ways.
    try:
        rows = _opened(source, path, split)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"The dataset {shown(source)} could not be loaded ({_reason(error)}). {_CHOICES}"
        ) from error
    return _iterated(rows, f"The dataset {shown(source)}")


def _iterated(rows: Iterable[Any], name: str) -> Iterator[Any]:
    """Go over rows that somebody else's code gives; where that fails, say at which."""
    number = 0
    try:
        for row in rows:
            number += 1
            yield row
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{name} fails after {number:,} rows ({type(error).__name__}: {_reason(error)}). Expected rows "
            "that can be read to the end; a limit below that reads those before it."
        ) from error


def _reason(error: BaseException) -> str:
    """What went wrong at the bottom of it: datasets says only that something did."""
    while str(error).startswith("An error occurred while generating") and error.__cause__ is not None:
        error = error.__cause__
    return printable(str(error).strip().partition("\n")[0] or type(error).__name__, most=_REASON)


def _opened(source: str, path: Path, split: str) -> Iterable[Any]:
    import datasets  # takes a second to import, and most sources do without it

    if (path / "dataset_dict.json").is_file():
        parts = datasets.load_from_disk(str(path))
        if split not in parts:
            raise InputError(
                f"{shown(source)} has no split {split!r}, it has {', '.join(parts)}. Say which with --split "
                "(split= in Python)."
            )
        return parts[split]
    if (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    if path.is_dir():
        return datasets.load_dataset(str(path), split=split, streaming=True)
    if not _ID.fullmatch(source):
        raise ValueError("it is neither a file nor a folder, nor can a dataset be called this")
    name, _, config = source.partition(":")
    offline = datasets.config.HF_HUB_OFFLINE
    if not offline:
        _check_connection(datasets.config.HF_ENDPOINT)
    # Offline, what was downloaded before can be read from the cache, but not streamed.
    return datasets.load_dataset(name, config or None, split=split, streaming=not offline)


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
