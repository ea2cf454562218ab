"""Rows of vectors on disk: one ``.npy`` file a site, allocated once and filled in any order.

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
from typing import Any, Self

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from matlens.errors import InputError
from matlens.storage.folders import Workplace, read_config, write_bytes, write_text

_NOTED_EVERY = 2.0  # seconds
_DONE = "batches_done"


class RowFiles:
    """Files of a collection that is being filled.

    Parameters
    ----------
    folder
        Where they are; files that are there already are gone on with.
    widths, n_rows
        The sites with the width of their rows, and how many rows each file has, float32.
    arrays
        What else belongs to the collection, written at once.
    """

    def __init__(
        self, folder: Path, widths: Mapping[str, int], n_rows: int, arrays: Mapping[str, np.ndarray]
    ) -> None:
        self._note = folder / _DONE
        self.batches_done = int(self._note.read_text()) if self._note.is_file() else 0
        self._written, self._noted_at = self.batches_done, time.monotonic()
        for name, array in arrays.items():
            _save(folder / f"{name}.npy", array)
        self._files: dict[str, tuple[int, int]] = {}  # descriptor, and where rows start
        try:
            for name, width in widths.items():
                descriptor = os.open(folder / f"{name}.npy", os.O_RDWR | os.O_CREAT, 0o644)
                self._files[name] = descriptor, 0
                self._files[name] = descriptor, _allocate(descriptor, n_rows, width)
        except OSError:
            self._close()
            raise

    def write(self, index: np.ndarray, vectors: Mapping[str, Tensor]) -> None:
        """Write one batch: row ``i`` of each tensor goes to row ``index[i]`` of the site's file."""
        starts, ends = _runs(index)
        for name, values in vectors.items():
            descriptor, first = self._files[name]
            rows = values.numpy()
            row_bytes = rows.shape[1] * 4
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


def fill(
    place: Workplace,
    widths: Mapping[str, int],
    n_rows: int,
    arrays: Mapping[str, np.ndarray],
    batches: Callable[[int], Iterable[tuple[np.ndarray, Mapping[str, Tensor]]]],
    **more: Any,
) -> None:
    """Fill a folder with rows, from where a killed run has left it; a finished one is left as it is.

    Parameters
    ----------
    place
        The folder and its job.
    widths, n_rows, arrays
        The files with their columns, the rows of each, and what lies beside them.
    batches
        Gives the batches after the first so many: which rows, and their vectors by name.
    more
        Goes into the finished folder's configuration.
    """
    with place.working():
        if not place.finished:
            with RowFiles(place.folder, widths, n_rows, arrays) as files:
                for index, vectors in batches(files.batches_done):
                    files.write(index, vectors)
            place.finish(**more)


def read_rows(
    folder: str | Path, expected: str
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Tensor]]:
    """Open a finished collection: its configuration, the arrays beside it and the rows by site.

    Raises
    ------
    InputError
        The folder is not a finished collection, or a file of it is damaged.
    """
    folder = Path(folder)
    config = read_config(folder, expected)
    try:
        arrays = {name: np.load(folder / f"{name}.npy") for name in ("tokens", "offsets", "positions")}
        # Copy-on-write, because torch refuses to look at memory that nobody may write.
        rows = {
            name: torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))
            for name in config["request"]["sites"]
        }
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"The collection in {folder} is damaged: {error}. Remove that folder and collect again."
        ) from error
    return config, arrays, rows


def _save(path: Path, array: np.ndarray) -> None:
    # Not np.save to the path: when the disk is full, its error does not say so.
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_bytes(path, buffer.getbuffer())


def _allocate(descriptor: int, n_rows: int, width: int) -> int:
    """Write a file's header and take room for all rows; returns where they start."""
    with os.fdopen(os.dup(descriptor), "r+b") as file:
        header = {
            "descr": npy.dtype_to_descr(np.dtype("<f4")),
            "fortran_order": False,
            "shape": (n_rows, width),
        }
        npy.write_array_header_1_0(file, header)
        first = file.tell()
    size = first + n_rows * width * 4
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
