"""Checks of what a user hands over: one spelling for numbers, seeds and kinds of objects."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable
from enum import Enum
from numbers import Integral, Real
from typing import Any

from matlens.errors import InputError

_LARGEST_SEED = 2**63 - 1


def require_whole(value: Any, name: str, *, least: int | None = None, most: int | None = None) -> int:
    """Read a whole number, such as ``k`` or a layer.

    Parameters
    ----------
    value
        What the user gave. ``True`` and ``2.0`` are no whole numbers, NumPy's integers are.
    name
        What it is called in the message, such as ``"k"``.
    least, most
        The bounds, themselves allowed.

    Raises
    ------
    InputError
        It is no whole number, or past a bound.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {short(value)}. Expected a whole number{_bounds(least, most)}.")
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        raise InputError(f"{name} is {short(number)}. Expected a whole number{_bounds(least, most)}.")
    return number


def require_number(value: Any, name: str, *, least: float | None = None, most: float | None = None) -> float:
    """Read a finite number, such as a ridge or a share.

    Raises
    ------
    InputError
        It is no number, not finite, or past a bound.
    """
    expected = f"Expected a number{_bounds(least, most)}."
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} is {short(value)}. {expected}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    outside = (least is not None and number < least) or (most is not None and number > most)
    if outside or not math.isfinite(number):
        raise InputError(f"{name} is {short(value)}. {expected}")
    return number


def require_seed(value: Any, name: str = "The seed") -> int:
    """Read a seed: a whole number from 0 to 2**63 - 1, which torch and NumPy both take.

    Raises
    ------
    InputError
        It is another.
    """
    return require_whole(value, name, least=0, most=_LARGEST_SEED)


def random_state(seed: Any) -> Any:
    """What scikit-learn and pandas take for a seed: the number itself, or a generator where it is too large.

    Raises
    ------
    InputError
        It is no seed.
    """
    number = require_seed(seed)
    if number < 2**32:
        return number
    import numpy as np

    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(number)))


def require_rows(rows: Any, n: int, name: str = "rows", *, least: int = 1) -> None:
    """Refuse truth values that are not one for each example, or of which too few are true; None is all.

    Raises
    ------
    InputError
        They are so.
    """
    if rows is not None and (tuple(rows.shape) != (n,) or int(rows.sum()) < least):
        more = "two or more" if least == 2 else "one or more"
        raise InputError(
            f"{name} is {short(rows)}. Expected True or False for each of the {n} examples, and True for "
            f"{more}."
        )


def require_plain_arrays(value: Any, name: str) -> None:
    """Refuse arrays whose numbers do not lie there one by one: torch and NumPy read others of them, or none.

    Whatever is no array, or no dictionary with arrays in it, passes.

    Raises
    ------
    InputError
        A tensor is sparse, nested, quantised or on no device, or entries of a NumPy array are masked.
    """
    for item in value.values() if type(value) is dict else (value,):
        is_array = hasattr(item, "ndim") and not isinstance(item, type)
        way = _WAYS_TO_PLAIN.get(_storage(item)) if is_array else None
        if way is not None:
            raise InputError(f"{name} holds numbers that are {_storage(item)}. {way}")


_WAYS_TO_PLAIN = {
    "nested": "Give a list of tensors, or pad them.",
    "sparse": "Give tensor.to_dense().",
    "on no device": "Expected numbers that are there, as of tensors on cpu or cuda.",
    "quantised": "Give tensor.dequantize().",
    "of eight bits or fewer": "Give tensor.float().",
    "partly masked": "Give an array without masked entries, such as array.compressed() or array.filled(0).",
}


def _storage(array: Any) -> str:
    """What is unusual about how the numbers of an array lie; empty where nothing is."""
    if type(array).__name__ == "MaskedArray":
        import numpy as np

        return "partly masked" if np.ma.is_masked(array) else ""
    if getattr(array, "is_nested", False):
        return "nested"
    if not str(getattr(array, "layout", "strided")).endswith("strided"):
        return "sparse"
    if getattr(array, "is_meta", False):
        return "on no device"
    if getattr(array, "is_quantized", False):
        return "quantised"
    dtype = str(getattr(array, "dtype", ""))
    return "of eight bits or fewer" if dtype.startswith(("torch.float8", "torch.float4")) else ""


def require_kind(value: Any, kinds: type | tuple[type, ...], name: str, *, way: str) -> None:
    """Refuse an object of another kind.

    Parameters
    ----------
    value
        What the user gave.
    kinds
        What can be used.
    name
        What it is called in the message, such as ``"model"``.
    way
        A sentence that says how to come by one, such as ``"Load it with matlens.load()."``

    Raises
    ------
    InputError
        It is of none of the kinds.
    """
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise InputError(f"{name} is a {type(value).__name__}. Expected a {names}. {way}")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The known name that is closest to one with a typo, as the end of a message; empty where none is."""
    close = difflib.get_close_matches(name[:99], known, n=1) if isinstance(name, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""


def require_choice(value: Any, choices: Iterable[str], name: str) -> str:
    """Read one of several words.

    Raises
    ------
    InputError
        It is none of them.
    """
    words = tuple(choices)
    if not isinstance(value, str) or value not in words:
        meant = did_you_mean(value, words)
        raise InputError(f"{name} is {short(value)}. Expected one of {', '.join(words)}.{meant}")
    return value


def plain_number(value: Any) -> Any:
    """The number in a scalar of NumPy, for ``json.dumps(..., default=plain_number)``: JSON cannot spell it.

    Raises
    ------
    TypeError
        It is no such scalar.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{short(value)} cannot be written as JSON")


def short(value: Any) -> str:
    """Write a value into a message: cut where it is long, without echoing what it holds in full."""
    if isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) >= 10**30:
        return "a number of more than thirty digits"
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        return f"a {type(value).__name__} of the shape {tuple(shape)}"
    return reprlib.repr(value.value if isinstance(value, Enum) else value)


def _bounds(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    if least is not None:
        return f" of at least {least}"
    return "" if most is None else f" of at most {most}"
