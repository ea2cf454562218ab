"""What this library hangs on a model to change or to read it, in one thread at a time.

Lists of hooks are made anew when one is taken off, and the modules of a bridge keep what belongs to the pass
that is under way: so a change holds for all threads and is made by one alone, and a pass is the only one.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from matlens.errors import InputError

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

LOCK = threading.RLock()  # lists of hooks are changed and read under it


class EndOfPass(Exception):
    """Raised by a hook that `reading` or `hanging` has hung: ends the pass, and with it the context."""


@dataclass(frozen=True, eq=False)
class Presence:
    """What this library has hung on a model: what it changes there, and by which functions."""

    changes: Callable[[], Sequence[str]]
    functions: frozenset[int]
    thread: int


@dataclass(eq=False)
class HookRecord:
    """What this library has hung on a model now, and how often each thread has changed the model."""

    present: list[Presence] = field(default_factory=list)
    changed: Counter[int] = field(default_factory=Counter)
    reading: threading.RLock = field(default_factory=threading.RLock)

    def changed_elsewhere(self) -> int:
        """How often the model was changed by other threads than this."""
        return self.changed.total() - self.changed[threading.get_ident()]


_RECORDS: WeakKeyDictionary[Any, HookRecord] = WeakKeyDictionary()


def record_of(model: TransformerBridge) -> HookRecord:
    """What is hung on a model now; the same object as long as the model lives."""
    with LOCK:
        return _RECORDS.setdefault(model, HookRecord())


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
    here, check_alone = threading.get_ident(), _alone_in(model)
    presence = Presence(changes, frozenset(map(id, (*functions, check_alone))), here)
    record = record_of(model)
    with LOCK:
        if any(other.thread != here for other in record.present):
            raise InputError(
                "This model is patched, controlled or read in another thread, and a change holds for all "
                "threads. Wait until the other thread has left its context, or load the model a second time."
            )
        _check_no_other_pass(model)
        record.present.append(presence)
        record.changed[here] += 1
    try:
        with _alone(model, check_alone):
            yield
    finally:
        with LOCK:
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
    here, check_alone = threading.get_ident(), _alone_in(model)

    def of_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(value: Any, hook: Any) -> None:
            if threading.get_ident() == here:
                function(value, hook=hook)

        return read

    limited = [(name, of_this_thread(function)) for name, function in hooks]
    functions = (*(function for _, function in limited), check_alone)
    presence = Presence(tuple, frozenset(map(id, functions)), here)
    record = record_of(model)
    with record.reading:
        with LOCK:
            record.present.append(presence)
        try:
            with _hung(model, limited), _alone(model, check_alone):
                yield
        finally:
            with LOCK:
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
    with LOCK:
        hung.__enter__()
    try:
        yield
    except EndOfPass:
        pass
    finally:
        with LOCK:
            hung.__exit__(None, None, None)


@contextmanager
def _alone(model: TransformerBridge, check_alone: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Let every pass that begins inside of the context be the only one."""
    with LOCK:
        handle = model.original_model.register_forward_pre_hook(check_alone)
    try:
        yield
    finally:
        with LOCK:
            handle.remove()


def _alone_in(model: TransformerBridge) -> Callable[[nn.Module, Any], None]:
    def check_alone(inner: nn.Module, _: Any) -> None:
        _check_no_other_pass(model)

    return check_alone


def _check_no_other_pass(model: TransformerBridge) -> None:
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
