"""Hooks on a model: contexts that read or change its passes, and the record of what is active."""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn
from typing_extensions import deprecated

from matlens.errors import checked
from matlens.models.randomness import is_random
from matlens.models.weights import plain_name

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

# Libraries that hang hooks on a model to run it, not to change it.
_BUILDERS = ("transformer_lens", "transformers", "transformers_modules", "accelerate", "torch", "matlens")
_PROCESS = secrets.token_hex(4)
_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_COUNT = itertools.count(1)

# Descriptions of what the contexts around each model change, and the functions that they cannot describe.
_ACTIVE: WeakKeyDictionary[nn.Module, list[tuple[Sequence[str], Sequence[Any]]]] = WeakKeyDictionary()


class EndOfPass(Exception):
    """Raised by a hook of `reading` or `changing`: ends the pass, and with it the context."""


@contextmanager
def reading(model: TransformerBridge, hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    """Add hooks that read a pass and change nothing."""
    with suppress(EndOfPass), model.hooks(fwd_hooks=list(hooks)):
        yield


@contextmanager
def changing(
    model: TransformerBridge,
    descriptions: Sequence[str],
    hooks: Sequence[tuple[str, Callable[..., Any]]],
    functions: Sequence[Any] = (),
) -> Iterator[None]:
    """Change a model by hooks that survive ``model.reset_hooks()``.

    ``descriptions`` are what `active_hooks` returns inside the context; ``functions`` are the user's.
    """
    change = (descriptions, functions)
    active, own = _ACTIVE.setdefault(model.original_model, []), {id(function) for _, function in hooks}
    with reading(model, hooks):
        points = model.hook_points()
        handles = [handle for point in points for handle in point.fwd_hooks if id(handle.user_hook) in own]
        for handle in handles:
            handle.is_permanent = True
        active.append(change)
        try:
            yield
        finally:
            active[:] = [other for other in active if other is not change]
            for handle in handles:
                handle.is_permanent = False  # so that model.hooks can remove them


@checked
def active_hooks(model: TransformerBridge) -> tuple[str, ...]:
    """Describe what changes a model's passes: replacements, steering and other forward hooks.

    Replacements by maps and steering are described with their values, other hooks by function name and hook
    point. ``()`` for a model that runs as it was loaded.
    """
    own = sorted(text for texts, _ in _ACTIVE.get(model.original_model, ()) for text in texts)
    return (*own, *(f"{function_name(function)} at {point}" for point, function in _user_hooks(model)))


@checked
@deprecated("Use active_hooks instead.")
def changes_of(model: TransformerBridge) -> tuple[str, ...]:
    """The former name of `active_hooks`."""
    return active_hooks(model)


def describe_hooks(hooks: Sequence[str]) -> str:
    """Active hooks as part of a sentence, the first few by name."""
    more = f" and {len(hooks) - 3} more" if len(hooks) > 3 else ""
    return "; ".join(hooks[:3]) + more if hooks else "none"


def run_of_functions(model: TransformerBridge) -> str | None:
    """Identifies the user's own functions in a model's passes; None without any.

    Part of the request of a stored job: a name does not identify a function, so such a job resumes only with
    the same function objects.
    """
    functions = [function for _, own in _ACTIVE.get(model.original_model, ()) for function in own]
    functions += [function for _, function in _user_hooks(model)]
    numbers = [str(_number(function)) for function in functions]
    return f"{_PROCESS}.{'.'.join(numbers)}" if numbers else None


def _user_hooks(model: TransformerBridge) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Forward hooks that neither this library nor a library that runs the model has added, once each."""
    seen: set[int] = set()
    modules = itertools.chain(
        model.named_modules(),
        ((point.name or "", point) for point in model.hook_points()),
        model.original_model.named_modules(),
    )
    for name, module in modules:
        if id(module) in seen:
            continue
        seen.add(id(module))
        point = getattr(module, "name", None) if hasattr(module, "fwd_hooks") else None
        functions = [handle.user_hook for handle in vars(module).get("fwd_hooks", ())]
        functions += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        for function in functions:
            if _package(function) not in _BUILDERS:
                yield point or plain_name(name) or "the model", function


def _inner(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _package(function: Any) -> str:
    function = _inner(function)
    return str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]


def function_name(function: Any) -> str:
    """The name of a function, method or callable object."""
    function = _inner(function)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _number(function: Any) -> int:
    function = getattr(function, "__func__", function)
    try:
        return _NUMBERS.setdefault(function, next(_COUNT))
    except TypeError:  # cannot be hashed or weakly referenced: never the same again
        return next(_COUNT)


def has_active_dropout(model: TransformerBridge) -> bool:
    """True if dropout or noise is on in any module, so that the vectors differ at every pass."""
    return is_random(itertools.chain(model.modules(), model.original_model.modules()))
