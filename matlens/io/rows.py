"""Rows of vectors, computed by batch in any order: in memory or in an `Artifact`.

A shard holds the rows of consecutive batches, with an ``index`` of their numbers. Which batches these are
does not depend on the number of processes: of W, process r writes the shards r, r + W, ...
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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

INDEX = "index"
_SHARD_BYTES = 2**28
_MIN_SHARDS = 16  # if there are as many batches, so that processes can divide them
_INDEX_BYTES = 8
_ARRAYS = "examples"  # the file of the arrays next to the rows

Batches = Iterator[tuple[np.ndarray, Mapping[str, Tensor]]]


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


def collect_rows(
    holds: str,
    request: Mapping[str, Any],
    columns: Columns,
    counts: Sequence[int],
    run: Callable[[Sequence[int]], Batches],
    *,
    folder: str | Path | None,
    arrays: Mapping[str, np.ndarray] | None = None,
    only_unfinished: tuple[str, ...] = (),
    finite: bool = True,
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Collect rows in memory or in a folder; the processes of a job divide the batches.

    Parameters
    ----------
    holds, request, only_unfinished
        As in `Artifact.writing`.
    columns
        The columns of the rows.
    counts
        Number of rows of each batch.
    run
        Yields the batches with these numbers: the numbers of their rows, and the values by column.
    folder
        Where rows are stored, or ``None`` for memory.
    arrays
        Arrays that are stored next to the rows.
    finite
        Whether a value that is not finite is an error.

    Returns
    -------
    config, rows
        The content of ``config.json``, and the rows by column.
    """
    n_rows = int(sum(counts))
    request = {
        **request, "columns": {name: list(column) for name, column in columns.items()}, "n_rows": n_rows,
    }  # fmt: skip
    parallel.check_same([request, None if folder is None else str(folder)], f"the job of {holds}")
    shards = _shards(counts, columns)
    if folder is None:
        own = [number for shard in shards[parallel.rank() :: parallel.world_size()] for number in shard]
        return make_config(holds, request), _in_memory(n_rows, columns, run(own))
    with Artifact.writing(folder, holds, request, only_unfinished=only_unfinished) as artifact:
        if not artifact.finished:
            _write_shards(artifact, shards, n_rows, columns, run)
            if parallel.is_main():
                artifact.write(_ARRAYS, {name: torch.from_numpy(a) for name, a in (arrays or {}).items()})
            artifact.finish()
    return artifact.config, StoredRows(artifact, finite=finite)


def _row_bytes(columns: Columns) -> int:
    return _INDEX_BYTES + sum(column.row_bytes for column in columns.values())


def _write_shards(
    artifact: Artifact,
    shards: Sequence[range],
    n_rows: int,
    columns: Columns,
    run: Callable[[Sequence[int]], Batches],
) -> None:
    """Write those of this process's shards that an earlier call has not."""
    own = list(enumerate(shards))[parallel.rank() :: parallel.world_size()]
    mine = {f"{number:05d}": batches for number, batches in own}
    existing = artifact.written(mine)
    if parallel.is_main():
        free = shutil.disk_usage(artifact.folder).free
        stored = sum(path.stat().st_size for path in artifact.folder.glob("*.safetensors"))
        needed = n_rows * _row_bytes(columns) - stored
        if needed > free:  # now, not after hours
            raise InputError(
                f"{artifact.folder} needs {needed / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB free. "
                "Free some space, or choose another folder."
            )
    missing = {name: batches for name, batches in mine.items() if name not in existing}
    found = run([number for batches in missing.values() for number in batches])
    for name, batches in missing.items():
        parts: dict[str, list[Tensor]] = {column: [] for column in (INDEX, *columns)}
        for _, (index, values) in zip(batches, found, strict=False):
            parts[INDEX].append(torch.from_numpy(np.asarray(index, dtype=np.int64)))
            for column, (_, dtype) in columns.items():
                parts[column].append(values[column].to(getattr(torch, dtype)))
        artifact.write(name, {column: torch.cat(of_column) for column, of_column in parts.items()})
    for _ in found:  # to its end, where it checks the model
        pass


def _in_memory(n_rows: int, columns: Columns, batches: Batches) -> dict[str, Tensor]:
    whole = {
        name: torch.empty(n_rows, column.width, dtype=column.in_memory) for name, column in columns.items()
    }
    seen = [np.zeros(0, dtype=np.int64)]
    for index, values in batches:
        seen.append(index)
        rows = torch.from_numpy(index)
        for name, of_column in whole.items():
            of_column[rows] = values[name].to(of_column.dtype)
    if parallel.world_size() > 1:
        own = torch.from_numpy(np.concatenate(seen))
        of_all = parallel.concatenate({INDEX: own}, "rows")[INDEX]
        for name, of_column in whole.items():
            of_column[of_all] = parallel.concatenate({name: of_column[own]}, f"rows of {name}")[name]
    return whole


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
