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
    """The words for a type in messages, and its check."""

    words: str
    holds: Callable[[Any], bool]


def is_int(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


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
    signature = inspect.signature(function)

    @cache
    def hints() -> dict[str, Any]:
        names = _Names(vars(builtins) | globals() | getattr(inspect.unwrap(function), "__globals__", {}))
        return {
            name: eval(each.annotation, {}, names) if isinstance(each.annotation, str) else each.annotation
            for name, each in signature.parameters.items()
            if each.annotation is not each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        }

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:  # Python's own words, which name no function here
            raise TypeError(f"{function.__qualname__}() {error}") from None
        for name, value in bound.arguments.items():
            check(value, hints().get(name, Any), name)
            if type(value).__module__ == "numpy" and "generic" in _names(value):  # a scalar, which JSON lacks
                bound.arguments[name] = value.item()
        return function(*bound.args, **bound.kwargs)

    call.__checked__ = True  # type: ignore[attr-defined]
    return call


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
    if not _fits(value, hint):
        words = _words(hint)
        remedy = next((remedy for kind, remedy in _REMEDIES.items() if kind in words.split()), "")
        raise InputError(f"{name} must be {words}, got {short(value)}. {remedy}".rstrip())


def check_int(value: Any, name: str, *, min: float = -math.inf, max: float = math.inf) -> int:
    """Raise InputError unless a value is an integer within bounds that depend on other values."""
    check(value, Annotated[int, Between(min, max)], name)
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


def _fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value; one that is not known allows anything."""
    if hint in _TYPES:
        return _TYPES[hint].holds(value)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        number, bounds = parts
        return _fits(value, number) and bounds.min <= value <= bounds.max
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str | int | None) and value in parts
    if origin in (Sequence, Iterable, list, tuple):
        return _fits_list(value, origin, parts)
    if origin in (Mapping, dict):
        # Others than a dict may read their values when asked.
        items = value.items() if type(value) is dict else ()
        return isinstance(value, Mapping) and all(all(map(_fits, item, parts)) for item in items)
    if origin is Callable:
        return callable(value)
    if _is_array_type(hint):
        return _fits_array(value, hint)
    return hint in (Any, object) or not inspect.isclass(hint) or hint.__name__ in _names(value)


def _fits_list(value: Any, origin: Any, parts: Sequence[Any]) -> bool:
    if hasattr(value, "tolist"):  # of NumPy, torch or pandas
        value = value.tolist() if getattr(value, "ndim", 1) == 1 else None
    if not isinstance(value, Sequence | Set | Mapping):  # an iterator is read once, by the function
        return origin is Iterable and isinstance(value, Iterable)
    if isinstance(value, str | bytes) or (origin is not Iterable and not isinstance(value, Sequence)):
        return False
    if origin is tuple and ... not in parts:
        return len(value) == len(parts) and all(map(_fits, value, parts))
    return all(_fits(item, parts[0]) for item in value)


def _is_array_type(hint: Any) -> bool:
    return inspect.isclass(hint) and "array_type" in vars(hint)  # of jaxtyping


def _fits_array(value: Any, hint: Any) -> bool:
    """An array of a jaxtyping shape; lengths of axes are checked by the function."""
    names, axes = _names(value), hint.dim_str.split()
    # torch and NumPy would read the masked values of a masked array.
    if hint.array_type.__name__ not in names or "MaskedArray" in names:
        return False
    if isinstance(hint.dtypes, tuple) and _dtype(value) not in hint.dtypes:
        return False
    return value.ndim >= len(axes) - 1 if "..." in axes else value.ndim == len(axes)


def _words(hint: Any) -> str:
    """The words for an annotation in messages."""
    if hint in _TYPES:
        return _TYPES[hint].words
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{_words(parts[0])}{parts[1]}"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_words, parts)))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is tuple and ... not in parts:
        return f"a tuple ({', '.join(map(_words, parts))})"
    if origin in (Sequence, Iterable, list, tuple):
        return f"a list (each {_words(parts[0])})"
    if origin in (Mapping, dict):
        return f"a dict (each value {_words(parts[1])})"
    if origin is Callable:
        return "a function"
    if _is_array_type(hint):
        return str(hint.__name__)
    return "anything" if hint is Any else _with_article(hint.__name__)


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _names(value: Any) -> list[str]:
    return [kind.__name__ for kind in type(value).__mro__]
