"""`InputError`, and arguments of public functions checked against their annotations.

An annotation is a jaxtyping shape, or a named type such as `PositiveInt`; `checked` checks every call.
Lists are checked item by item; NumPy scalars are numbers, ``True`` is not. A class is known by its name,
since some are imported for type checkers only. Conditions on other values are checked in the function.
"""

from __future__ import annotations

import builtins
import difflib
import inspect
import math
import os
import reprlib
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

_LONGEST_MESSAGE = 1950  # characters of a message, with space for a prefix
_SHOWN_SPACES = "Zs"  # other spaces and invisible characters are escaped


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message states the problem and the remedy. The command line prints it without a traceback and exits
    with code 2. Invisible characters in it are escaped, and long messages are truncated.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), limit=_LONGEST_MESSAGE, keep="\n"))


class InputWarning(UserWarning):
    """The input is valid, but its results are probably misleading.

    Each call warns at most once about one thing. Python's own filters silence it, or make an error of it:
    ``warnings.filterwarnings("error", category=matlens.InputWarning)``. The command line prints it as a line.
    """


def warn(message: str, category: type[InputWarning] = InputWarning) -> None:
    """Issue an `InputWarning` at the line of the user's code that called into matlens."""
    level, depth, frame = 1, 1, sys._getframe()
    while frame.f_back:  # to the outermost frame of ours: those of tqdm lie in between
        depth += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
            level = depth
        frame = frame.f_back
    warnings.warn(printable(message, limit=_LONGEST_MESSAGE, keep="\n"), category, stacklevel=level)


def printable(text: str, *, limit: int = sys.maxsize, keep: str = "") -> str:
    r"""Escape foreign text for a terminal.

    Control characters, bidirectional marks, surrogates and other invisible characters are escaped, as in
    ``\x1b``, except for those in ``keep``. Texts of more than ``limit`` characters are truncated.
    """
    shown = "".join(
        c if c.isprintable() or c in keep or unicodedata.category(c) == _SHOWN_SPACES
        else c.encode("unicode_escape").decode()
        for c in text[:limit]
    )  # fmt: skip
    return shown if max(len(text), len(shown)) <= limit else f"{shown[: limit - 1]}…"


Public = TypeVar("Public", bound=Callable[..., Any])


@dataclass(frozen=True)
class Between:
    """Bounds of a number in an annotation, themselves allowed."""

    min: float = -math.inf
    max: float = math.inf

    def __str__(self) -> str:
        if self.max == math.inf:
            return "" if self.min == -math.inf else f" of at least {self.min}"
        return f" of at most {self.max}" if self.min == -math.inf else f" from {self.min} to {self.max}"


PositiveInt = Annotated[int, Between(1)]
NonNegativeInt = Annotated[int, Between(0)]
Seed = Annotated[int, Between(0, 2**32 - 1)]  # which torch, NumPy and scikit-learn take
NonNegative = Annotated[float, Between(0)]
Fraction = Annotated[float, Between(0, 1)]
Tokenizer = Annotated[Any, "of transformers"]


class _Type(NamedTuple):
    """The words for an annotation in messages, and its check."""

    words: str
    holds: Callable[[Any], bool]


def is_int(value: Any) -> bool:
    """True for an integer of Python or NumPy."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer past the range of floats
        return False


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike)


_TYPES: dict[Any, _Type] = {
    type(None): _Type("None", lambda value: value is None),
    int: _Type("an integer", is_int),
    float: _Type("a finite number", _is_number),
    bool: _Type("True or False", lambda value: "bool" in _names(value)),  # that of NumPy too
    str: _Type("a str", lambda value: isinstance(value, str)),
    Path: _Type("a path", _is_path),
    os.PathLike[str]: _Type("a path", _is_path),
    Tokenizer: _Type("a tokenizer", lambda value: hasattr(value, "encode") and hasattr(value, "decode")),
}
_REMEDIES = {
    "Activations": "Use matlens.collect.",
    "Corpus": "Use matlens.load_corpus.",
    "Examples": "Use matlens.make_examples for a corpus, make_prompts for texts, or make_token_examples.",
    "TransformerBridge": "Use matlens.load.",
}


def checked(public: Public) -> Public:
    """Check arguments of a function, or of a class's public methods, against annotations.

    Raises InputError that names the parameter. Annotations are evaluated at the first call.
    """
    if not inspect.isclass(public):
        return _checked_function(public)
    for name, member in list(vars(public).items()):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(public, name, type(member)(_checked_function(member.__func__)))
        elif isinstance(member, FunctionType):
            setattr(public, name, _checked_function(member))
    return public


def _checked_function(function: Any) -> Any:
    parameters = inspect.signature(function).parameters
    by_position = [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]

    @cache
    def types() -> dict[str, _Type]:
        names = _Names(vars(builtins) | globals() | getattr(inspect.unwrap(function), "__globals__", {}))
        hints = {
            name: eval(each.annotation, {}, names) if isinstance(each.annotation, str) else each.annotation
            for name, each in parameters.items()
            if each.annotation is not each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        }
        return {name: _type(hint) for name, hint in hints.items()}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        known = types()
        for name, value in (*zip(by_position, args, strict=False), *kwargs.items()):
            if name in known:
                _check(value, known[name], name)
        return function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    call.__checked__ = True  # type: ignore[attr-defined]
    return call


def _plain(value: Any) -> Any:
    """A scalar of NumPy, which JSON lacks, as Python's number."""
    is_scalar = type(value).__module__ == "numpy" and "generic" in _names(value)
    return value.item() if is_scalar else value


class _Unimported(type):
    """A class that only type checkers import, in the place of its name in an annotation."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Unimported(name, (), {})

    def __getitem__(cls, _: Any) -> Any:
        return cls


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return _Unimported(name, (), {})


def check(value: Any, hint: Any, name: str) -> None:
    """Raise InputError if a value does not fit an annotation."""
    _check(value, _type(hint), name)


def _check(value: Any, kind: _Type, name: str) -> None:
    if not kind.holds(value):
        remedy = next((remedy for known, remedy in _REMEDIES.items() if known in kind.words.split()), "")
        raise InputError(f"{name} must be {kind.words}, got {short(value)}. {remedy}".rstrip())


def check_int(value: Any, name: str, *, min: float = -math.inf, max: float = math.inf) -> int:
    """Raise InputError unless a value is an integer within bounds that depend on other values."""
    if not (is_int(value) and min <= value <= max):
        raise InputError(f"{name} must be an integer{Between(min, max)}, got {short(value)}.")
    return int(value)


def check_choice(value: Any, choices: Iterable[str], name: str) -> str:
    """Raise InputError unless a value is one of several words; a typo gets a suggestion."""
    words = tuple(choices)
    if not isinstance(value, str) or value not in words:
        meant = did_you_mean(value, words)
        raise InputError(f"{name} must be one of {', '.join(words)}, got {short(value)}.{meant}")
    return value


def check_names(names: Iterable[str], known: Iterable[str], argument: str) -> None:
    """Raise InputError if an argument by name, such as a mapping, has a name that nothing else has."""
    for name in names:
        check_choice(name, known, f"The names of {argument}")


def check_rows(rows: Any, n: int, name: str = "rows", *, min: int = 1) -> None:
    """Raise InputError unless a Boolean mask has ``n`` entries and enough are true."""
    if rows is not None and (tuple(rows.shape) != (n,) or int(rows.sum()) < min):
        more = "two or more" if min == 2 else "one or more"
        raise InputError(
            f"{name} must be a Boolean mask of the {n} examples, true for {more}, got {short(rows)}."
        )


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """A hint with the closest known name for a typo; empty if there is none."""
    close = difflib.get_close_matches(name[:99], known, n=1) if isinstance(name, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""


def plain_number(value: Any) -> Any:
    """The number in a scalar of NumPy, for ``json.dumps(..., default=plain_number)``."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{short(value)} cannot be written as JSON")


def short(value: Any) -> str:
    """Write a value into a message, cut where it is long."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        dtype = f"{_dtype(value)} " if hasattr(value, "dtype") else ""
        return f"a {dtype}{type(value).__name__} of the shape {tuple(shape)}"
    plain = isinstance(value, str | bytes | complex | Real | list | tuple | dict | set | None)
    return reprlib.repr(value) if plain else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOaeio" else f"a {name}"


def _type(hint: Any) -> _Type:
    """What an annotation means; one that is not known allows anything."""
    if hint in _TYPES:
        return _TYPES[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        number, bounds = _type(parts[0]), parts[1]
        return _Type(f"{number.words}{bounds}", lambda x: number.holds(x) and bounds.min <= x <= bounds.max)
    if origin is Literal:
        choices = " or ".join(map(repr, parts))
        return _Type(choices, lambda value: isinstance(value, str | int | None) and value in parts)
    if origin is Callable:
        return _Type("a function", callable)
    inner = [_type(part) for part in parts if part is not ...] if origin else []
    if origin in (Union, UnionType):
        words = " or ".join(dict.fromkeys(each.words for each in inner))
        return _Type(words, lambda value: any(each.holds(value) for each in inner))
    if origin is tuple and ... not in parts:
        words = f"a tuple ({', '.join(each.words for each in inner)})"
        return _Type(words, lambda value: _is_tuple(value, inner))
    if origin in (Sequence, Iterable, list, tuple):
        return _Type(f"a list (each {inner[0].words})", lambda value: _is_list(value, origin, inner[0]))
    if origin in (Mapping, dict):
        return _Type(f"a dict (each value {inner[1].words})", lambda value: _is_mapping(value, *inner))
    if inspect.isclass(hint) and "array_type" in vars(hint):  # of jaxtyping
        return _Type(hint.__name__, _array_check(hint))
    if hint in (Any, object) or not inspect.isclass(hint):
        return _Type("anything", lambda value: True)
    return _Type(_with_article(hint.__name__), lambda value: hint.__name__ in _names(value))


def _is_list(value: Any, origin: Any, item: _Type) -> bool:
    items = _items(value, origin)
    return items is not None and all(map(item.holds, items))


def _is_tuple(value: Any, types: Sequence[_Type]) -> bool:
    items = _items(value, tuple)
    if items is None or len(items) != len(types):
        return False
    return all(each.holds(item) for each, item in zip(types, items, strict=True))


def _items(value: Any, origin: Any) -> Any:
    """The items of a list, none of an iterator, which the function reads; None for other values."""
    if hasattr(value, "tolist"):  # of NumPy, torch or pandas
        value = value.tolist() if getattr(value, "ndim", 1) == 1 else None
    if isinstance(value, str | bytes):
        return None
    if isinstance(value, Sequence) or (origin is Iterable and isinstance(value, Set | Mapping)):
        return value
    return () if origin is Iterable and isinstance(value, Iterable) else None


def _is_mapping(value: Any, key: _Type, item: _Type) -> bool:
    # Others than a dict may read their values when asked.
    items = value.items() if type(value) is dict else ()
    return isinstance(value, Mapping) and all(key.holds(k) and item.holds(v) for k, v in items)


def _array_check(hint: Any) -> Callable[[Any], bool]:
    """The check of a jaxtyping shape; lengths of axes are checked by the function."""
    axes, kind = hint.dim_str.split(), hint.array_type.__name__
    n_axes, more = len(axes) - ("..." in axes), "..." in axes

    def holds(value: Any) -> bool:
        names = _names(value)
        # torch and NumPy would read the masked values of a masked array.
        if kind not in names or "MaskedArray" in names:
            return False
        if isinstance(hint.dtypes, tuple) and _dtype(value) not in hint.dtypes:
            return False
        return bool(value.ndim >= n_axes if more else value.ndim == n_axes)

    return holds


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _names(value: Any) -> list[str]:
    return [kind.__name__ for kind in type(value).__mro__]
