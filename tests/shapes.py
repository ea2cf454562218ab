"""What checks the shapes of arrays that the package's functions take and give, while tests run.

Other types are checked by mypy, and tests give stand-ins for models and readouts. An array's shape is known
to nobody but its annotation: ``Float[Tensor, "n d"]``. Functions without such annotations are left as they
are: what `jaxtyping.jaxtyped` does in each call would take a good part of the time of all tests.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, get_args

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray

Function = TypeVar("Function", bound=Callable[..., Any])


def checked(function: Function) -> Function:
    """Check what is annotated as an array, or as something that holds arrays, and nothing else."""
    hints = function.__annotations__
    function.__annotations__ = {name: hint if _has_array(hint) else Any for name, hint in hints.items()}
    return beartype(function)


def _has_array(hint: Any) -> bool:
    is_array = inspect.isclass(hint) and issubclass(hint, AbstractArray)
    return is_array or any(map(_has_array, get_args(hint)))


def _takes_or_gives_arrays(function: Any) -> bool:
    function = getattr(function, "__func__", function)  # of a class or a static method
    if dataclasses.is_dataclass(function):
        function = function.__init__
    if not inspect.isfunction(function):
        return True
    for hint in function.__annotations__.values():
        try:
            known = eval(hint, function.__globals__) if isinstance(hint, str) else hint
        except Exception:  # jaxtyping checks nothing then: a name that only type checkers import
            continue
        if _has_array(known):
            return True
    return False


def _only_arrays(function: Any = None, *, typechecker: Any = None) -> Any:
    if function is None:
        return partial(_only_arrays, typechecker=typechecker)
    return _jaxtyped(function, typechecker=typechecker) if _takes_or_gives_arrays(function) else function


_jaxtyped = jaxtyping.jaxtyped
jaxtyping.jaxtyped = _only_arrays
