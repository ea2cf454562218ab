"""Rows of numbers in memory or on disk: one ``.npy`` file a column, allocated once and filled in any order.

Rows are written with ``pwrite``, not through a memory map, whose pages would count as the process's own
memory. What has been written is noted every few seconds with its hash, so that a killed run can go on, and
does so only with what is still there.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from matlens import parallel
from matlens.io.arrays import StoredArray, StoredRows, array_header, check_record, write_array
from matlens.io.files import create, damaged
from matlens.io.folders import Workplace, make_config, read_config
from matlens.io.notes import Notes

_NOTED_EVERY = 2.0  # seconds
_KINDS = ("float32", "int32", "int64")


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

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on disk."""
        return self.width * self.on_disk.itemsize

    def header(self, n_rows: int) -> bytes:
        """What the file of so many rows begins with."""
        return array_header((n_rows, self.width), self.on_disk)


def file_bytes(n_rows: int, column: Column) -> int:
    """Bytes of the file of a column with so many rows."""
    return len(column.header(n_rows)) + n_rows * column.row_bytes


Columns = Mapping[str, Column]
Batches = Iterable[tuple[np.ndarray, Mapping[str, Tensor]]]
Turns = Iterable[tuple[np.ndarray, Mapping[str, Tensor]] | None]


class _Pending(NamedTuple):
    """What has been written and not yet noted: batches in all, runs of rows, and their hash by column."""

    batches: int
    runs: list[list[int]]
    hashes: dict[str, Any]


class RowFiles:
    """Files of a collection that is being filled.

    Parameters
    ----------
    folder
        Where they are; files that are there already are gone on with, if they hold what was noted.
    columns, n_rows
        The columns, and how many rows each file has.
    arrays
        What else belongs to the collection, written at once.

    Attributes
    ----------
    batches_done
        How many batches are in the files already.

    Raises
    ------
    InputError
        A file holds other rows than were noted.
    """

    def __init__(self, folder: Path, columns: Columns, n_rows: int, arrays: Mapping[str, np.ndarray]) -> None:
        self._folder, self._columns, self._n_rows = folder, columns, n_rows
        self._notes = Notes(folder)
        absent = [name for name in columns if not os.path.lexists(self._path(name))]
        if self._notes.records and absent:
            print(f"{self._path(absent[0])} is gone, so all rows are made anew.", file=sys.stderr)
            self._notes.clear()
        for name, array in arrays.items():
            write_array(self._path(name), array)
        self._files: dict[str, tuple[int, int]] = {}  # descriptor, and where rows start
        try:
            for name, column in columns.items():
                self._open(name, column)
            if self._notes.records:
                for name, column in columns.items():
                    check_noted(self._path(name), *self._files[name], column.row_bytes, self._notes)
        except BaseException:
            self._close()
            raise
        self.batches_done = self._notes.records[-1]["batches"] if self._notes.records else 0
        self._pending, self._noted_at = self._nothing_pending(self.batches_done), time.monotonic()

    def write(self, index: np.ndarray, batch: Mapping[str, Tensor]) -> None:
        """Write one batch: row ``i`` of each tensor goes to row ``index[i]`` of the column's file."""
        starts, ends = _runs(index)
        hashes = {name: digest.copy() for name, digest in self._pending.hashes.items()}
        for name, values in batch.items():
            descriptor, first = self._files[name]
            rows = values.numpy().astype(self._columns[name].on_disk, copy=False)
            row_bytes = rows.shape[1] * rows.itemsize
            for start, end in zip(starts, ends, strict=True):
                content = rows[start:end].tobytes()
                hashes[name].update(content)
                _write_all(descriptor, content, first + int(index[start]) * row_bytes)
        runs = [[int(index[start]), int(end - start)] for start, end in zip(starts, ends, strict=True)]
        # At once: an interrupt finds all of a batch counted, or nothing of it.
        self._pending = _Pending(self._pending.batches + 1, self._pending.runs + runs, hashes)
        if time.monotonic() - self._noted_at > _NOTED_EVERY:
            self._remember()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _open(self, name: str, column: Column) -> None:
        path = self._path(name)
        if self._notes.records:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path, flags)
        else:
            path.unlink(missing_ok=True)
            descriptor = create(path)
        self._files[name] = descriptor, 0
        if not self._notes.records:
            self._files[name] = descriptor, _allocate(descriptor, self._n_rows, column)
            return
        header, status = column.header(self._n_rows), os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise damaged(path, "is no plain file of its own")
        if status.st_size != len(header) + self._n_rows * column.row_bytes:
            raise damaged(path, "is longer or shorter than it was")
        if os.pread(descriptor, len(header), 0) != header:
            raise damaged(path, "has another header than was written")
        self._files[name] = descriptor, len(header)

    def _nothing_pending(self, batches: int) -> _Pending:
        return _Pending(batches, [], {name: hashlib.sha256() for name in self._columns})

    def _remember(self) -> None:
        batches, runs, digests = self._pending
        if not runs:
            return
        # Rows first, the note after them: it must never promise what is not there.
        for descriptor, _ in self._files.values():
            os.fsync(descriptor)
        hashes = {name: digest.hexdigest() for name, digest in digests.items()}
        self._notes.add({"batches": batches, "rows": runs, "sha256": hashes})
        self._pending, self._noted_at = self._nothing_pending(batches), time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or not issubclass(kind, Exception) or issubclass(kind, parallel.ProcessLost):
                self._remember()
        finally:
            self._close()

    def _close(self) -> None:
        for descriptor, _ in self._files.values():
            os.close(descriptor)


def check_noted(path: Path, descriptor: int, first: int, row_bytes: int, notes: Notes) -> None:
    """Refuse a file that does not hold the rows which were written.

    Parameters
    ----------
    path, descriptor
        The file of a column, and by what it is read.
    first, row_bytes
        Where its rows start, and how long one is.
    notes
        What has been noted of the collection.

    Raises
    ------
    InputError
        It holds others.
    """
    for note in notes.records:
        digest = hashlib.sha256()
        for start, count in note["rows"]:
            digest.update(os.pread(descriptor, count * row_bytes, first + start * row_bytes))
        if digest.hexdigest() != note["sha256"].get(path.stem):
            raise damaged(path, "does not hold the rows that were noted")


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
    finite: bool = True,
    turns: Callable[[int], Turns] | None = None,
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
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
    finite
        Whether a number that is not finite is damage.
    turns
        Gives this process's share of the batches after the first so many, where several processes divide
        them: one batch in each turn, and ``None`` where there is none left for it. Without it the leading
        process does the work alone.

    Returns
    -------
    config, rows
        What ``config.json`` says, and the rows by column.

    Raises
    ------
    InputError
        The folder is of another job, or what is in it is not what was written.
    """
    request = {**request, "columns": {name: list(column) for name, column in columns.items()}}
    if turns is not None and parallel.world_size() > 1:
        parallel.check_same([request, n_rows, None if folder is None else str(folder)], f"the job of {holds}")
        batches = partial(_of_all, turns, columns, everywhere=folder is None)
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
    if parallel.is_main():
        anew = _fill(place, columns, n_rows, batches, arrays or {}, divided=turns is not None)
    else:  # takes its turns, and writes nothing
        done = parallel.broadcast(None, "batches that are done")
        anew = done is not None
        for _ in batches(done) if anew and turns is not None else ():
            pass
    parallel.barrier(f"rows of {holds}")
    config, stored = _open_columns(place.folder, holds, finite)
    # What has just been written need not be read again to know it.
    return config, StoredRows({name: partial(column.read, checked=not anew) for name, column in stored})


def _fill(
    place: Workplace,
    columns: Columns,
    n_rows: int,
    batches: Callable[[int], Batches],
    arrays: Mapping[str, np.ndarray],
    *,
    divided: bool,
) -> bool:
    """Fill a folder, as the one that writes; says whether there was something to do."""
    with place.working():
        if place.finished:
            parallel.broadcast(None, "batches that are done")
            return False
        with RowFiles(place.folder, columns, n_rows, arrays) as files:
            parallel.broadcast(files.batches_done, "batches that are done")
            with nullcontext() if divided else parallel.alone():
                for index, batch in batches(files.batches_done):
                    files.write(index, batch)
        place.finish()
    return True


def _of_all(turns: Callable[[int], Turns], columns: Columns, done: int, *, everywhere: bool) -> Batches:
    """Batches of all processes in their order, for the leading one or for each."""
    for batch in turns(done):
        share = {} if batch is None else {"index": torch.from_numpy(batch[0]), **batch[1]}
        gathered = parallel.gather(share, "rows")
        if everywhere:
            if not parallel.is_main():
                gathered = [{} for _ in range(parallel.world_size())]
            gathered = [parallel.broadcast_tensors(parts, "rows of all") for parts in gathered]
        for parts in gathered:
            if parts:
                yield parts["index"].numpy(), {name: parts[name] for name in columns}


def read_rows(
    folder: str | Path,
    expected: str,
    arrays: Iterable[str] = (),
    *,
    optional: Iterable[str] = (),
    finite: bool = True,
) -> tuple[dict[str, Any], dict[str, np.ndarray], Mapping[str, Tensor]]:
    """Open a finished collection: its configuration, arrays that lie beside it, and the rows by column.

    Of the ``optional`` arrays those are read that were written.

    Rows are checked when they are first asked for, all else at once.

    Raises
    ------
    InputError
        The folder is not a finished collection, or a file of it is damaged.
    """
    folder = Path(folder)
    config, columns = _open_columns(folder, expected, finite)
    names = [*arrays, *(name for name in optional if f"{name}.npy" in config["files"])]
    beside = {name: np.array(_stored(config, folder, name).read()) for name in names}
    return config, beside, StoredRows({name: column.read for name, column in columns})


def _open_columns(
    folder: Path, expected: str, finite: bool
) -> tuple[dict[str, Any], list[tuple[str, StoredArray]]]:
    config = read_config(folder, expected)
    columns = dict(recorded_columns(config, folder))
    stored = [(name, _stored(config, folder, name, finite)) for name in columns]
    for name, array in stored:
        column = columns[name]
        if array.shape != (stored[0][1].shape[0], column.width) or array.dtype != column.on_disk:
            raise damaged(
                folder / f"{name}.npy",
                f"holds {array.dtype.name} of the shape {list(array.shape)}, where rows of {column.width} "
                f"{column.dtype} were expected",
            )
    return config, stored


def recorded_columns(config: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Column]]:
    """The columns of a collection, by what is recorded of it."""
    columns = config["request"].get("columns")
    if not isinstance(columns, dict) or not columns:
        raise damaged(folder / "config.json", "names no columns")
    for name, column in columns.items():
        match column:
            case [int(width), str(dtype)] if dtype in _KINDS:
                yield name, Column(width, dtype)
            case _:
                raise damaged(folder / "config.json", f"describes the column {name} in another way")


def _stored(config: Mapping[str, Any], folder: Path, name: str, finite: bool = True) -> StoredArray:
    file = f"{name}.npy"
    return StoredArray(folder / file, check_record(config, folder, file), finite=finite)


def _allocate(descriptor: int, n_rows: int, column: Column) -> int:
    """Write a file's header and take room for all rows; returns where they start."""
    header = column.header(n_rows)
    _write_all(descriptor, header, 0)
    size = len(header) + n_rows * column.row_bytes
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)  # a disk that is too small says so now, not after hours
    else:
        os.truncate(descriptor, size)
    return len(header)


def _runs(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where neighbouring rows go to neighbouring places, so that each such run is written at once."""
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    return np.concatenate([[0], breaks]), np.concatenate([breaks, [len(index)]])


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
