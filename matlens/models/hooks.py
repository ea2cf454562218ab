"""Hooks that this library adds to a model, to change it or to read it.

A change holds for all threads and is made by one alone. Modules of a bridge keep what belongs to the running
pass, so two threads must not run a model at once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from matlens.errors import InputError

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

LOCK = threading.RLock()  # lists of hooks are changed and read under it


class EndOfPass(Exception):
    """Raised by a hook of `reading` or `hanging`: ends the pass, and with it the context."""


@dataclass(frozen=True, eq=False)
class Presence:
    """A context of matlens around a model: its changes and its hook functions."""

    changes: Callable[[], Sequence[str]]
    functions: frozenset[int]
    thread: int


@dataclass(eq=False)
class HookRecord:
    """The contexts around a model, and the thread whose pass is under way inside of one."""

    present: list[Presence] = field(default_factory=list)
    changed: Counter[int] = field(default_factory=Counter)
    reading: threading.RLock = field(default_factory=threading.RLock)
    running: int | None = None

    def changed_elsewhere(self) -> int:
        """How often other threads have entered or left a context that changes the model."""
        with LOCK:
            return self.changed.total() - self.changed[threading.get_ident()]


_RECORDS: WeakKeyDictionary[Any, HookRecord] = WeakKeyDictionary()


def record_of(model: TransformerBridge) -> HookRecord:
    """The contexts around a model; the same object as long as the model lives."""
    with LOCK:
        return _RECORDS.setdefault(model, HookRecord())


@contextmanager
def intervening(
    model: TransformerBridge,
    changes: Callable[[], Sequence[str]] | None,
    functions: Iterable[Callable[..., Any]],
) -> Iterator[None]:
    """Register the changes and hooks of a context; None if it only reads.

    ``changes`` is called when somebody asks: naming a map reads all its weights. Raises InputError if another
    thread changes or reads the model, and for a pass while another thread's is under way.
    """
    record, here, inner = record_of(model), threading.get_ident(), model.original_model

    # Functions, not methods: a copy of the model has them too.
    def begin(module: nn.Module, args: Any) -> None:
        thread = threading.get_ident()
        with LOCK:
            if record.running not in (None, thread):
                raise InputError(
                    "A pass of this model is under way in another thread, and the vectors of both would be "
                    "mixed. Wait until it has ended, or load the model a second time."
                )
            record.running = thread

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if record.running == threading.get_ident():
            record.running = None

    presence = Presence(changes or tuple, frozenset(map(id, (*functions, begin, end))), here)
    with LOCK:
        others = [other for other in record.present if other.thread != here]
        if changes and (others or record.running not in (None, here)):
            raise InputError(
                "This model is patched, controlled or read in another thread, and a change holds for all "
                "threads. Wait until that thread has left its context, or load the model a second time."
            )
        record.present.append(presence)
        record.changed[here] += bool(changes)
        handles = [
            inner.register_forward_pre_hook(begin),
            inner.register_forward_hook(end, always_call=True),
        ]
    try:
        yield
    finally:
        with LOCK:
            record.present.remove(presence)
            record.changed[here] += bool(changes)
            for handle in handles:
                handle.remove()
            if record.running == here:
                record.running = None  # an interrupted pass


@contextmanager
def reading(model: TransformerBridge, hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    """Add read-only hooks for passes of this thread; one thread at a time."""
    here = threading.get_ident()

    def of_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(value: Any, hook: Any) -> None:
            if threading.get_ident() == here:
                function(value, hook=hook)

        return read

    limited = [(name, of_this_thread(function)) for name, function in hooks]
    functions = [function for _, function in limited]
    with record_of(model).reading, intervening(model, None, functions), _hung(model, limited):
        yield


@contextmanager
def hanging(model: TransformerBridge, hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    """Add hooks that survive ``model.reset_hooks()``."""
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
                    "The hooks of this context were removed before it ended, as by model.reset_hooks("
                    "including_permanent=True): what ran since then was not the changed model."
                )
        finally:
            for handle in handles:
                handle.is_permanent = False  # so that they can be removed again


@contextmanager
def _hung(model: TransformerBridge, hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    # torch makes a list of hooks again when one is removed, so two threads must not do it at once.
    hung = model.hooks(fwd_hooks=list(hooks))
    with LOCK:
        hung.__enter__()
    try:
        yield
    except EndOfPass:
        pass
    finally:
        with LOCK:
            hung.__exit__(None, None, None)
