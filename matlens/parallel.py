"""Divide work over the processes that `torchrun` starts.

Every process makes the same calls in the same order and gets what one process alone would get; the work
inside is divided by examples. The main process (rank 0) writes files, prints and shows progress.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm.auto import tqdm

from matlens.errors import InputError, checked

if TYPE_CHECKING:
    from torch import Tensor

_MEETING = timedelta(minutes=5)  # until all processes have started
_LONGEST = timedelta(days=1)  # the main process may evaluate alone for hours; a kill is noticed at once


class ProcessLost(InputError):
    """Another process of the job failed or was killed. Rerun the command to resume."""


class _Place(NamedTuple):
    rank: int
    world_size: int
    group: Any = None  # of torch.distributed, for tensors in host memory


_ALONE = _Place(0, 1)
_current: ContextVar[_Place] = ContextVar("place", default=_ALONE)
# torch 2.6 deadlocks if a group is freed while its thread still drops the last operation.
_ended: list[Any] = []


def rank() -> int:
    """The number of this process in its job, from 0."""
    return _current.get().rank


def world_size() -> int:
    """How many processes share the work; 1 outside of `distributed`."""
    return _current.get().world_size


def is_main() -> bool:
    """Whether this is the process that writes, prints and shows progress."""
    return rank() == 0


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank())) if world_size() > 1 else 0


def local_world_size() -> int:
    """How many processes of the job run on this machine."""
    return min(int(os.environ.get("LOCAL_WORLD_SIZE", world_size())), world_size())


def is_launched() -> bool:
    """Whether `torchrun` started this process, by its environment."""
    size, number = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return size.isdecimal() and number.isdecimal() and int(size) > 1


@checked
@contextmanager
def distributed() -> Iterator[None]:
    """Share the work inside the context with the other processes that `torchrun` started.

    A script runs unchanged as one process, where nothing is shared. A process group that is initialized
    already is used; the default backends are chosen otherwise.
    """
    if not is_launched() or world_size() > 1:
        yield
        return
    import torch.distributed as dist

    opened = not dist.is_initialized()
    if opened:
        store, number, size = next(iter(dist.rendezvous("env://", timeout=_MEETING)))
        dist.init_process_group(store=store, rank=number, world_size=size, timeout=_LONGEST)
    group = dist.new_group(backend="gloo", timeout=_LONGEST)
    place = _current.set(_Place(dist.get_rank(), dist.get_world_size(), group))
    if not is_main():
        _silent.set()
    try:
        yield
        barrier("the end of the job")
    finally:
        _silent.clear()
        _current.reset(place)
        _ended.append(group)
        if opened:  # closing the connection tells the others if this one failed
            dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Do what follows in this process alone, for work that not all processes do."""
    place = _current.set(_ALONE)
    try:
        yield
    finally:
        _current.reset(place)


# Values that all processes know


def broadcast(value: Any, what: str) -> Any:
    """The main process's value, in every process; raises ProcessLost if one failed."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    barrier(what)
    shared = [value if is_main() else None]
    _careful(lambda: dist.broadcast_object_list(shared, group=_current.get().group))
    return shared[0]


def check_same(value: Any, what: str) -> None:
    """Raise InputError in all processes if one was given another value than the main process."""
    if world_size() > 1:
        values = _exchange(value, what)
        for number, other in enumerate(values):
            if other != values[0]:
                raise InputError(
                    f"Process {number} was given other arguments than process 0 ({what} differ). All "
                    "processes must make the same calls with the same arguments."
                )


def barrier(what: str) -> None:
    """Wait until every process has come here."""
    if world_size() > 1:
        _exchange(None, what)


# Tensors, on the CPU


def gather(tensors: Mapping[str, Tensor], what: str) -> list[dict[str, Tensor]]:
    """Tensors of all processes in rank order in the main process; none elsewhere."""
    own = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    if world_size() == 1:
        return [own]
    import torch.distributed as dist

    barrier(what)
    gathered: list[Any] = [None] * world_size() if is_main() else []
    group = _current.get().group
    _careful(lambda: dist.gather_object(own, gathered if is_main() else None, group=group))
    return gathered


def concatenate(tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Concatenate tensors of all processes in rank order, in every process."""
    import torch

    gathered = gather(tensors, what)
    return broadcast(
        {name: torch.cat([part[name] for part in gathered]) for name in tensors if gathered}, what
    )


def merge(tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Gather the named tensors of all processes in every process."""
    gathered = gather(tensors, what)
    return broadcast({name: part for of_rank in gathered for name, part in of_rank.items()}, what)


def _exchange(value: Any, what: str) -> list[Any]:
    """Gather a value of every process, in rank order; all must make the same call."""
    import torch.distributed as dist

    place = _current.get()
    said: list[Any] = [None] * place.world_size
    _careful(lambda: dist.all_gather_object(said, (what, value), group=place.group))
    calls, values = zip(*said, strict=True)
    for number, call in enumerate(calls):
        if call != calls[0]:
            raise InputError(
                f"Process {number} is at '{call}' while process 0 is at '{calls[0]}'. All processes must "
                "make the same calls in the same order. Put work of one process in 'with parallel.alone():'."
            )
    return list(values)


def _careful(call: Callable[[], Any]) -> None:
    try:
        call()
    except RuntimeError as error:  # as all errors of torch.distributed are
        how = "did not come in time" if "imed out" in str(error) else "failed or was killed"
        raise ProcessLost(
            f"Another process of this job {how}. Rerun the same command, with any number of processes: it "
            "resumes from what is stored."
        ) from error


# Progress

_QUIET = 1.0  # seconds before a bar is shown: what is done by then needs none
_silent = threading.Event()  # in all processes but the main one


class Bar(tqdm):
    """A bar of tqdm that is shown after a second, in the main process alone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        shown = {"disable": True} if _silent.is_set() else {}
        super().__init__(*arguments, **{"delay": _QUIET, **options, **shown})


@contextmanager
def waiting(desc: str, *, progress: bool = True) -> Iterator[None]:
    """Print what is under way, such as the loading of a model, if it takes more than a second."""
    note = threading.Timer(_QUIET, tqdm.write, [f"{desc} ..."], {"file": sys.stderr})
    note.daemon = True
    if progress and not _silent.is_set():
        note.start()
    try:
        yield
    finally:
        note.cancel()
