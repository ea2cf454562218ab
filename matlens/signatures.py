"""What a public function says that it takes, checked when it is called, from its annotations.

Whatever a user can call is `checked`: a whole number is one, a list of texts is no text, an array has the
dimensions and the kind of numbers that its annotation says. What values mean, such as how many layers there
are, is checked by the function itself, which computes in the precision of its numbers, see `arithmetic`.
"""

from __future__ import annotations

import inspect
import os
import reprlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from matlens.arguments import require_number, require_plain_arrays, require_seed, require_whole, short
from matlens.arithmetic import is_reduced, own_precision
from matlens.errors import InputError

Public = TypeVar("Public", bound=Callable[..., Any])
_WAYS = {
    "Activations": "Activations, as matlens.collect gives them",
    "Clusters": "Clusters, as ffn.Clusters.fit gives them",
    "Corpus": "a Corpus, as matlens.load_corpus gives it",
    "DataFrame": "a pandas DataFrame",
    "Examples": "Examples, as matlens.make_examples makes them of a corpus, matlens.make_prompts of texts, "
    "and matlens.make_token_examples of token ids",
    "LayerMap": "a LayerMap, such as lens.maps[3] of a Lens",
    "Lens": "a Lens, as matlens.Lens.fit or matlens.Lens.load gives it",
    "LinearMap": "a LinearMap, such as maps[0, 3] of a MapSet",
    "MapSet": "a MapSet, as matlens.MapSet.fit or matlens.MapSet.load gives it",
    "Member": "a judging.Member, such as judging.fit_members gives by name",
    "Projection": "a Projection, as ffn.Projection.from_model gives it",
    "Readout": "a Readout, as matlens.Readout(model) gives it",
    "Samples": "Activations, as matlens.collect gives them; vectors of your own, by site, are fitted with "
    "matlens.linear.fit_samples",
    "Site": "a Site, such as matlens.Site.parse('h.3')",
    "TokenFrequency": "a TokenFrequency, as corpora.TokenFrequency.from_corpus gives it",
    "TopTokens": "TopTokens, as ffn.top_tokens_of_all gives them",
    "Trace": "a Trace, as ffn.Trace.run gives it",
    "TransformerBridge": "a model, as matlens.load gives it",
    "Updates": "Updates, as ffn.Updates.run gives them",
    "ValueVectors": "ValueVectors, as ffn.ValueVectors(model) gives them",
    "WordSimilarity": "a WordSimilarity, as corpora.WordSimilarity.fit gives it",
}  # fmt: skip
_ARRAYS = {"Tensor": "a torch tensor", "ndarray": "a NumPy array"}
_LONGEST_PATH = 4096
_EVERYWHERE: dict[str, Any] = {
    "Iterable": Iterable, "Iterator": Iterator, "Mapping": Mapping, "Sequence": Sequence, "Path": Path,
    "Callable": Callable, "Any": Any, "Literal": Literal,
}  # fmt: skip


def checked(public: Public) -> Public:
    """Let a function, or every public method of a class, check the kinds of its arguments.

    What does not fit its annotation is refused with an `InputError` that names the parameter. Annotations
    are read at the first call; what they name that is not known by then is known by its name.
    """
    if not inspect.isclass(public):
        return _checked_function(public, public.__name__)
    for name, member in list(vars(public).items()):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(
                public, name, type(member)(_checked_function(member.__func__, f"{public.__name__}.{name}"))
            )
        elif isinstance(member, FunctionType):
            whole = public.__name__ if name == "__init__" else f"{public.__name__}.{name}"
            setattr(public, name, _checked_function(member, whole))
    return public


def _checked_function(function: Any, name: str) -> Any:
    signature = inspect.signature(function)
    kinds: dict[str, Kind] = {}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kinds:
            kinds.update(_kinds(function, signature))
        bound = signature.bind(*args, **kwargs)
        for parameter, value in bound.arguments.items():
            require_plain_arrays(value, f"{parameter} of {name}")
            kind = kinds.get(parameter)
            if kind is not None and not kind.holds(value):
                raise InputError(f"{parameter} of {name} {kind.complaint(value)}")
        if is_reduced():
            with own_precision():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    call.__checked__ = True  # type: ignore[attr-defined]
    return call


class Kind:
    """What an annotation allows.

    Parameters
    ----------
    expected
        What is expected, in words.
    holds
        Whether a value is such.
    """

    def __init__(self, expected: str, holds: Callable[[Any], bool]) -> None:
        self.expected, self.holds = expected, holds

    def complaint(self, value: Any) -> str:
        """What is wrong with a value."""
        return f"is {_in_words(value)}. Expected {self.expected}."


def _in_words(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return short(value)
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    words = f"of the kind {type(value).__name__}"
    if _is_array(value):
        return f"{words}, {_numbers(value)} of the shape {tuple(value.shape)}"
    return f"{words}, {reprlib.repr(value)}" if type(value) in (list, tuple, set, dict) else words


def _is_array(value: Any) -> bool:
    return not {"Tensor", "ndarray"}.isdisjoint(_names(value))


def _numbers(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _names(value: Any) -> list[str]:
    return [kind.__name__ for kind in type(value).__mro__]


def _kinds(function: Any, signature: inspect.Signature) -> dict[str, Kind]:
    known = _Names(_EVERYWHERE | getattr(inspect.unwrap(function), "__globals__", {}))
    kinds = {}
    for name, parameter in signature.parameters.items():
        if parameter.annotation is parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL,
        ):  # fmt: skip
            continue
        if name in _CHECKED_BY_FUNCTIONS and "Activations" not in str(parameter.annotation):
            continue
        kind = _BY_NAME.get(name) or _kind(_evaluated(parameter.annotation, known))
        if name in _BY_NAME and parameter.default is None:
            kind = Kind(f"{_BY_NAME[name].expected}, or None", _or_none(_BY_NAME[name].holds))
        if kind is not None:
            kinds[name] = kind
    return kinds


class _Named:
    """A name in an annotation that only type checkers import."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __or__(self, other: Any) -> Any:
        return _Union((self, other))

    def __ror__(self, other: Any) -> Any:
        return _Union((other, self))

    def __getitem__(self, _: Any) -> _Named:
        return self

    def __getattr__(self, name: str) -> _Named:
        return _Named(name)


class _Union:
    """Several annotations of which one is such a name."""

    def __init__(self, members: tuple[Any, ...]) -> None:
        self.members = members

    def __or__(self, other: Any) -> Any:
        return _Union((*self.members, other))


class _Names(dict[str, Any]):
    """The names that a module knows; others stand for themselves."""

    def __missing__(self, name: str) -> Any:
        builtins = self.get("__builtins__", {})
        known = builtins if isinstance(builtins, dict) else vars(builtins)
        return known[name] if name in known else _Named(name)


def _evaluated(annotation: Any, known: _Names) -> Any:
    while isinstance(annotation, str):  # an alias may be written as a text itself
        annotation = eval(annotation, {}, known)
    return annotation


def _kind(hint: Any) -> Kind | None:
    """What an annotation allows; None where that is anything, or not known."""
    origin = get_origin(hint)
    if hint is Any or hint is object:
        return None
    if isinstance(hint, _Named):
        return _of_class(hint.name)
    if isinstance(hint, _Union) or origin in (UnionType, typing.Union):
        return _of_several(hint.members if isinstance(hint, _Union) else get_args(hint))
    if hint is None or (inspect.isclass(hint) and hint in _SIMPLE):
        return _SIMPLE[hint]
    if hasattr(hint, "dim_str") and hasattr(hint, "array_type"):
        return _of_array(hint)
    if origin is Literal:
        words = get_args(hint)
        return Kind(
            " or ".join(map(repr, words)),
            lambda value: isinstance(value, str | int | None) and value in words,
        )
    if origin in (Sequence, Iterable, list, tuple, Iterator):
        return _of_items(get_args(hint), keys=origin is Iterable)
    if origin is Mapping or hint is Mapping:
        return _of_mapping(get_args(hint))
    if origin is Callable:
        return Kind("a function", callable)
    if inspect.isclass(hint) and getattr(hint, "_is_protocol", False):
        return _of_protocol(hint)
    return _of_class(hint.__name__) if inspect.isclass(hint) else None


def _of_several(hints: Sequence[Any]) -> Kind | None:
    kinds = [_kind(hint) for hint in hints if not (hint is str and Path in hints)]
    if None in kinds:
        return None
    known = [kind for kind in kinds if kind is not None]
    expected = " or ".join(dict.fromkeys(kind.expected for kind in known))
    return Kind(expected, lambda value: any(kind.holds(value) for kind in known))


def _of_class(name: str) -> Kind:
    return Kind(_WAYS.get(name, f"a {name}"), lambda value: name in _names(value))


def _of_protocol(protocol: Any) -> Kind:
    members = {*vars(protocol), *getattr(protocol, "__annotations__", ())}
    public = sorted(name for name in members if not name.startswith("_"))
    return Kind(
        _WAYS.get(protocol.__name__, f"something with {', '.join(public)}"),
        lambda value: all(hasattr(value, name) for name in public),
    )


def _of_items(kinds: Sequence[Any], *, keys: bool) -> Kind:
    item = _of_item(kinds[0]) if kinds and (len(kinds) == 1 or kinds[1] is Ellipsis) else None

    def holds(value: Any) -> bool:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            return False
        if isinstance(value, Mapping):
            return keys
        if _is_array(value) and getattr(value, "ndim", 1) != 1:
            return False
        return item is None or not isinstance(value, Sequence) or all(map(item.holds, value))

    expected = f"a list, each entry {item.expected}" if item is not None else "a list"
    return Kind(expected, holds)


def _of_item(hint: Any) -> Kind | None:
    """What an entry of a list may be; of a tuple that is one, each place is looked at."""
    places = get_args(hint)
    if get_origin(hint) is not tuple or Ellipsis in places:
        return _kind(hint)
    kinds = [_kind(place) for place in places]
    words = ", ".join("anything" if kind is None else kind.expected for kind in kinds)

    def holds(value: Any) -> bool:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) != len(kinds):
            return False
        return all(kind is None or kind.holds(part) for kind, part in zip(kinds, value, strict=True))

    return Kind(f"a tuple of {len(kinds)} ({words})", holds)


def _of_mapping(kinds: Sequence[Any]) -> Kind:
    """A mapping; the values of a dict are looked at, those of others may be read when they are asked for."""
    value_kind = _of_item(kinds[1]) if len(kinds) == 2 else None
    if len(kinds) == 2 and hasattr(kinds[1], "array_type"):  # shapes are told apart by name, by functions
        value_kind = _of_class(kinds[1].array_type.__name__)

    def holds(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        return value_kind is None or type(value) is not dict or all(map(value_kind.holds, value.values()))

    of = "" if value_kind is None else f", each value {value_kind.expected}"
    return Kind(f"a mapping, such as a dict{of}", holds)


def _of_array(hint: Any) -> Kind:
    dimensions, of = hint.dim_str.split(), hint.array_type.__name__
    numbers = hint.dtypes if isinstance(hint.dtypes, tuple) else None
    open_ended = "..." in dimensions
    fewest = len(dimensions) - open_ended

    def holds(value: Any) -> bool:
        if of not in _names(value) or (numbers is not None and _numbers(value) not in numbers):
            return False
        return value.ndim >= fewest if open_ended else value.ndim == fewest

    sort = {"Int": "whole numbers", "Bool": "truth values"}.get(hint.__name__.partition("[")[0], "numbers")
    return Kind(f"{_ARRAYS.get(of, f'a {of}')} of {sort}, [{', '.join(dimensions)}]", holds)


def _accepts(require: Callable[..., Any]) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        try:
            require(value, "value")
        except InputError:
            return False
        return True

    return holds


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _is_path(value: Any) -> bool:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return isinstance(text, str) and 0 < len(text) <= _LONGEST_PATH and "\0" not in text


_PATH = Kind("a path", _is_path)
_SIMPLE: dict[Any, Kind] = {
    type(None): Kind("None", lambda value: value is None),
    None: Kind("None", lambda value: value is None),
    int: Kind("a whole number", _accepts(require_whole)),
    float: Kind("a finite number", _accepts(require_number)),
    bool: Kind("True or False", lambda value: not {"bool", "bool_"}.isdisjoint(_names(value))),
    str: Kind("a text", lambda value: isinstance(value, str)),
    bytes: Kind("bytes", lambda value: isinstance(value, bytes)),
    Path: _PATH,
}
_CHECKED_BY_FUNCTIONS = ("pairs", "prompts")  # in words of their own
_BY_NAME = {
    "seed": Kind("a whole number from 0 to 2**63 - 1", _accepts(require_seed)),
    "batch_tokens": Kind("a whole number of at least 1", _accepts(partial(require_whole, least=1))),
    "tokenizer": Kind("a tokenizer, such as model.tokenizer", lambda value: hasattr(value, "decode")),
}
