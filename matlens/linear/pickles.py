"""Pickles read without being run: records of what they would call, and the arrays of numbers in them.

A pickle is a programme, and whoever loads it calls whatever it names. Here its instructions are only walked:
nothing is imported and nothing is called. What would be a call becomes a record of the name and the
arguments; of names there are those that arrays of numpy, tensors of torch and linear models of scikit-learn
need, and any other is refused before another instruction is read.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from matlens.errors import InputError, checked, printable, short

ARRAY, FROM_BUFFER, DTYPE, SCALAR = "array", "array from a buffer", "dtype", "scalar"
TENSOR, LOADED, STORAGE, MODEL, ENCODED = "tensor", "loaded bytes", "storage", "linear model", "encoded text"
_OTHER = "other"  # arguments of calls that nothing is made of
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NAMES = (
    {(module, "_reconstruct"): ARRAY for module in _NUMPY}
    | {(module, "scalar"): SCALAR for module in _NUMPY}
    | {(module, "_frombuffer"): FROM_BUFFER for module in ("numpy.core.numeric", "numpy._core.numeric")}
    | {("numpy", "ndarray"): _OTHER, ("numpy", "dtype"): DTYPE, ("collections", "OrderedDict"): _OTHER}
    | {("torch._utils", "_rebuild_tensor_v2"): TENSOR, ("torch.storage", "_load_from_bytes"): LOADED}
    | {("torch", f"{kind}Storage"): f"{kind}Storage" for kind in ("Double", "Float", "Half")}
    | {
        (module, "LinearRegression"): MODEL
        for module in ("sklearn.linear_model._base", "sklearn.linear_model.base")
    }
    | {("_codecs", "encode"): ENCODED}
)
_STORED = {"DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2"}
_LITERALS = frozenset(
    (
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
        "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING",
        "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
    )
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_FAULTS = (IndexError, KeyError, TypeError, ValueError, OverflowError, MemoryError, struct.error)
_TORCH_MAGIC, _TORCH_VERSION = 0x1950A86A20F9469CFC6C, 1001


@dataclass
class Name:
    """A name that a pickle would import."""

    kind: str


@dataclass
class Record:
    """A call that a pickle would make, and the state that it would give to what the call returns."""

    kind: str
    arguments: tuple[Any, ...]
    state: Any = None

    def __repr__(self) -> str:
        return f"<{self.kind}>"  # what it holds can hold one thing many times over


@checked
def read_pickle(content: bytes, what: str) -> Any:
    """What a pickle holds: numbers, texts, lists, tuples, dictionaries, and records in the place of objects.

    Parameters
    ----------
    content
        The bytes of the pickle.
    what
        What it is called in messages, such as the name of its file.

    Raises
    ------
    InputError
        It is damaged, or it names or does something that arrays and linear models do not need.
    """
    try:
        return _walk(io.BytesIO(content), what)
    except InputError:
        raise
    except _FAULTS as error:
        raise InputError(f"{what} is damaged, or is no pickle: {printable(str(error))}.") from error


@checked
def arrays_of(value: Any, what: str) -> list[np.ndarray]:
    """The arrays that a pickle of maps holds: a tensor or an array, a list of them, or a linear model's.

    Of a linear model of scikit-learn these are its coefficients and its intercept.

    Parameters
    ----------
    value
        What `read_pickle` gives.
    what
        What it is called in messages.

    Raises
    ------
    InputError
        It holds something else, or numbers of another kind than floating point.
    """
    try:
        if isinstance(value, list | tuple) and value:
            return [_array(part, what) for part in value]
        if isinstance(value, Record) and value.kind == MODEL:
            if not isinstance(value.state, Mapping):
                raise ValueError("the linear model was not fitted")
            coefficients, intercept = value.state["coef_"], value.state.get("intercept_", 0.0)
            arrays = [_array(coefficients, what)]
            return arrays if intercept == 0.0 else [*arrays, _array(intercept, what)]
        return [_array(value, what)]
    except InputError:
        raise
    except _FAULTS as error:
        raise InputError(f"{what} is damaged: {printable(str(error))}.") from error


def _walk(file: io.BytesIO, what: str) -> Any:
    """Walk through the instructions of one pickle."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    marks: list[int] = []

    def marked() -> list[Any]:
        start = marks.pop()
        taken = stack[start:]
        del stack[start:]
        return taken

    for instruction, argument, _ in pickletools.genops(file):
        match instruction.name:
            case "PROTO" | "FRAME":
                pass
            case name if name in _LITERALS:
                stack.append(argument)
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case "MARK":
                marks.append(len(stack))
            case "POP":
                stack.pop()
            case "POP_MARK":
                marked()
            case "TUPLE":
                stack.append(tuple(marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                n = int(name[-1])
                stack[-n:] = [tuple(stack[-n:])]
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                stack.append(marked())
            case "APPEND":
                item = stack.pop()
                _list(stack[-1]).append(item)
            case "APPENDS":
                items = marked()
                _list(stack[-1]).extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                stack.append(_paired(marked()))
            case "SETITEM":
                pair = stack[-2:]
                del stack[-2:]
                _dictionary(stack[-1]).update(_paired(pair))
            case "SETITEMS":
                items = marked()
                _dictionary(stack[-1]).update(_paired(items))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                module, _, name = str(argument).partition(" ")
                stack.append(_named(module, name, what))
            case "STACK_GLOBAL":
                module, name = stack[-2:]
                stack[-2:] = [_named(module, name, what)]
            case "REDUCE" | "NEWOBJ":
                called, arguments = stack[-2:]
                if not isinstance(called, Name) or not isinstance(arguments, tuple):
                    raise ValueError("something is called that has no name")
                stack[-2:] = [Record(called.kind, arguments)]
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], Record):
                    raise ValueError("a state is given to what has none")
                stack[-1].state = state
            case "BINPERSID":
                stack.append(Record(STORAGE, tuple(stack.pop())))
            case "STOP":
                return stack.pop()
            case name:
                raise InputError(
                    f"{what} is a pickle with the instruction {name}, which arrays and linear models do not "
                    "need. Nothing of it was run."
                )
    raise ValueError("it has no end")


def _named(module: Any, name: Any, what: str) -> Name:
    kind = _NAMES.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
    if kind is None:
        raise InputError(
            f"{what} is a pickle that asks for '{printable(f'{module}.{name}')}'. Expected arrays of numpy, "
            "tensors of torch or linear models of scikit-learn alone. Nothing of it was run."
        )
    return Name(kind)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("something is appended to what is no list")
    return value


def _dictionary(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("something is put into what is no dictionary")
    return value


def _paired(items: list[Any]) -> dict[Any, Any]:
    keys = items[::2]
    if len(items) % 2 or not all(isinstance(key, str | int) for key in keys):
        raise ValueError("a dictionary has keys that are no texts")
    return dict(zip(keys, items[1::2], strict=True))


def _array(value: Any, what: str) -> np.ndarray:
    """The array that a record stands for."""
    if not isinstance(value, Record) or value.kind not in (ARRAY, FROM_BUFFER, TENSOR):
        raise InputError(f"{what} holds {short(value)}. Expected an array or a tensor of numbers.")
    if value.kind == TENSOR:
        return _tensor(value, what)
    if value.kind == FROM_BUFFER:
        numbers, dtype, shape, order = value.arguments
        fortran = order == "F"
    else:
        _, shape, dtype, fortran, numbers = value.state
    return _numbers(_bytes(numbers), _dtype(dtype), shape, "F" if fortran else "C")


def _numbers(content: bytes, dtype: np.dtype[Any], shape: Any, order: Any = "C") -> np.ndarray:
    sizes = tuple(shape)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("an array has no sizes")
    if math.prod(sizes) * dtype.itemsize != len(content):
        raise ValueError("an array has more or fewer numbers than it says")
    return np.frombuffer(content, dtype).reshape(sizes, order=order)


def _bytes(value: Any) -> bytes:
    """Bytes, also as protocols before 3 write them: a text of as many characters."""
    if isinstance(value, Record) and value.kind == ENCODED and value.arguments[1] == "latin1":
        return str(value.arguments[0]).encode("latin1")
    if isinstance(value, str):
        return value.encode("latin1")
    if not isinstance(value, bytes | bytearray):
        raise ValueError("an array has no bytes")
    return bytes(value)


def _dtype(value: Any) -> np.dtype[Any]:
    if not isinstance(value, Record) or value.kind != DTYPE:
        raise ValueError("an array does not say what its numbers are")
    order = value.state[1] if value.state is not None else "<"
    if value.arguments[0] not in ("f2", "f4", "f8") or order not in ("<", ">"):
        raise ValueError(f"its numbers are {short(value.arguments[0])}, and not of floating point")
    return np.dtype(order + value.arguments[0])


def _tensor(value: Record, what: str) -> np.ndarray:
    """The numbers of a tensor, by its offset, shape and strides in the storage."""
    stored, offset, shape, strides = value.arguments[:4]
    storage = _storage(stored, what)
    sizes, steps = tuple(shape), tuple(strides)
    plain = all(type(n) is int and n >= 0 for n in (offset, *sizes, *steps)) and len(sizes) == len(steps)
    if not plain or 0 in sizes:
        raise ValueError("a tensor has no sizes")
    if math.prod(sizes) > len(storage):
        raise ValueError("a tensor has more numbers than its storage")
    last = offset + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if last >= len(storage):
        raise ValueError("a tensor reaches beyond its storage")
    width = storage.itemsize
    view = np.lib.stride_tricks.as_strided(storage[offset:], sizes, [step * width for step in steps])
    return view.copy()


def _storage(stored: Any, what: str) -> np.ndarray:
    """The storage of a tensor: pickles of torch, one after another, and the numbers behind them."""
    if not isinstance(stored, Record) or stored.kind != LOADED:
        raise ValueError("a tensor has no storage")
    file = io.BytesIO(_bytes(stored.arguments[0]))
    if (_walk(file, what), _walk(file, what)) != (_TORCH_MAGIC, _TORCH_VERSION):
        raise ValueError("the storage of a tensor is not as torch writes it")
    _walk(file, what)  # the sizes of numbers of the machine that wrote it
    storage, keys = _walk(file, what), _walk(file, what)
    if not isinstance(storage, Record) or storage.kind != STORAGE or storage.arguments[0] != "storage":
        raise ValueError("the storage of a tensor is not as torch writes it")
    _, kind, key, _, count, *_ = storage.arguments
    if not isinstance(kind, Name) or kind.kind not in _STORED or not isinstance(key, str) or keys != [key]:
        raise ValueError("the numbers of a tensor are not of floating point")
    (written,) = struct.unpack("<q", file.read(8))
    content = file.read()
    if written != count or len(content) != count * np.dtype(_STORED[kind.kind]).itemsize:
        raise ValueError("a tensor has more or fewer numbers than it says")
    return np.frombuffer(content, _STORED[kind.kind])
