"""What is changed in a model at the moment, so that its vectors never pass as those of the plain model.

A model is changed where parts of it are replaced or coefficients set by this library, where somebody else's
hooks hang on it, its modules run another ``forward`` or are others than its configuration says, where
adapters are in it, and where dropout is on. What this library hangs on a model to read it changes nothing.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize

from matlens.errors import InputError, checked
from matlens.models.constants import other_constants, remember_settings
from matlens.models.hooks import LOCK, record_of
from matlens.models.weights import is_quantized, modules_below, parts_of, plain_model

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

# What the model's own code hangs on it when it is built; such hooks are part of the plain model.
_BUILDERS = (
    "transformer_lens.model_bridge.",
    "transformers.",
    "transformers_modules.",
    "accelerate.",
    "matlens.models.families.bridging",
    "matlens.models.families.mixtures",
)
_HOOKS = {
    "forward hook": "_forward_hooks",
    "forward pre-hook": "_forward_pre_hooks",
    "backward hook": "_backward_hooks",  # which change Jacobians, and what is trained through a model
    "backward pre-hook": "_backward_pre_hooks",
}
_PROCESS = secrets.token_hex(3)
_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_COUNT = itertools.count(1)


@dataclass(eq=False)
class _PartsRecord:
    """The modules of a plain model, and what of them was found to be another."""

    plain: dict[str, str] | None = None  # as `parts_of` gives them
    seen: tuple[list[Any], tuple[str, ...]] | None = None  # by what is there, what is not the plain model's


_PARTS: WeakKeyDictionary[Any, _PartsRecord] = WeakKeyDictionary()


def _parts_record(model: TransformerBridge) -> _PartsRecord:
    with LOCK:
        return _PARTS.setdefault(model, _PartsRecord())


@checked
def changes_of(model: TransformerBridge) -> tuple[str, ...]:
    """Name all that is changed in a model at the moment; ``()`` for the plain model.

    Seen are replacements and coefficients of this library, by their numbers; hooks of others, on
    TransformerLens' hook points and on modules, and modules whose ``forward`` is another, by the function,
    which only this process can know again; parametrizations; modules of another class or with other settings
    than those that the model's configuration makes, even where they hold no weights; other numbers in buffers
    that no checkpoint holds, as the frequencies of rotary embeddings; settings of the bridge that were
    changed; adapters (of PEFT), and whether they are on; and dropout that is on. What a hook does is not
    looked at: one that only reads is named too.
    """
    with LOCK:  # lists of hooks must not change while they are read
        present = record_of(model).present
        hung = frozenset[int]().union(*(presence.functions for presence in present))
        ours = sorted(change for presence in present for change in presence.changes())
        return (*ours, *_foreign_changes(model, hung))


def remember_parts(model: TransformerBridge) -> None:
    """Take the modules that a model has now, as it was loaded, for those of the plain model."""
    _parts_record(model).plain = parts_of(model.original_model, _class_name)
    remember_settings(model)


def check_eval_mode(model: TransformerBridge) -> None:
    """Refuse a model in which dropout is on, whose vectors are others at every pass.

    Raises
    ------
    InputError
        It is in training mode, and its dropout is not zero.
    """
    if _drops_out(model, _modules(model)):
        raise InputError(
            f"{model.cfg.model_name} must be in eval mode, got training mode with dropout: its vectors would "
            "be others at every pass. Call model.eval() first."
        )


@contextmanager
def unchanged(model: TransformerBridge, changes: Sequence[str]) -> Iterator[None]:
    """Refuse a pass during which the model is not changed as it was said to be.

    Raises
    ------
    InputError
        Something was replaced, set or hooked since, or no longer is.
    """
    record = record_of(model)
    before, elsewhere = changes_of(model), record.changed_elsewhere()
    if before == tuple(changes):
        yield
        before = changes_of(model)
    if before != tuple(changes) or record.changed_elsewhere() != elsewhere:
        raise InputError(
            f"The model was changed while it was read: it had {describe_changes(changes)} at first, and "
            f"{describe_changes(before)} later. Read a model to the end before a context around it is "
            "entered or left, or a hook is added."
        )


@checked
def describe_changes(changes: Sequence[str] | None) -> str:
    """Changes as part of a sentence, a few of them by name."""
    if not changes:
        return "nothing replaced or hooked"
    more = f" and {len(changes) - 3} more changes" if len(changes) > 3 else ""
    return "; ".join(changes[:3]) + more


def function_name(function: Any, registered: int | None = None) -> str:
    """A function by its name and a number that no other function has, in this process or another."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    parts = (function.__func__, function.__self__) if isinstance(function, MethodType) else (function,)
    try:
        with LOCK:
            numbers = [_NUMBERS.setdefault(part, next(_COUNT)) for part in parts]
    except TypeError:  # it cannot be told from others that are equal to it
        numbers = [id(function) if registered is None else registered, 0]
    number = ".".join(map(str, numbers))
    return f"{name!r} of {getattr(function, '__module__', None)} (number {number} of process {_process()})"


def _process() -> str:
    return f"{_PROCESS}-{os.getpid()}"


def _foreign_changes(model: TransformerBridge, ours: frozenset[int]) -> Iterator[str]:
    """Hooks that somebody else has hung on a model, and other ways to change what its modules do."""
    modules = list(_modules(model))
    for name, module in modules:
        # Not getattr, which takes long where a module has no such name.
        of_points, own = set(), vars(module)
        # A hook point of TransformerLens has lists of its own.
        for handle in (*own.get("fwd_hooks", ()), *own.get("bwd_hooks", ())):
            of_points.add(handle.hook.id)
            if id(handle.user_hook) not in ours and not _is_builders(handle.user_hook):
                yield f"a hook {function_name(handle.user_hook, handle.hook.id)} at {name}"
        for kind, of_kind in _HOOKS.items():
            for number, function in own[of_kind].items():
                if number not in of_points and id(function) not in ours and not _is_builders(function):
                    yield f"a {kind} {function_name(function, number)} at {name}"
        if "parametrizations" in module._modules and parametrize.is_parametrized(module):
            yield f"a parametrization of {name}"
        forward = own.get("forward")
        if forward is None or id(forward) in ours or _is_builders(forward):
            continue
        if not _only_moves(module, forward):
            yield f"another forward {function_name(forward)} of {name}"
    for function in _replaced_methods(modules):
        yield f"another forward {function_name(function)} of a class"
    everywhere = (getattr(torch_modules, f"_global{of_kind}") for of_kind in _HOOKS.values())
    for number, function in itertools.chain(*(hooks.items() for hooks in everywhere)):
        yield f"a hook {function_name(function, number)} at all modules"
    yield from _other_parts(model)
    yield from other_constants(model)
    yield from _adapters(module for _, module in modules)
    if _drops_out(model, modules):
        yield "training mode, in which dropout makes every pass another"


def _other_parts(model: TransformerBridge) -> tuple[str, ...]:
    """Modules that are not those that the model's configuration makes."""
    record, inner = _parts_record(model), model.original_model
    # Reading every place takes long; this is the same where nothing has been put elsewhere.
    seen = [
        (type(module), *(value for value in vars(module).values() if type(value) in (float, str)))
        for _, module in modules_below("", inner)
    ]
    if record.plain is None:
        plain = None if is_quantized(model) else plain_model(model)
        record.plain = parts_of(inner if plain is None else plain, _class_name)
    if record.seen is None or record.seen[0] != seen:
        now = parts_of(inner, _class_name)
        others = [
            f"another module {part} at {place or 'the top'}"
            for place, part in now.items()
            if record.plain.get(place, part) != part
        ]
        record.seen = (
            seen,
            (*others, *(f"no module at {place}" for place in record.plain if place not in now)),
        )
    return record.seen[1]


def _class_name(kind: type) -> str:
    """The name of a module's class, with a number where this process alone can know it again."""
    if kind.__module__.startswith(("torch.", *_BUILDERS)):
        return f"{kind.__module__}.{kind.__qualname__}"
    return function_name(kind)


def _adapters(modules: Iterable[nn.Module]) -> Iterator[str]:
    """The adapters of PEFT that are in a model, and whether they are on."""
    states: Counter[str] = Counter()
    for module in modules:
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            state = "off" if module.disable_adapters else "on"
            active, merged, scaling = (
                getattr(module, name, None) for name in ("active_adapters", "merged_adapters", "scaling")
            )
            states[f"{active!r} switched {state}, merged {merged!r}, scaled {scaling!r}"] += 1
    yield from (f"the adapters {state}, in {n} modules" for state, n in sorted(states.items()))


def _modules(model: TransformerBridge) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a bridge and of the model in it, once."""
    seen: set[int] = set()
    yield from ((place or "the bridge", module) for place, module in modules_below("", model, seen))
    for point in model.hook_points():
        if id(point) not in seen:
            seen.add(id(point))
            yield point.name or "a hook point", point
    yield from modules_below("original_model", model.original_model, seen)


def _is_builders(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_BUILDERS)


def _only_moves(module: nn.Module, forward: Any) -> bool:
    """Whether it is the forward of the class, to which accelerate brings what comes in (`device_map`)."""
    hook, plain = vars(module).get("_hf_hook"), vars(module).get("_old_forward")
    by_accelerate = (getattr(forward, "func", None), type(hook))
    return (
        all(getattr(part, "__module__", None) == "accelerate.hooks" for part in by_accelerate)
        and type(hook).__name__ == "AlignDevicesHook"
        and getattr(plain, "__func__", None) is type(module).forward
    )


def _replaced_methods(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Callable[..., Any]]:
    """What stands in for the ``forward`` of a module's class, and comes from another package."""
    for kind in sorted({type(module) for _, module in modules}, key=lambda kind: kind.__qualname__):
        owner = next(base for base in kind.__mro__ if "forward" in vars(base))
        forward = vars(owner)["forward"]
        package = str(getattr(forward, "__module__", "")).partition(".")[0]
        same = package == owner.__module__.partition(".")[0]
        if not same and package != "torch" and not _is_builders(forward):
            yield forward


def _drops_out(model: TransformerBridge, modules: Iterable[tuple[str, nn.Module]]) -> bool:
    training = [module for _, module in modules if module.training]
    if not training:
        return False
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in training):
        return True
    # Attention drops out by a number of the configuration, without a module of its own.
    settings = model.original_model.config.to_dict()
    rates = [value for key, value in settings.items() if "drop" in key and isinstance(value, float)]
    return model.original_model.training and any(rate > 0 for rate in rates)
