"""What checks the shapes of arrays that the package's functions take and give, while tests run.

Other types are checked by mypy, and tests give stand-ins for models and read-outs. An array's shape is known
to nobody but its annotation: ``Float[Tensor, "n d"]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_args

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
