"""`InputError`, and arguments of public functions checked against their annotations.

An annotation is a jaxtyping shape, or a named type such as `PositiveInt`; `checked` checks every call.
Lists are checked item by item; NumPy scalars are numbers, ``True`` is not. Conditions on other values,
such as the number of layers, are checked in the function.
"""

from __future__ import annotations

import builtins
import difflib
import inspect
import math
import os
import reprlib
import sys
import typing
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, get_args, get_origin

from matlens.arithmetic import is_reduced, own_precision

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


def warn(message: str) -> None:
    """Issue an `InputWarning` at the line of the user's code that called into matlens."""
    level, depth, frame = 1, 1, sys._getframe()
    while frame.f_back:  # to the outermost frame of ours: those of tqdm lie in between
        depth += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
            level = depth
        frame = frame.f_back
    warnings.warn(printable(message, limit=_LONGEST_MESSAGE, keep="\n"), InputWarning, stacklevel=level)


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
_LONGEST_PATH = 4096


@dataclass(frozen=True)
class Between:
    """Bounds of a number in an annotation, themselves allowed."""

    min: float = -math.inf
    max: float = math.inf

    def __str__(self) -> str:
        if self.max == math.inf:
            return "" if self.min == -math.inf else f" of at least {self.min}"
        return f" of at most {self.max}" if self.min == -math.inf else f" from {self.min} to {self.max}"


class _Tokenizer(Protocol):
    def encode(self) -> Any: ...
    def decode(self) -> Any: ...


PositiveInt = Annotated[int, Between(1)]
NonNegativeInt = Annotated[int, Between(0)]
Seed = Annotated[int, Between(0, 2**32 - 1)]  # which torch, NumPy and scikit-learn take
NonNegative = Annotated[float, Between(0)]
Fraction = Annotated[float, Between(0, 1)]
Tokenizer = Annotated[Any, _Tokenizer]

_REMEDIES = {
    "Activations": "Use matlens.collect.",
    "Clusters": "Use ffn.Clusters.fit.",
    "Corpus": "Use matlens.load_corpus.",
    "Examples": "Use matlens.make_examples for a corpus, make_prompts for texts, or make_token_examples.",
    "Lens": "Use matlens.Lens.fit or matlens.Lens.load.",
    "MapSet": "Use matlens.MapSet.fit or matlens.MapSet.load.",
    "Trace": "Use ffn.Trace.run.",
    "TransformerBridge": "Use matlens.load.",
    "dtype": "Use a torch dtype such as torch.float16.",
    "_Tokenizer": "Use model.tokenizer.",
}


def checked(public: Public) -> Public:
    """Check arguments of a function, or of a class's public methods, against annotations.

    Raises InputError that names the parameter. Annotations are evaluated at the first call; a class that is
    imported for type checkers only is known by its name.
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
    kinds: dict[str, Kind] = {}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kinds:
            kinds.update(_kinds(function, signature))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:  # Python's own words, which name no function here
            raise TypeError(f"{function.__qualname__}() {error}") from None
        for name, value in bound.arguments.items():
            if name in kinds and not kinds[name].holds(value):
                raise kinds[name].error(name, value)
            if type(value).__module__ == "numpy" and "generic" in _names(value):  # a scalar, which JSON lacks
                bound.arguments[name] = value.item()
        if is_reduced():
            with own_precision():
                return function(*bound.args, **bound.kwargs)
        return function(*bound.args, **bound.kwargs)

    call.__checked__ = True  # type: ignore[attr-defined]
    return call


def check(value: Any, hint: Any, name: str) -> None:
    """Raise InputError if a value does not fit an annotation."""
    kind = _kind(hint)
    if kind is not None and not kind.holds(value):
        raise kind.error(name, value)


def check_int(value: Any, name: str, *, min: float = -math.inf, max: float = math.inf) -> int:
    """Raise InputError unless a value is an integer within bounds that depend on other values."""
    check(value, Annotated[int, Between(min, max)], name)
    return int(value)


def check_number(value: Any, name: str, *, min: float = -math.inf, max: float = math.inf) -> float:
    """Raise InputError unless a value is a finite number within bounds."""
    check(value, Annotated[float, Between(min, max)], name)
    return float(value)


def check_choice(value: Any, choices: Iterable[str], name: str) -> str:
    """Raise InputError unless a value is one of several words; a typo gets a suggestion."""
    words = tuple(choices)
    if not isinstance(value, str) or value not in words:
        meant = did_you_mean(value, words)
        raise InputError(f"{name} must be one of {', '.join(words)}, got {short(value)}.{meant}")
    return value


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
    if isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) >= 10**30:
        return "a number of more than thirty digits"
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        dtype = f"{_dtype(value)} " if hasattr(value, "dtype") else ""
        return f"a {dtype}{type(value).__name__} of the shape {tuple(shape)}"
    if isinstance(value, Enum):
        return repr(value.value)
    named = isinstance(value, str | bytes | complex | Real | list | tuple | dict | set | None)
    return reprlib.repr(value) if named else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOaeio" else f"a {name}"


class Kind(NamedTuple):
    """The description and check of an annotation, and a remedy."""

    words: str
    holds: Callable[[Any], bool]
    remedy: str = ""

    def error(self, name: str, value: Any) -> InputError:
        """The error for a value that is not allowed."""
        return InputError(f"{name} must be {self.words}, got {short(value)}. {self.remedy}".rstrip())


class _ByName(type):
    """A class that only type checkers import, in the place of its name in an annotation."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _ByName(name, (), {})

    def __getitem__(cls, _: Any) -> Any:
        return cls


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return vars(builtins).get(name) or _ByName(name, (), {})


def _kinds(function: Any, signature: inspect.Signature) -> dict[str, Kind]:
    names = _Names(_EVERYWHERE | getattr(inspect.unwrap(function), "__globals__", {}))
    kinds = {}
    for name, parameter in signature.parameters.items():
        hint = parameter.annotation
        if hint is parameter.empty or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if isinstance(hint, str):
            hint = eval(hint, {}, names)
        if (kind := _kind(hint)) is not None:
            kinds[name] = kind
    return kinds


def _kind(hint: Any) -> Kind | None:
    """The rule of an annotation; None if anything is allowed, or it is unknown."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return None
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if origin is Annotated:
        if not isinstance(bounds := parts[1], Between):
            return _kind(parts[1])
        number = _SIMPLE[parts[0]]
        return Kind(
            f"{number.words}{bounds}", lambda value: number.holds(value) and bounds.min <= value <= bounds.max
        )
    if origin in (UnionType, typing.Union):
        paths = [part for part in parts if part is Path or get_origin(part) is os.PathLike]
        return _of_several([_TEXT_PATH if paths and part is str else _kind(part) for part in parts])
    if origin is os.PathLike:
        return _SIMPLE[Path]
    if isinstance(hint, _ByName):
        return _of_class(hint.__name__)
    if hasattr(hint, "dim_str") and hasattr(hint, "array_type"):
        return _of_array(hint)
    if origin is Literal:
        return Kind(
            " or ".join(map(repr, parts)),
            lambda value: isinstance(value, str | int | None) and value in parts,
        )
    if origin is tuple and Ellipsis not in parts:
        return _of_places(parts)
    if origin in (Sequence, Iterable, list, tuple, Iterator):
        return _of_items(parts, once=origin in (Iterable, Iterator))
    if origin in (Mapping, dict):
        return _of_mapping(parts)
    if origin is Callable:
        return Kind("a function", callable)
    if not inspect.isclass(hint):
        return None
    if getattr(hint, "_is_protocol", False):
        members = sorted(
            name for name in {*vars(hint), *getattr(hint, "__annotations__", ())} if name[0] != "_"
        )
        return Kind(
            f"an object with {', '.join(members)}",
            lambda value: all(hasattr(value, name) for name in members),
            _REMEDIES.get(hint.__name__, ""),
        )
    return _of_class(hint.__name__)


def _of_class(name: str) -> Kind:
    return Kind(_with_article(name), lambda value: name in _names(value), _REMEDIES.get(name, ""))


def _of_several(kinds: Sequence[Kind | None]) -> Kind | None:
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    words = " or ".join(dict.fromkeys(kind.words for kind in known))
    remedy = next((kind.remedy for kind in known if kind.remedy), "")
    return Kind(words, lambda value: any(kind.holds(value) for kind in known), remedy)


def _of_items(hints: Sequence[Any], *, once: bool) -> Kind:
    """Items one by one; an iterator, which can be read once, does where ``once`` is enough."""
    item = _kind(hints[0]) if hints else None

    def holds(value: Any) -> bool:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            return False
        if not once and (isinstance(value, Mapping) or not hasattr(value, "__getitem__")):
            return False
        if _is_array(value):
            if getattr(value, "ndim", 1) != 1:
                return False
            value = value.tolist()  # type: ignore[attr-defined]
        if item is None or not isinstance(value, Sequence | Set | Mapping):  # a progress bar is read once
            return True
        return all(map(item.holds, value))

    return Kind("a list" + (f" (each {item.words})" if item else ""), holds)


def _of_places(hints: Sequence[Any]) -> Kind:
    """A tuple; each place of it is checked."""
    kinds = [_kind(hint) for hint in hints]
    words = ", ".join("anything" if kind is None else kind.words for kind in kinds)

    def holds(value: Any) -> bool:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) != len(kinds):
            return False
        return all(kind is None or kind.holds(part) for kind, part in zip(kinds, value, strict=True))

    return Kind(f"a tuple ({words})", holds)


def _of_mapping(hints: Sequence[Any]) -> Kind:
    """A mapping; only a dict is checked inside, since others may read values lazily."""
    key, item = map(_kind, hints) if hints else (None, None)
    if hints and hasattr(hints[1], "array_type"):  # shapes are checked by name, by functions
        item = _of_class(hints[1].array_type.__name__)

    def holds(value: Any) -> bool:
        if not isinstance(value, Mapping) or type(value) is not dict:
            return isinstance(value, Mapping)
        keys = key is None or all(map(key.holds, value))
        return keys and (item is None or all(map(item.holds, value.values())))

    return Kind("a dict" + (f" (each value {item.words})" if item else ""), holds)


def _of_array(hint: Any) -> Kind:
    """An array of a jaxtyping shape; how many of one axis there are is checked by the function."""
    axes, array = hint.dim_str.split(), hint.array_type.__name__
    dtypes = hint.dtypes if isinstance(hint.dtypes, tuple) else None
    is_open = "..." in axes
    n_axes = len(axes) - is_open

    def holds(value: Any) -> bool:
        # torch and NumPy would read the masked values of a masked array.
        if array not in _names(value) or "MaskedArray" in _names(value):
            return False
        if dtypes is not None and _dtype(value) not in dtypes:
            return False
        return value.ndim >= n_axes if is_open else value.ndim == n_axes

    return Kind(f"{hint.__name__.partition('[')[0]}[{array}, '{' '.join(axes)}']", holds)


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike) and _is_text_of_path(os.fspath(value))


def _is_text_of_path(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_PATH and "\0" not in value


def _is_array(value: Any) -> bool:
    return not {"Tensor", "ndarray"}.isdisjoint(_names(value))


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _names(value: Any) -> list[str]:
    return [kind.__name__ for kind in type(value).__mro__]


_TEXT_PATH = Kind("a path", _is_text_of_path)
_SIMPLE: dict[Any, Kind] = {
    type(None): Kind("None", lambda value: value is None),
    None: Kind("None", lambda value: value is None),
    int: Kind("an integer", _is_int),
    float: Kind("a finite number", _is_number),
    bool: Kind("True or False", lambda value: not {"bool", "bool_"}.isdisjoint(_names(value))),
    str: Kind("a str", lambda value: isinstance(value, str)),
    bytes: Kind("bytes", lambda value: isinstance(value, bytes)),
    Path: Kind("a path", _is_path),
}
_EVERYWHERE: dict[str, Any] = {
    "Iterable": Iterable, "Iterator": Iterator, "Mapping": Mapping, "Sequence": Sequence, "Path": Path,
    "Callable": Callable, "Any": Any, "Literal": Literal,
}  # fmt: skip
