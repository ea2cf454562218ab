"""Rows of numbers in memory or on disk: one ``.npy`` file a column, allocated once and filled in any order.

Rows are written with ``pwrite``, not through a memory map, whose pages would count as the process's own
memory. What has been written is noted every few seconds, so that a killed run can go on.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from matlens.errors import InputError
from matlens.storage.folders import Workplace, make_config, read_config, write_bytes, write_text

_NOTED_EVERY = 2.0  # seconds
_DONE = "batches_done"


class Column(NamedTuple):
    """How wide the rows of a column are, and of which kind their numbers."""

    width: int
    dtype: str = "float32"

    @property
    def in_memory(self) -> torch.dtype:
        """The kind of numbers as torch names it."""
        return getattr(torch, self.dtype)

    @property
    def on_disk(self) -> np.dtype[Any]:
        """The kind of numbers in files, on every machine."""
        return np.dtype(self.dtype).newbyteorder("<")


Columns = Mapping[str, Column]
Batches = Iterable[tuple[np.ndarray, Mapping[str, Tensor]]]


class RowFiles:
    """Files of a collection that is being filled.

    Parameters
    ----------
    folder
        Where they are; files that are there already are gone on with.
    columns, n_rows
        The columns, and how many rows each file has.
    arrays
        What else belongs to the collection, written at once.
    """

    def __init__(self, folder: Path, columns: Columns, n_rows: int, arrays: Mapping[str, np.ndarray]) -> None:
        self._note = folder / _DONE
        self.batches_done = int(self._note.read_text()) if self._note.is_file() else 0
        self._written, self._noted_at = self.batches_done, time.monotonic()
        self._columns = columns
        for name, array in arrays.items():
            _save(folder / f"{name}.npy", array)
        self._files: dict[str, tuple[int, int]] = {}  # descriptor, and where rows start
        try:
            for name, column in columns.items():
                descriptor = os.open(folder / f"{name}.npy", os.O_RDWR | os.O_CREAT, 0o644)
                self._files[name] = descriptor, 0
                self._files[name] = descriptor, _allocate(descriptor, n_rows, column)
        except OSError:
            self._close()
            raise

    def write(self, index: np.ndarray, batch: Mapping[str, Tensor]) -> None:
        """Write one batch: row ``i`` of each tensor goes to row ``index[i]`` of the column's file."""
        starts, ends = _runs(index)
        for name, values in batch.items():
            descriptor, first = self._files[name]
            rows = values.numpy().astype(self._columns[name].on_disk, copy=False)
            row_bytes = rows.shape[1] * rows.itemsize
            for start, end in zip(starts, ends, strict=True):
                _write_all(descriptor, rows[start:end].tobytes(), first + int(index[start]) * row_bytes)
        self._written += 1
        if time.monotonic() - self._noted_at > _NOTED_EVERY:
            self._remember()

    def _remember(self) -> None:
        # Rows first, the note after them: it must never promise what is not there.
        for descriptor, _ in self._files.values():
            os.fsync(descriptor)
        write_text(self._note, str(self._written))
        self._noted_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, Exception):
            self._remember()
        self._close()
        if kind is None:
            self._note.unlink()

    def _close(self) -> None:
        for descriptor, _ in self._files.values():
            os.close(descriptor)


def keep_rows(
    holds: str,
    request: Mapping[str, Any],
    columns: Columns,
    n_rows: int,
    batches: Callable[[int], Batches],
    *,
    folder: str | Path | None,
    arrays: Mapping[str, np.ndarray] | None = None,
    only_unfinished: tuple[str, ...] = (),
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keep rows in memory, or in a folder where a killed run goes on and a finished one is only opened.

    Parameters
    ----------
    holds, request, only_unfinished
        What is kept and what the job is, as in `Workplace`.
    columns, n_rows
        The columns, and how many rows each has.
    batches
        Gives the batches after the first so many: which rows, and their values by column.
    folder
        Where rows are kept, or ``None`` for memory.
    arrays
        What is written beside the rows, for whoever reads the folder.

    Returns
    -------
    config, rows
        What ``config.json`` says, and the rows by column.
    """
    request = {**request, "columns": {name: list(column) for name, column in columns.items()}}
    if folder is None:
        kept = {
            name: torch.empty(n_rows, column.width, dtype=column.in_memory)
            for name, column in columns.items()
        }
        for index, batch in batches(0):
            for name, values in batch.items():
                kept[name][torch.from_numpy(index)] = values.to(kept[name].dtype)
        return make_config(holds, request), kept
    place = Workplace(folder, holds, request, only_unfinished=only_unfinished)
    with place.working():
        if not place.finished:
            with RowFiles(place.folder, columns, n_rows, arrays or {}) as files:
                for index, batch in batches(files.batches_done):
                    files.write(index, batch)
            place.finish()
    config, _, rows = read_rows(folder, holds)
    return config, rows


def read_rows(
    folder: str | Path, expected: str, arrays: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Tensor]]:
    """Open a finished collection: its configuration, arrays that lie beside it, and the rows by column.

    Raises
    ------
    InputError
        The folder is not a finished collection, or a file of it is damaged.
    """
    folder = Path(folder)
    config = read_config(folder, expected)
    try:
        columns = {name: Column(*column) for name, column in config["request"]["columns"].items()}
        beside = {name: np.load(folder / f"{name}.npy") for name in arrays}
        rows = {name: _open(folder / f"{name}.npy", column) for name, column in columns.items()}
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"The {expected} in {folder} cannot be read: {error}. The folder is damaged: remove it and make "
            "it anew."
        ) from error
    return config, beside, rows


def _open(path: Path, column: Column) -> Tensor:
    # Copy-on-write, because torch refuses to look at memory that nobody may write.
    rows = np.load(path, mmap_mode="c")
    if rows.ndim != 2 or rows.shape[1] != column.width or rows.dtype != column.on_disk:
        raise ValueError(
            f"{path.name} holds {rows.dtype} of the shape {rows.shape}, where rows of {column.width} "
            f"{column.dtype} were expected"
        )
    return torch.from_numpy(rows)


def _save(path: Path, array: np.ndarray) -> None:
    # Not np.save to the path: when the disk is full, its error does not say so.
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_bytes(path, buffer.getbuffer())


def _allocate(descriptor: int, n_rows: int, column: Column) -> int:
    """Write a file's header and take room for all rows; returns where they start."""
    with os.fdopen(os.dup(descriptor), "r+b") as file:
        header = {
            "descr": npy.dtype_to_descr(column.on_disk),
            "fortran_order": False,
            "shape": (n_rows, column.width),
        }
        npy.write_array_header_1_0(file, header)
        first = file.tell()
    size = first + n_rows * column.width * column.on_disk.itemsize
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)  # a disk that is too small says so now, not after hours
    else:
        os.truncate(descriptor, size)
    return first


def _runs(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where neighbouring rows go to neighbouring places, so that each such run is written at once."""
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    return np.concatenate([[0], breaks]), np.concatenate([breaks, [len(index)]])


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
