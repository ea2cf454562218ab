"""Rows of vectors, computed by batch in any order: in memory or in an `Artifact`.

A shard holds the rows of consecutive batches, with an ``index`` of their numbers. Which batches these are
does not depend on the number of processes: of W, process r writes the shards r, r + W, ...
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from matlens import parallel
from matlens.errors import InputError
from matlens.io.artifact import Artifact, make_config
from matlens.io.files import damaged
from matlens.numerics import give_back_freed

INDEX = "index"
_SHARD_BYTES = 2**28
_MIN_SHARDS = 16  # if there are as many batches, so that processes can divide them
_INDEX_BYTES = 8
_ARRAYS = "examples"  # the file of the arrays next to the rows


class Column(NamedTuple):
    """The width of the rows of a column and their dtype, such as ``"float32"``."""

    width: int
    dtype: str = "float32"

    @property
    def in_memory(self) -> torch.dtype:
        """The dtype as torch names it."""
        return getattr(torch, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.in_memory.itemsize


Columns = Mapping[str, Column]


class StoredRows(Mapping[str, Tensor]):
    """The rows of an artifact by column, in order; columns are read lazily."""

    def __init__(self, artifact: Artifact, *, finite: bool = True) -> None:
        self._artifact, self._finite = artifact, finite
        self.columns = {name: Column(*column) for name, column in artifact.request["columns"].items()}
        self.n_rows = int(artifact.request["n_rows"])
        self._shards = [name.removesuffix(".safetensors") for name in artifact.files if name[:1].isdigit()]
        self._whole: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise KeyError(name)
        whole = self._whole.get(name)
        if whole is None:
            column = self.columns[name]
            whole = torch.empty(self.n_rows, column.width, dtype=column.in_memory)
            n_filled = 0
            for index, part in self.shards([name]):
                whole[torch.from_numpy(index)] = part[name]
                n_filled += len(index)
            if n_filled != self.n_rows:
                raise damaged(self._artifact.folder, f"holds {n_filled:,} rows of {self.n_rows:,}")
            self._whole[name] = whole
        return whole

    def shards(self, names: Sequence[str]) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        """The rows of some columns shard by shard: indices and values."""
        for shard in self._shards:
            index = self._artifact.read(shard, INDEX).numpy()
            yield index, {name: self._artifact.read(shard, name, finite=self._finite) for name in names}

    def __reduce__(self) -> Any:
        return partial(StoredRows, finite=self._finite), (self._artifact,)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a column, without reading it."""
        return name in self.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


@contextmanager
def writing_rows(
    holds: str,
    request: Mapping[str, Any],
    columns: Columns,
    counts: Sequence[int],
    *,
    folder: str | Path | None,
    arrays: Mapping[str, np.ndarray] | None = None,
    only_unfinished: tuple[str, ...] = (),
    finite: bool = True,
) -> Iterator[RowsInMemory | RowsInShards]:
    """Write rows in memory or in a folder; the processes of a job divide the batches.

    The caller computes the batches ``missing`` and adds each, in this order. At the end ``config`` and
    ``rows`` are the content of ``config.json`` and the rows by column.

    Parameters
    ----------
    holds, request, only_unfinished
        As in `Artifact.writing`.
    counts
        Number of rows of each batch.
    arrays
        Arrays that are stored next to the rows.
    finite
        Whether a value that is not finite is an error.
    """
    n_rows = int(sum(counts))
    request = {
        **request, "columns": {name: list(column) for name, column in columns.items()}, "n_rows": n_rows,
    }  # fmt: skip
    parallel.check_same([request, None if folder is None else str(folder)], f"the job of {holds}")
    own = list(enumerate(_shards(counts, columns)))[parallel.rank() :: parallel.world_size()]
    shards = {f"{number:05d}": batches for number, batches in own}
    if folder is None:
        in_memory = RowsInMemory(make_config(holds, request), columns, n_rows, shards)
        yield in_memory
        in_memory.share()
        return
    with Artifact.writing(folder, holds, request, only_unfinished=only_unfinished) as artifact:
        existing = {*shards} if artifact.finished else artifact.written(shards)
        if not artifact.finished and parallel.is_main():
            _check_disk(artifact, n_rows * _row_bytes(columns))
        missing = {name: batches for name, batches in shards.items() if name not in existing}
        yield RowsInShards(artifact, columns, missing, finite=finite)
        if not artifact.finished:
            if parallel.is_main():
                artifact.write(_ARRAYS, {name: torch.from_numpy(a) for name, a in (arrays or {}).items()})
            artifact.finish()


class RowsInMemory:
    """Rows that are written into tensors."""

    def __init__(
        self, config: dict[str, Any], columns: Columns, n_rows: int, shards: Mapping[str, range]
    ) -> None:
        self.config, self.missing = config, list(itertools.chain(*shards.values()))
        self.rows: Mapping[str, Tensor] = {
            name: torch.empty(n_rows, column.width, dtype=column.in_memory)
            for name, column in columns.items()
        }
        self._index = [np.zeros(0, dtype=np.int64)]

    def add(self, index: np.ndarray, values: Mapping[str, Tensor]) -> None:
        """Write the rows of a batch: their numbers, and the values by column."""
        self._index.append(index)
        for name, column in self.rows.items():
            column[torch.from_numpy(index)] = values[name].to(column.dtype)

    def share(self) -> None:
        """Give all rows to all processes."""
        if parallel.world_size() > 1:
            own = torch.from_numpy(np.concatenate(self._index))
            of_all = parallel.concatenate({INDEX: own}, "rows")[INDEX]
            for name, column in self.rows.items():
                column[of_all] = parallel.concatenate({name: column[own]}, f"rows of {name}")[name]


class RowsInShards:
    """Rows that are written into the shards of an artifact."""

    def __init__(
        self, artifact: Artifact, columns: Columns, shards: Mapping[str, range], *, finite: bool
    ) -> None:
        self.missing = list(itertools.chain(*shards.values()))
        self._artifact, self._columns, self._finite = artifact, columns, finite
        self._last = {batches[-1]: name for name, batches in shards.items()}
        self._waiting = iter(self.missing)
        self._parts: list[dict[str, Tensor]] = []

    def add(self, index: np.ndarray, values: Mapping[str, Tensor]) -> None:
        """Write the rows of a batch, when its shard is complete."""
        of_columns = {name: values[name].to(column.in_memory) for name, column in self._columns.items()}
        self._parts.append({INDEX: torch.from_numpy(np.asarray(index, dtype=np.int64)), **of_columns})
        name = self._last.get(next(self._waiting))
        if name is not None:
            parts, self._parts = self._parts, []
            self._artifact.write(name, {key: torch.cat([part[key] for part in parts]) for key in parts[0]})
            del parts
            give_back_freed()

    @property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return self._artifact.config

    @property
    def rows(self) -> StoredRows:
        """The rows by column."""
        return StoredRows(self._artifact, finite=self._finite)


def _row_bytes(columns: Columns) -> int:
    return _INDEX_BYTES + sum(column.row_bytes for column in columns.values())


def _check_disk(artifact: Artifact, n_bytes: int) -> None:
    """Raise InputError if the disk is too small, now and not after hours."""
    free = shutil.disk_usage(artifact.folder).free
    needed = n_bytes - sum(path.stat().st_size for path in artifact.folder.glob("*.safetensors"))
    if needed > free:
        raise InputError(
            f"{artifact.folder} needs {needed / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB free. "
            "Free some space, or choose another folder."
        )


def read_rows(
    folder: str | Path, expected: str, *, finite: bool = True
) -> tuple[dict[str, Any], dict[str, np.ndarray], StoredRows]:
    """Open finished rows: their configuration, the arrays next to them, and the rows by column.

    Rows are verified when they are first read.
    """
    artifact = Artifact.open(folder, expected)
    arrays = {name: values.numpy() for name, values in artifact.read_all(_ARRAYS).items()}
    return artifact.config, arrays, StoredRows(artifact, finite=finite)


def _shards(counts: Sequence[int], columns: Columns) -> list[range]:
    """Runs of consecutive batches of about 256 MB, or less if there would be only a few of them."""
    of_row = _row_bytes(columns)
    max_bytes = min(_SHARD_BYTES, -(-int(sum(counts)) * of_row // _MIN_SHARDS))
    shards, start, size = [], 0, 0
    for number, count in enumerate(counts):
        size += count * of_row
        if size >= max_bytes:
            shards.append(range(start, number + 1))
            start, size = number + 1, 0
    if start < len(counts):
        shards.append(range(start, len(counts)))
    return shards
