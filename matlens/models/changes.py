"""What is changed in a model at the moment, so that its vectors never pass as those of the plain model.

A model is changed where parts of it are replaced or coefficients set by this library, where somebody else's
hooks hang on it, its modules run another ``forward`` or are others than its configuration says, where
adapters are in it, and where dropout is on. What this library hangs on a model to read it changes nothing.
"""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize

from matlens.errors import InputError
from matlens.models.weights import parts_of, plain_parts
from matlens.signatures import checked

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

# What the model's own code hangs on it when it is built; such hooks are part of the plain model.
_BUILDERS = (
    "transformer_lens.model_bridge.",
    "transformers.",
    "transformers_modules.",
    "accelerate.",
    "matlens.kinds.experts",
)
_PROCESS = secrets.token_hex(3)
_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_COUNT = itertools.count(1)
_LOCK = threading.RLock()


class EndOfPass(Exception):
    """Raised by a hook that `reading` or `hanging` has hung: ends the pass, and with it the context."""


@dataclass(frozen=True, eq=False)
class _Presence:
    """What this library has hung on a model: what it changes there, and by which functions."""

    changes: Callable[[], Sequence[str]]
    functions: frozenset[int]
    thread: int


@dataclass(eq=False)
class _Record:
    """What this library has hung on a model now, and how often each thread has changed the model."""

    present: list[_Presence] = field(default_factory=list)
    changed: Counter[int] = field(default_factory=Counter)
    reading: threading.RLock = field(default_factory=threading.RLock)
    parts: dict[str, str] | None = None  # of the plain model, as `parts_of` gives them
    seen: tuple[list[Any], tuple[str, ...]] | None = None  # by what is there, what is not the plain model's

    def changed_elsewhere(self) -> int:
        """How often the model was changed by other threads than this."""
        return self.changed.total() - self.changed[threading.get_ident()]


_RECORDS: WeakKeyDictionary[Any, _Record] = WeakKeyDictionary()


@checked
def changes_of(model: TransformerBridge) -> tuple[str, ...]:
    """Name all that is changed in a model at the moment; ``()`` for the plain model.

    Seen are replacements and coefficients of this library, by their numbers; hooks of others, on
    TransformerLens' hook points and on modules, and modules whose ``forward`` is another, by the function,
    which only this process can know again; parametrizations; modules of another class or with other settings
    than those that the model's configuration makes, even where they hold no weights; adapters (of PEFT), and
    whether they are on; and dropout that is on. What a hook does is not looked at: one that only reads is
    named too.
    """
    with _LOCK:  # lists of hooks must not change while they are read
        present = _record(model).present
        own = frozenset[int]().union(*(presence.functions for presence in present))
        ours = sorted(change for presence in present for change in presence.changes())
        return (*ours, *_foreign_changes(model, own))


def remember_parts(model: TransformerBridge) -> None:
    """Take the modules that a model has now, as it was loaded, for those of the plain model."""
    _record(model).parts = parts_of(model.original_model, _class_name)


@contextmanager
def intervening(
    model: TransformerBridge, changes: Callable[[], Sequence[str]], functions: Iterable[Callable[..., Any]]
) -> Iterator[None]:
    """Say, as long as the context lasts, what is changed in a model and by which hooks.

    The changes are asked for when somebody looks: naming a map reads all its numbers.

    Raises
    ------
    InputError
        The model is changed or read in another thread, or a pass of another thread is under way, now or when
        one begins inside of the context: both would run a model that neither has asked for.
    """
    here, require_alone = threading.get_ident(), _alone_in(model)
    presence = _Presence(changes, frozenset(map(id, (*functions, require_alone))), here)
    record = _record(model)
    with _LOCK:
        if any(other.thread != here for other in record.present):
            raise InputError(
                "This model is patched, controlled or read in another thread, and a change holds for all "
                "threads. Wait until the other thread has left its context, or load the model a second time."
            )
        _require_no_other_pass(model)
        record.present.append(presence)
        record.changed[here] += 1
    try:
        with _alone(model, require_alone):
            yield
    finally:
        with _LOCK:
            record.present.remove(presence)
            record.changed[here] += 1


@contextmanager
def reading(model: TransformerBridge, hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    """Hang hooks on a model that read the passes of this thread alone and change nothing.

    One thread reads at a time: torch does not bear that hooks are hung on a module that runs, and the modules
    of a bridge keep what belongs to the pass that is under way.

    Raises
    ------
    InputError
        A pass begins inside of the context while one of another thread is under way.
    """
    here, require_alone = threading.get_ident(), _alone_in(model)

    def of_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(value: Any, hook: Any) -> None:
            if threading.get_ident() == here:
                function(value, hook=hook)

        return read

    limited = [(name, of_this_thread(function)) for name, function in hooks]
    functions = (*(function for _, function in limited), require_alone)
    presence = _Presence(tuple, frozenset(map(id, functions)), here)
    record = _record(model)
    with record.reading:
        with _LOCK:
            record.present.append(presence)
        try:
            with _hung(model, limited), _alone(model, require_alone):
                yield
        finally:
            with _LOCK:
                record.present.remove(presence)


@contextmanager
def hanging(model: TransformerBridge, hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    """Hang hooks on a model that stay where ``model.reset_hooks()`` is called inside of the context.

    Raises
    ------
    InputError
        They were taken off all the same before the context ended.
    """
    functions = {id(function) for _, function in hooks}
    with _hung(model, hooks):
        handles = [
            handle
            for point in model.hook_points()
            for handle in point.fwd_hooks
            if id(handle.user_hook) in functions
        ]
        for handle in handles:
            handle.is_permanent = True
        try:
            yield
            if any(handle.hook.id not in handle.hook.hooks_dict_ref() for handle in handles):
                raise InputError(
                    "The hooks of this context were taken off before it ended, as by model.reset_hooks("
                    "including_permanent=True): what ran since then was not the changed model. Expected that "
                    "they are left alone inside of the context."
                )
        finally:
            for handle in handles:
                handle.is_permanent = False  # so that they can be taken off again


@contextmanager
def _hung(model: TransformerBridge, hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    # Lists of hooks are made anew when one is taken off, so two threads must not do it at once.
    hung = model.hooks(fwd_hooks=list(hooks))
    with _LOCK:
        hung.__enter__()
    try:
        yield
    except EndOfPass:
        pass
    finally:
        with _LOCK:
            hung.__exit__(None, None, None)


@contextmanager
def _alone(model: TransformerBridge, require_alone: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Let every pass that begins inside of the context be the only one."""
    with _LOCK:
        handle = model.original_model.register_forward_pre_hook(require_alone)
    try:
        yield
    finally:
        with _LOCK:
            handle.remove()


def _alone_in(model: TransformerBridge) -> Callable[[nn.Module, Any], None]:
    def require_alone(inner: nn.Module, _: Any) -> None:
        _require_no_other_pass(model)

    return require_alone


def _require_no_other_pass(model: TransformerBridge) -> None:
    """Refuse to go on while another thread is inside of a model.

    What runs in a thread is read off its stack, which knows of passes that began before anybody looked, and
    of those that an error or an interrupt has ended. The final norm and the head count for nothing by
    themselves: a read-out uses them without a pass.
    """
    others = [frame for thread, frame in _frames().items() if thread != threading.get_ident()]
    running = {id(module) for frame in others for module in _running_in(frame)}
    if running and running & set(map(id, (model, model.original_model, *model.blocks.modules()))):
        raise InputError(
            "A pass of this model is under way in another thread, and what belongs to a pass lies in the "
            "model's modules while it runs: the vectors of both would be mixed. Wait until that pass has "
            "ended, or load the model a second time."
        )


def _frames() -> dict[int, FrameType]:
    """The frame of every thread. Collecting garbage meanwhile can wait for ever for a thread that begins."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collecting:
            gc.enable()


def _running_in(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose calls are on a stack."""
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back


@contextmanager
def unchanged(model: TransformerBridge, changes: Sequence[str]) -> Iterator[None]:
    """Refuse a pass during which the model is not changed as it was said to be.

    Raises
    ------
    InputError
        Something was replaced, set or hooked since, or no longer is.
    """
    record = _record(model)
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
        with _LOCK:
            numbers = [_NUMBERS.setdefault(part, next(_COUNT)) for part in parts]
    except TypeError:  # it cannot be told from others that are equal to it
        numbers = [id(function) if registered is None else registered, 0]
    number = ".".join(map(str, numbers))
    return f"{name!r} of {getattr(function, '__module__', None)} (number {number} of process {_process()})"


def _process() -> str:
    return f"{_PROCESS}-{os.getpid()}"


def _record(model: TransformerBridge) -> _Record:
    with _LOCK:
        return _RECORDS.setdefault(model, _Record())


def _foreign_changes(model: TransformerBridge, own: frozenset[int]) -> Iterator[str]:
    """Hooks that somebody else has hung on a model, and other ways to change what its modules do."""
    modules = list(_modules(model))
    for name, module in modules:
        of_points = set()
        for handle in getattr(module, "fwd_hooks", ()):  # of a hook point of TransformerLens
            of_points.add(handle.hook.id)
            if id(handle.user_hook) not in own and not _is_builders(handle.user_hook):
                yield f"a hook {function_name(handle.user_hook, handle.hook.id)} at {name}"
        for kind, hooks in (("", module._forward_hooks), ("pre-", module._forward_pre_hooks)):
            for number, function in hooks.items():
                if number not in of_points and id(function) not in own and not _is_builders(function):
                    yield f"a forward {kind}hook {function_name(function, number)} at {name}"
        forward = vars(module).get("forward")
        if forward is not None and id(forward) not in own and not _is_builders(forward):
            yield f"another forward {function_name(forward)} of {name}"
        if parametrize.is_parametrized(module):
            yield f"a parametrization of {name}"
    for function in _replaced_methods(modules):
        yield f"another forward {function_name(function)} of a class"
    everywhere = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)
    for number, function in itertools.chain(*(hooks.items() for hooks in everywhere)):
        yield f"a hook {function_name(function, number)} at all modules"
    yield from _other_parts(model)
    yield from _adapters(module for _, module in modules)
    if _drops_out(model, modules):
        yield "training mode, in which dropout makes every pass another"


def _other_parts(model: TransformerBridge) -> tuple[str, ...]:
    """Modules that are not those that the model's configuration makes."""
    record, inner = _record(model), model.original_model
    # Reading every place takes long; this is the same where nothing has been put elsewhere.
    seen = [
        (type(module), *(value for value in vars(module).values() if type(value) in (float, str)))
        for module in inner.modules()
    ]
    if record.parts is None:
        record.parts = plain_parts(model, _class_name) or parts_of(inner, _class_name)
    if record.seen is None or record.seen[0] != seen:
        now, plain = parts_of(inner, _class_name), record.parts
        others = [
            f"another module {part} at {place or 'the top'}"
            for place, part in now.items()
            if plain.get(place, part) != part
        ]
        record.seen = seen, (*others, *(f"no module at {place}" for place in plain if place not in now))
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
    yield from _named_modules("", model, seen)
    for point in model.hook_points():
        if id(point) not in seen:
            seen.add(id(point))
            yield point.name or "a hook point", point
    yield from _named_modules("original_model", model.original_model, seen)


def _named_modules(top: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Modules below one that are not seen yet, in the order of `nn.Module.named_modules` and much faster.

    That one hands every module up through a generator for each module above it.
    """
    waiting = [(top, module)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name or "the bridge", module
        below = [
            (f"{name}.{part}" if name else part, inner) for part, inner in module._modules.items() if inner
        ]
        waiting += reversed(below)


def _is_builders(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_BUILDERS)


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
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in training):
        return True
    # Attention drops out by a number of the configuration, without a module of its own.
    settings = model.original_model.config.to_dict()
    rates = [value for key, value in settings.items() if "drop" in key and isinstance(value, float)]
    return model.original_model.training and any(rate > 0 for rate in rates)
