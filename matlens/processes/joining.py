"""Processes find each other: those that torchrun has started, or others with the same variables."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from matlens import progress
from matlens.arguments import require_number
from matlens.errors import InputError, printable
from matlens.processes.group import Processes, current, using

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 60.0  # seconds without a sign of life after which a process counts as gone
_MEETING = timedelta(minutes=5)  # until all processes have come
_SENDING = timedelta(minutes=10)  # for one hand-over, both sides of which are there
_FAREWELL = 20.0  # seconds that the leading process, which keeps the board, stays for the others to read it


def started_by_many() -> bool:
    """Whether the environment says that this is one of several processes, as torchrun does."""
    sizes = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return all(size.isdecimal() for size in sizes) and int(sizes[0]) > 1


@contextmanager
def joined(*, patience: float = PATIENCE) -> Iterator[Processes]:
    """Share the work with the other processes of the same job, as ``torchrun`` starts them.

    In the context every process calls the same functions with the same arguments, and gets what one process
    would get. Where there is one process alone, nothing changes, so that a script runs both ways.

    Parameters
    ----------
    patience
        Seconds without a sign of life after which a process counts as gone. A process gives signs of life
        however long its work takes.

    Raises
    ------
    InputError
        The other processes do not come, or one is gone or has failed while the others wait for it.
    """
    patience = require_number(patience, "patience", least=0.1)
    if not started_by_many() or current().several:
        yield current()
        return
    import torch.distributed as dist

    if not dist.is_available():
        raise InputError("This PyTorch is built without torch.distributed. Expected one that has it.")
    opened = not dist.is_initialized()
    try:
        if opened:
            store, rank, size = next(iter(dist.rendezvous("env://", timeout=_MEETING)))
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size, timeout=_SENDING
            )
            transport = _Gloo(None)
        else:  # the user's own group, whatever its backend
            store, rank, size = (
                dist.distributed_c10d._get_default_store(),
                dist.get_rank(),
                dist.get_world_size(),
            )
            transport = _Gloo(dist.new_group(backend="gloo", timeout=_SENDING))
    except (RuntimeError, ValueError) as error:
        raise InputError(
            "The processes of this job do not find each other "
            f"({printable(str(error).partition(chr(10))[0], most=200)}). Expected the variables RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, and a master that can be reached."
        ) from error
    processes = Processes(
        rank, size, store=dist.PrefixStore("matlens", store), transport=transport, patience=patience
    )
    progress.silence(not processes.leads)
    failure: BaseException | None = None
    try:
        with _beating(processes), using(processes):
            try:
                yield processes
                processes.finish()
            except BaseException as error:
                failure = error
                raise
            finally:
                processes.leave(failure)
                processes.depart()
                _wait_for_readers(processes)
    finally:
        progress.silence(False)
        if opened:
            with suppress(RuntimeError):
                dist.destroy_process_group()


class _Gloo:
    """Sends tensors through host memory."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, part: Tensor, rank: int) -> None:
        import torch.distributed as dist

        dist.send(part.detach().cpu().contiguous(), rank, group=self._group)

    def receive(self, part: Tensor, rank: int) -> None:
        import torch.distributed as dist

        dist.recv(part, rank, group=self._group)


@contextmanager
def _beating(processes: Processes) -> Iterator[None]:
    """Give signs of life from another thread, also while a step takes long."""
    done = threading.Event()
    pause = min(2.0, processes._patience / 5)

    def beat() -> None:
        while not done.is_set():
            try:
                processes.beat()
            except RuntimeError:  # the board is gone; who asks it next says so
                return
            done.wait(pause)

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=pause)


def _wait_for_readers(processes: Processes) -> None:
    """Let the process that may keep the board stay until the others have read it, or could have."""
    if not processes.leads:
        return
    waited = threading.Event()
    elapsed = 0.0
    while elapsed < min(_FAREWELL, processes._patience):
        try:
            if all(map(processes.has_departed, range(1, processes.size))):
                return
        except RuntimeError:
            return
        waited.wait(0.05)
        elapsed += 0.05
