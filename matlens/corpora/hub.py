"""Rows of datasets: of the Hugging Face Hub, of folders, and of whatever a user iterates over."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from matlens.corpora.packing import shown
from matlens.errors import InputError, printable

_CONNECT_SECONDS = 5.0
_REASON = 300  # characters of what another package says
_ID = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?(?::[^\0/\\]{1,200})?", re.ASCII)


def dataset_rows(source: str, path: Path, split: str, choices: str) -> Iterator[Any]:
    """Rows of a dataset, in their order.

    Parameters
    ----------
    source
        Its id, ``name`` or ``name:config``, or the name of a folder.
    path
        The folder, if it is one.
    split
        Name of the split.
    choices
        Words that say what else could be given.

    Raises
    ------
    InputError
        There is no such dataset or split, or it fails while it is read.
    """
    # What opens a dataset is code of others, for every format and every server, and fails in their ways.
    try:
        rows = _opened(source, path, split)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"The dataset {shown(source)} could not be loaded ({_reason(error)}). {choices}"
        ) from error
    return iterated(rows, f"The dataset {shown(source)}")


def iterated(rows: Iterable[Any], name: str) -> Iterator[Any]:
    """Go over rows that somebody else's code gives; where that fails, say at which.

    Raises
    ------
    InputError
        It fails.
    """
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
