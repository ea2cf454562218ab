"""Sources of sentences: samples, files, datasets and iterables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from sentencex import segment

from matlens.data.samples import LANGUAGES, messages, news_sample, wikipedia_sample
from matlens.data.texts import ARCHIVE_SUFFIXES, JSON_SUFFIXES, LEIPZIG_NAME, Lines, open_text
from matlens.errors import InputError, did_you_mean, printable, short
from matlens.io.files import parse_json

Source = str | os.PathLike[str] | Iterable[str | Mapping[str, Any] | None]

SAMPLES: dict[str, Callable[[], Iterator[str]]] = {
    "wikipedia-sample": wikipedia_sample,
    "news-sample": news_sample,
    **{f"messages-{language}": partial(messages, language) for language in LANGUAGES},
}
"""Samples in installed packages, by name."""
_CHOICES = (
    f"Samples are wikipedia-sample, news-sample and messages-LANGUAGE for {', '.join(LANGUAGES)}; files are "
    "text with one sentence per line, .jsonl or a Leipzig corpus; datasets of the Hugging Face Hub are "
    "name or name:config."
)
_FILE_SUFFIXES = (*ARCHIVE_SUFFIXES, *JSON_SUFFIXES, ".txt", ".tsv", ".csv", ".gz", ".bz2", ".xz", ".zip")
_LEIPZIG_LINE = re.compile(r"[0-9]+\t")
_SNIFFED_LINES = 10
_HUB_SECONDS = 5.0  # for one question, where `datasets` would try for half a minute without a network
_ID = re.compile(r"[\w-][\w.-]{0,95}(?:/[\w-][\w.-]{0,95})?(?::[^\0/\\]{1,200})?", re.ASCII)


@contextmanager
def open_source(source: Source, field: str, split: str) -> Iterator[Iterator[str]]:
    """The sentences of a source; see `load_corpus`."""
    if not isinstance(source, str | os.PathLike):
        yield _given_sentences(source, field)
        return
    source = os.fspath(source)
    path = Path(os.path.expanduser(source))
    if source in SAMPLES:
        yield SAMPLES[source]()
    elif os.path.lexists(path) and not os.path.isdir(path):
        with open_text(path) as (name, lines):
            yield _file_sentences(path, name, lines, field)
    elif os.path.isdir(path) or (_ID.fullmatch(source) and not source.lower().endswith(_FILE_SUFFIXES)):
        yield _dataset_sentences(source, path, field, split)
    else:
        raise InputError(
            f"source must be a sample, an existing file or a dataset, got '{source}'. {_CHOICES}"
        )


def _file_sentences(path: Path, name: str, lines: Lines, field: str) -> Iterator[str]:
    if name.endswith(".csv"):  # its heading and columns would be read as text
        raise InputError(f"'{path}' must be text (.txt) or JSON lines (.jsonl), got a table.")
    if name.endswith(JSON_SUFFIXES):
        for number, line in lines:
            where = f"line {number} of '{path}'"
            yield text_of_row(parse_json(line, where), field, where) if line.strip() else ""
        return
    head = list(islice(lines, _SNIFFED_LINES))
    filled = [line for _, line in head if line.strip()]
    numbered = bool(filled) and all(map(_LEIPZIG_LINE.match, filled))
    is_leipzig = numbered or name.endswith((LEIPZIG_NAME, ".tsv"))
    for number, line in chain(head, lines):
        yield _leipzig_sentence(line, f"Line {number} of '{path}'") if is_leipzig else line


def _leipzig_sentence(line: str, where: str) -> str:
    identifier, tab, sentence = line.partition("\t")
    if line.strip() and not (tab and identifier.strip().isdecimal()):
        raise InputError(
            f"{where} must be 'number<TAB>sentence', as in a Leipzig corpus, got {short(line.strip())}. Give "
            "other text in a file named .txt."
        )
    return sentence


def text_of_row(row: Any, field: str, where: str) -> str:
    """The text in a field of a row, empty if it is null; ``where`` is the place of the row."""
    if not isinstance(row, Mapping):
        raise InputError(f"{where} must be a JSON object, got {short(row)}.")
    if field not in row:
        names = printable(", ".join(map(str, row)), limit=300) or "none"
        raise InputError(f"field (--field) must be one of {names} in {where}, got {short(field)}.")
    return _checked_text(row[field], f"The field {short(field)} in {where}")


def _checked_text(text: Any, where: str) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InputError(f"{where} must be a str or null, got {short(text)}.")
    if "\0" in text:
        raise InputError(f"{where} has a NUL character. Is the file damaged?")
    # JSON can spell halves of surrogate pairs, which no tokenizer takes.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _given_sentences(rows: Iterable[Any], field: str) -> Iterator[str]:
    """Sentences from a list, or from the rows of a dataset."""
    if isinstance(rows, Mapping) or hasattr(rows, "columns"):  # it would iterate over names of columns
        raise InputError(f"source must be a list or a column of sentences, got {short(rows)}.")
    for number, row in enumerate(rows, 1):
        if isinstance(row, Mapping):
            yield from _sentences(text_of_row(row, field, f"row {number}"))
        else:
            yield _checked_text(row, f"Sentence {number}")


def _sentences(text: str) -> list[str]:
    # Blank lines between paragraphs are not sentences; an empty text is one empty sentence.
    return [piece for piece in segment("en", text) if piece.strip()] or [""]


def _dataset_sentences(source: str, path: Path, field: str, split: str) -> Iterator[str]:
    try:
        for number, row in enumerate(_dataset_rows(source, path, split), 1):
            yield from _sentences(text_of_row(row, field, f"row {number} of '{source}'"))
    except InputError:
        raise
    except Exception as error:  # code of others, for every format and every server, fails in its own ways
        cause = error.__cause__ if "occurred while generating" in str(error) else error
        raise InputError(
            f"The dataset '{source}' cannot be read: "
            f"{type(cause).__name__}: {str(cause)[:300]}. With HF_HUB_OFFLINE=1, it is read "
            f"from the cache. {_CHOICES}{did_you_mean(source, SAMPLES)}"
        ) from error


def _dataset_rows(source: str, path: Path, split: str) -> Iterable[Any]:
    import datasets  # takes a second to import, and most sources do without it
    from huggingface_hub import HfApi

    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = datasets.load_from_disk(str(path))
        return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
    if path.is_dir():
        return datasets.load_dataset(str(path), split=split, streaming=True)
    name, _, config = source.partition(":")
    offline = datasets.config.HF_HUB_OFFLINE
    if not offline:
        HfApi().dataset_info(name, timeout=_HUB_SECONDS)
    # Offline, the cache can be read, but not streamed.
    return datasets.load_dataset(name, config or None, split=split, streaming=not offline)
