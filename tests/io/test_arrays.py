"""Arrays in files: what is written is numpy's own format, and its header is read back."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from matlens import InputError
from matlens.io.arrays import StoredArray, array_header, describe_file, read_header, write_array

ARRAYS = [
    np.arange(6, dtype="<f4").reshape(2, 3),
    np.arange(12, dtype="<i8").reshape(3, 2, 2) + 2**53,
    np.zeros((0, 4), dtype="<i4"),
    np.array([True, False]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: array.dtype.name)
def test_a_header_and_the_numbers_are_what_numpy_saves(array: np.ndarray) -> None:
    saved = io.BytesIO()
    np.save(saved, array)
    assert array_header(array.shape, array.dtype) + array.tobytes() == saved.getvalue()


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: array.dtype.name)
def test_a_header_is_read_up_to_the_first_number(array: np.ndarray) -> None:
    file = io.BytesIO(array_header(array.shape, array.dtype) + array.tobytes())
    assert read_header(file, Path("numbers.npy")) == (array.shape, array.dtype)
    assert file.read() == array.tobytes()


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: array.dtype.name)
def test_an_array_that_was_written_is_read(array: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "numbers.npy"
    write_array(path, array)
    record = describe_file(path)
    read = StoredArray(path, record).read()
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert np.array_equal(read, array)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"numbers\.npy"):
        StoredArray(path, record).read()


@pytest.mark.parametrize(
    "array",
    [np.asfortranarray(np.ones((2, 3))), np.array([1j]), np.array([{}], dtype=object)],
    ids=["columns first", "complex", "objects"],
)
def test_arrays_of_an_order_or_a_kind_that_is_never_written_are_refused(
    array: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "numbers.npy", array)
    with pytest.raises(InputError, match="matlens does not write"):
        describe_file(tmp_path / "numbers.npy")
