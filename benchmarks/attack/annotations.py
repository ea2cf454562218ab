"""Every parameter of every public name, and values that its annotation excludes, as beartype reads it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pandas as pd
import torch
from beartype import BeartypeConf
from beartype.door import is_bearable
from beartype.vale import Is
from hypothesis import given, settings
from hypothesis import strategies as st

import matlens
from attack.cases import EXCLUDED, Case, Unnamed
from matlens import InputError
from matlens.errors import Between, Tokenizer, short

ROOT = Path(matlens.__file__).parent
_CONF = BeartypeConf(is_pep484_tower=True)


@cache
def public() -> list[tuple[str, Any]]:
    """Functions and classes on the faces of the package and of its rooms."""
    found = []
    for face in (ROOT / "__init__.pyi", *sorted(ROOT.glob("*/__init__.pyi"))):
        room = "matlens" if face.parent == ROOT else f"matlens.{face.parent.name}"
        for name in re.findall(r"^from \S+ import \w+ as (\w+)", face.read_text(), flags=re.MULTILINE):
            value = getattr(importlib.import_module(room), name)
            if inspect.isfunction(value) or inspect.isclass(value):
                found.append((f"{room}.{name}", value))
    return found


@dataclass(frozen=True)
class Call:
    """A checked function, class or method, what its annotations say, and the class of a method's object."""

    name: str
    function: Callable[..., Any]
    hints: Mapping[str, Any]
    owner: type | None = None

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """What must be given, only as good as annotations ask."""
        listed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return {
            name: allowed(self.hints.get(name, Any))
            for name, each in inspect.signature(self.function).parameters.items()
            if each.default is each.empty and each.kind not in listed
        }


def calls() -> Iterator[Call]:
    """Every public function, class and method that is checked."""
    for name, value in {id(value): (name, value) for name, value in public()}.values():
        if inspect.isfunction(value):
            if hasattr(value, "__checked__"):
                yield Call(name, value, hints_of(value))
            continue
        for key, member in vars(value).items():
            function = getattr(member, "__func__", member)
            if not hasattr(function, "__checked__"):
                continue
            if key == "__init__":
                yield Call(name, value, hints_of(function))
            elif isinstance(member, classmethod | staticmethod):
                yield Call(f"{name}.{key}", getattr(value, key), hints_of(function))
            else:
                yield Call(f"{name}.{key}", member.__get__(empty(value)), hints_of(function), value)


def signature_cases(n: int) -> Iterator[Case]:
    """Every parameter with values that its annotation excludes, of 8 n that are drawn for each annotation."""
    by_hint: dict[str, list[tuple[Call, str]]] = {}
    for call in calls():
        for name in call.hints:
            by_hint.setdefault(str(call.hints[name]), []).append((call, name))
    for parameters in by_hint.values():
        call, name = parameters[0]
        for value in drawn(call.hints[name], n):
            for call, name in parameters:
                yield Case(
                    EXCLUDED, f"{call.name}({name}={short(value)})", partial(refused, call, name, value)
                )


def drawn(hint: Any, n: int) -> list[Any]:
    """Values that an annotation excludes: of all kinds, and some nearly allowed."""
    found: list[Any] = []

    @settings(max_examples=n, derandomize=True, database=None, deadline=None)
    @given(st.lists(values(hint), min_size=8, max_size=8))
    def draw(some: list[Any]) -> None:
        found.extend(some)

    draw()
    return [value for value in found if not fits(value, hint)]


def refused(call: Call, name: str, value: Any) -> Any:
    """Call with a bad value, and see whether the error names the parameter."""
    try:
        return call.function(**call.arguments | {name: value})
    except InputError as error:
        if re.search(rf"\b{name}\b", str(error)) is None:
            raise Unnamed(f"{name} is not named: {error}") from error
        raise


def hints_of(function: Any) -> dict[str, Any]:
    """Annotations of parameters, with what is imported for type checkers only."""
    function = inspect.unwrap(function)
    names = {name.rpartition(".")[2]: value for name, value in public()} | _names_in(function.__module__)
    owner = names.get(function.__qualname__.partition(".")[0])
    for base in getattr(owner, "__mro__", ()):  # fields of a dataclass are annotated where they are inherited
        if base.__module__.startswith("matlens."):
            names = _names_in(base.__module__) | names
    hints = typing.get_type_hints(function, names, names, include_extras=True)
    listed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    kinds = {name: each.kind for name, each in inspect.signature(function).parameters.items()}
    return {name: hint for name, hint in hints.items() if kinds.get(name, listed[0]) not in listed}


@cache
def _names_in(module: str) -> dict[str, Any]:
    names = dict(vars(importlib.import_module(module)))
    for node in ast.parse(Path(names["__file__"]).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), module, "exec"), names)
    return names


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of all kinds, and some that an annotation nearly allows: past its bounds, or in a list."""
    return st.one_of(_ANYTHING, *_near(hint))


def _near(hint: Any) -> Iterator[st.SearchStrategy[Any]]:
    """Values that are nearly allowed."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(parts[1], Between):
        number: Any = st.integers if parts[0] is int else st.floats
        bounds = parts[1]
        if bounds.min > -np.inf:
            yield number(max_value=bounds.min - 1)
        if bounds.max < np.inf:
            yield number(min_value=bounds.max + 1)
    elif origin in (UnionType, Union):
        for part in parts:
            yield from _near(part)
    elif origin is Literal:
        yield st.text()
    elif origin in (Sequence, Iterable, list):
        yield st.lists(values(parts[0]), min_size=1, max_size=1)
    elif origin is tuple:
        yield st.tuples(*(values(part) for part in parts if part is not ...))
        yield st.lists(values(parts[0]), min_size=1, max_size=1)
    elif origin in (Mapping, dict) and parts:
        keys = st.one_of(st.text(max_size=2), st.integers())
        yield st.dictionaries(keys, values(parts[1]), min_size=1, max_size=1)


_SCALARS = st.one_of(
    st.none(), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=3), st.booleans(),
    st.complex_numbers(), st.builds(object), st.sampled_from([object, abs]),
)  # fmt: skip
_SHAPES = st.lists(st.integers(0, 2), max_size=4)
_ARRAYS = st.one_of(
    st.builds(
        lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        _SHAPES,
        st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]),
    ),
    st.builds(np.zeros, _SHAPES, st.sampled_from(["f4", "i8", "?", "c8", "U1", "O"])),
)
_ANYTHING = st.one_of(
    _SCALARS,
    _ARRAYS,
    st.lists(_SCALARS, max_size=1),
    st.frozensets(_SCALARS, max_size=1),
    st.dictionaries(st.text(max_size=2), _SCALARS, max_size=1),
)


def as_beartype(hint: Any) -> Any:
    """An annotation with the validators of beartype in the place of those of matlens."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(parts[1], Between):
        bounds = parts[1]
        return Annotated[parts[0], Is[lambda value: bounds.min <= value <= bounds.max]]
    if hint == Tokenizer:
        return Annotated[object, Is[lambda value: hasattr(value, "encode") and hasattr(value, "decode")]]
    if origin in (UnionType, Union):
        return Union[tuple(map(as_beartype, parts))]  # noqa: UP007
    if origin is Literal or origin is None or not parts:
        return hint
    if origin is tuple and ... not in parts:
        return Annotated[object, Is[lambda value: _fits_places(value, parts)]]
    if origin in (list, tuple):  # a list does for a tuple, and a tuple for a list
        return Sequence[as_beartype(parts[0])]  # type: ignore[misc]
    if origin in (Sequence, Iterable, Mapping, dict):
        return origin[tuple(map(as_beartype, parts))]
    return hint


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value, or the list of the numbers that it holds."""
    if getattr(value, "ndim", 0) == 1 and fits(value.tolist(), hint):
        return True
    try:
        return is_bearable(value, as_beartype(hint), conf=_CONF)
    except TypeError:  # beartype asks for the length of a tensor without axes
        return False


def _fits_places(value: Any, places: Sequence[Any]) -> bool:
    return isinstance(value, list | tuple) and len(value) == len(places) and all(map(fits, value, places))


def allowed(hint: Any) -> Any:
    """A small value that an annotation allows; of a class an empty object."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint == Tokenizer:
        return SimpleNamespace(encode=None, decode=None)
    if origin is Annotated:
        return max(parts[1].min, 0)
    if origin in (UnionType, Union, Literal):
        return parts[0] if origin is Literal else allowed(parts[0])
    if origin is tuple:
        return () if ... in parts else tuple(map(allowed, parts))
    if origin in (Sequence, Iterable, list):
        return []
    if origin is Mapping or hint in (Mapping, dict) or origin is dict:
        return {}
    if origin is Callable or hint is Callable:
        return abs
    if hasattr(hint, "array_type"):
        return _array(hint)
    if hint in (str, Path):
        return hint("nowhere")
    return hint() if hint in (int, float, bool, bytes, pd.DataFrame) else empty(hint)


def _array(hint: Any) -> Any:
    shape = [1] * len(hint.dim_str.split())
    dtype = next((name for name in ("float32", "int64", "bool") if name in hint.dtypes), "float32")
    if hint.array_type is torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    return np.zeros(shape, dtype)


def empty(kind: Any) -> Any:
    """An object of a class that holds nothing."""
    if kind is Any or not inspect.isclass(kind):
        return None
    made = {
        torch.Tensor: torch.zeros(1),
        np.ndarray: np.zeros(1),
        torch.device: torch.device("cpu"),
        torch.dtype: torch.float32,
        torch.Generator: torch.Generator(),
    }
    if kind in made:
        return made[kind]
    return tuple.__new__(kind, ()) if issubclass(kind, tuple) else object.__new__(kind)
