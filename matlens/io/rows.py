"""Rows of vectors, computed by batch in any order: in memory or in an `Artifact`.

A shard holds the rows of consecutive batches, with an ``index`` of their numbers. Which batches these are
does not depend on the number of processes: of W, process r writes the shards r, r + W, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from matlens import parallel
from matlens.io.artifact import CONFIG, Artifact, make_config
from matlens.io.files import damaged
from matlens.numerics import return_freed_memory

INDEX = "index"
_SHARD_BYTES = 2**25
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


Columns = Mapping[str, Column]


class StoredRows(Mapping[str, Tensor]):
    """The rows of an artifact by column, in order; columns are read lazily."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self.columns = {name: Column(*column) for name, column in artifact.request["columns"].items()}
        self.n_rows = int(artifact.request["n_rows"])
        self._shards = [name.removesuffix(".safetensors") for name in artifact.files if name[:1].isdigit()]

    def __getitem__(self, name: str) -> Tensor:
        column = self.columns[name]
        values = torch.empty(self.n_rows, column.width, dtype=column.in_memory)
        for index, part in self.shards([name]):
            values[torch.from_numpy(index)] = part[name]
        return values

    def shards(self, names: Sequence[str]) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        """The rows of some columns shard by shard: indices and values."""
        for shard, index in self._indices.items():
            yield index, {name: self._artifact.read(shard, name) for name in names}

    @cached_property
    def _indices(self) -> dict[str, np.ndarray]:
        """The numbers of the rows in each shard; all together they are each row once."""
        indices = {shard: self._artifact.read(shard, INDEX).numpy() for shard in self._shards}
        check_complete(indices.values(), self.n_rows, self._artifact.folder / CONFIG)
        return indices

    def __contains__(self, name: object) -> bool:
        """True if there is such a column, which is not read."""
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
) -> Iterator[RowWriter]:
    """Write rows in memory or in a folder; the processes of a job divide the batches.

    The caller computes the batches ``missing`` and adds each, in this order. At the end ``config`` and
    ``rows`` are the content of ``config.json`` and the rows by column.

    ``counts`` are the numbers of rows of the batches, and ``arrays`` are stored next to the rows.
    """
    n_rows = int(sum(counts))
    request = {
        **request, "columns": {name: list(column) for name, column in columns.items()}, "n_rows": n_rows,
    }  # fmt: skip
    parallel.check_same([request, None if folder is None else str(folder)], f"the job of {holds}")
    own = list(enumerate(_shards(counts, columns)))[parallel.rank() :: parallel.world_size()]
    shards = {f"{number:05d}": batches for number, batches in own}
    if folder is None:
        writer = RowWriter(columns, n_rows, shards, counts)
        writer.config = make_config(holds, request)
        yield writer
        writer.share()
        return
    with Artifact.writing(folder, holds, request) as artifact:
        existing = {*shards} if artifact.finished else artifact.written(shards)
        missing = {name: batches for name, batches in shards.items() if name not in existing}
        writer = RowWriter(columns, 0, missing, counts, artifact)
        yield writer
        if not artifact.finished:
            if parallel.is_main():
                artifact.write(_ARRAYS, {name: torch.from_numpy(a) for name, a in (arrays or {}).items()})
            artifact.finish()
        writer.config, writer.rows = artifact.config, StoredRows(artifact)


class RowWriter:
    """Writes rows into tensors in memory, or into the shards of an artifact."""

    config: dict[str, Any]

    def __init__(
        self, columns: Columns, n_rows: int, shards: Mapping[str, range], counts: Sequence[int],
        artifact: Artifact | None = None,
    ) -> None:  # fmt: skip
        self.missing = list(itertools.chain(*shards.values()))
        self.rows: Mapping[str, Tensor] = _empty(columns, n_rows)
        self._columns, self._artifact = columns, artifact
        self._sizes = {batches[0]: sum(counts[number] for number in batches) for batches in shards.values()}
        self._last = {batches[-1]: name for name, batches in shards.items()}
        self._waiting = iter(self.missing)
        self._shard: dict[str, Tensor] = {}  # filled batch by batch: many small parts would fragment memory
        self._indices: list[Tensor] = []  # of the rows of a shard, or of all in memory

    def add(self, index: np.ndarray, values: Mapping[str, Tensor]) -> None:
        """Write the rows of a batch: their numbers, and the values by column."""
        numbers = torch.from_numpy(np.asarray(index, dtype=np.int64))
        self._indices.append(numbers)
        if self._artifact is None:
            for name, column in self.rows.items():
                column[numbers] = values[name].to(column.dtype)
            return
        batch = next(self._waiting)
        if batch in self._sizes:  # a shard begins
            self._shard = _empty(self._columns, self._sizes[batch])
        end = sum(map(len, self._indices))
        for name, column in self._shard.items():
            column[end - len(numbers) : end] = values[name]
        if batch in self._last:  # and is complete
            shard = {INDEX: torch.cat(self._indices)} | {name: of[:end] for name, of in self._shard.items()}
            self._artifact.write(self._last[batch], shard)
            del shard
            self._shard, self._indices = {}, []
            return_freed_memory()

    def share(self) -> None:
        """Give all rows in memory to all processes."""
        if parallel.world_size() > 1:
            own = torch.cat([torch.zeros(0, dtype=torch.int64), *self._indices])
            of_all = parallel.concatenate({INDEX: own}, "rows")[INDEX]
            for name, column in self.rows.items():
                column[of_all] = parallel.concatenate({name: column[own]}, f"rows of {name}")[name]


def check_complete(indices: Iterable[np.ndarray], n_rows: int, source: Path) -> None:
    """Raise InputError unless each row is there, and once."""
    index = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *indices]))
    if not np.array_equal(index, np.arange(n_rows)):
        raise damaged(source, f"must be of {n_rows:,} rows, each of them once, and is of {len(index):,}")


def _empty(columns: Columns, n_rows: int) -> dict[str, Tensor]:
    return {name: torch.empty(n_rows, of.width, dtype=of.in_memory) for name, of in columns.items()}


def read_rows(folder: str | Path, expected: str) -> tuple[dict[str, Any], dict[str, np.ndarray], StoredRows]:
    """Open finished rows: their configuration, the arrays next to them, and the rows by column.

    Rows are verified when they are first read.
    """
    artifact = Artifact.open(folder, expected)
    arrays = {name: values.numpy() for name, values in artifact.read_all(_ARRAYS).items()}
    return artifact.config, arrays, StoredRows(artifact)


def _shards(counts: Sequence[int], columns: Columns) -> list[range]:
    """Runs of consecutive batches of about 32 MB, or less if there would be only a few of them."""
    of_row = _INDEX_BYTES + sum(of.width * of.in_memory.itemsize for of in columns.values())
    max_bytes = min(_SHARD_BYTES, -(-int(sum(counts)) * of_row // _MIN_SHARDS))
    return consecutive(counts, -(-max_bytes // of_row))


def consecutive(counts: Sequence[int], size: int) -> list[range]:
    """Runs of consecutive batches, each with at least ``size`` rows, except the last one."""
    runs, start, n_rows = [], 0, 0
    for end, count in enumerate(counts, start=1):
        n_rows += count
        if n_rows >= size or end == len(counts):
            runs.append(range(start, end))
            start, n_rows = end, 0
    return runs
