"""Arrays in files, and the record of each: what its file must hold, byte for byte."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from matlens.errors import InputError
from matlens.io.files import damaged, hash_file, open_regular, write_bytes

Record = Mapping[str, Any]
_CHUNK = 4 * 2**20
_HASH = re.compile(r"[0-9a-f]{64}")


def describe_file(path: Path) -> dict[str, Any]:
    """The record of a file: its hash and size and, of an array, the shape and the kind of its numbers."""
    with open_regular(path) as file:
        array = {}
        if path.suffix == ".npy":
            shape, dtype = read_header(file, path)
            array = {"shape": list(shape), "dtype": dtype.name}
            file.seek(0)
        digest, size = hash_file(file)
    return {"sha256": digest, "bytes": size, **array}


def describe_tensors(tensors: Mapping[str, Tensor], content: bytes) -> dict[str, Any]:
    """The record of a safetensors file that is being written: of the file, and of each of its tensors."""
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "tensors": {name: _describe_tensor(values) for name, values in tensors.items()},
    }


def check_record(config: Mapping[str, Any], folder: Path, name: str) -> Record:
    """What the config of a folder says of a file.

    Raises
    ------
    InputError
        It does not say it, or in another way.
    """
    record = config["files"].get(name)
    if record is None or Path(name).name != name:
        raise damaged(folder / "config.json", f"has no record of the file {name}")
    sizes = record.get("shape", []) if isinstance(record, Mapping) else None
    if (
        not isinstance(record, Mapping)
        or not isinstance(sizes, list)
        or not all(type(size) is int and size >= 0 for size in [record.get("bytes"), *sizes])
        or not _HASH.fullmatch(str(record.get("sha256")))
        or not isinstance(record.get("tensors", {}), Mapping)
    ):
        raise damaged(folder / "config.json", f"has a record of the file {name} that cannot be read")
    return record


def check_size(path: Path, record: Record) -> None:
    """Refuse a file that is not there, or longer or shorter than its record.

    Raises
    ------
    InputError
        It is so.
    """
    with open_recorded(path, record):
        pass


def open_recorded(path: Path, record: Record) -> BinaryIO:
    """Open a file of a folder whose record is known.

    Raises
    ------
    InputError
        It is not there, not a plain file, or has another size.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error
    size = file.seek(0, 2)
    file.seek(0)
    if size != record["bytes"]:
        file.close()
        raise damaged(path, f"has {size:,} bytes, where {record['bytes']:,} were written")
    return file


def check_hash(path: Path, record: Record) -> None:
    """Refuse a file that does not hold what was written.

    Raises
    ------
    InputError
        It is so.
    """
    with open_recorded(path, record) as file:
        if hash_file(file)[0] != record["sha256"]:
            raise damaged(path, "does not hold what was written")


class StoredArray:
    """An array in a ``.npy`` file: looked at when it is opened, checked whole when it is read.

    Parameters
    ----------
    path, record
        The file, and what is known of it.
    finite
        Whether its numbers must be finite.

    Raises
    ------
    InputError
        The file is not there, or is no array of this kind.
    """

    def __init__(self, path: Path, record: Record, *, finite: bool = True) -> None:
        self._path, self._record, self._finite = path, record, finite
        with open_recorded(path, record) as file:
            shape, self.dtype = read_header(file, path)
            self._start = file.tell()
        self.shape = shape
        if list(shape) != record.get("shape") or self.dtype.name != record.get("dtype"):
            raise damaged(
                path,
                f"holds {self.dtype.name} of the shape {list(shape)}, where {record.get('dtype')} of the "
                f"shape {record.get('shape')} were written",
            )
        if self._start + int(np.prod(shape, dtype=object)) * self.dtype.itemsize != record["bytes"]:
            raise damaged(path, "is longer or shorter than its own header says")

    def read(self, *, checked: bool = True) -> np.ndarray:
        """The array, which is read from the disk when it is used.

        Parameters
        ----------
        checked
            Whether to look at every byte before; not needed where it has just been written.

        Raises
        ------
        InputError
            The file does not hold what was written, or a number in it is not finite.
        """
        with open_recorded(self._path, self._record) as file:
            if checked:
                self._check(file)
            if not all(self.shape):
                return np.empty(self.shape, self.dtype)
            # Copy-on-write, because torch refuses to look at memory that nobody may write.
            return np.memmap(file, self.dtype, mode="c", offset=self._start, shape=self.shape)

    def _check(self, file: BinaryIO) -> None:
        digest, is_float = hashlib.sha256(file.read(self._start)), self.dtype.kind == "f"
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if is_float and self._finite and not np.isfinite(np.frombuffer(chunk, self.dtype)).all():
                raise damaged(self._path, "holds a number that is not finite")
        if digest.hexdigest() != self._record["sha256"]:
            raise damaged(self._path, "does not hold what was written")


class StoredRows(Mapping[str, Tensor]):
    """Rows by column, each opened and checked when it is first asked for."""

    def __init__(self, columns: Mapping[str, Callable[[], np.ndarray]]) -> None:
        self._columns = dict(columns)
        self._opened: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._opened:
            self._opened[name] = torch.from_numpy(self._columns[name]())
        return self._opened[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is the column, without reading it."""
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def check_tensor(values: Tensor, path: Path, record: Record, name: str) -> Tensor:
    """A tensor that was read from a safetensors file, if it is the one that was written.

    Raises
    ------
    InputError
        It is another, or a number in it is not finite.
    """
    described = record.get("tensors", {}).get(name)
    if described != _describe_tensor(values):
        raise damaged(path, f"does not hold the tensor {name} that was written")
    if not values.isfinite().all():
        raise damaged(path, f"holds a number in {name} that is not finite")
    return values


def _describe_tensor(values: Tensor) -> dict[str, Any]:
    content = values.contiguous().view(torch.uint8).numpy().data
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "shape": list(values.shape),
        "dtype": str(values.dtype).removeprefix("torch."),
    }


def read_header(file: BinaryIO, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the kind of numbers of a ``.npy`` file; the file is read up to its first number."""
    try:
        if npy.read_magic(file) != (1, 0):
            raise ValueError("its version is another")
        shape, fortran, dtype = npy.read_array_header_1_0(file)
    except InputError:
        raise
    except Exception as error:  # numpy evaluates the header as Python, which fails in many ways
        raise damaged(path, f"cannot be read as .npy ({str(error)[:200]})") from error
    if (fortran and len(shape) > 1) or dtype.hasobject or dtype.kind not in "fiub":
        raise damaged(path, "holds an array in an order or of a kind that matlens does not write")
    return shape, dtype


def array_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """What a ``.npy`` file of an array begins with, before its numbers."""
    buffer = io.BytesIO()
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a ``.npy`` file, whole or not at all."""
    # Not np.save to the path: when the disk is full, its error does not say so.
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_bytes(path, buffer.getbuffer())
