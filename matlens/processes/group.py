"""A group of processes that all do the same calls and divide the work inside of them.

Every process calls the same functions in the same order, and gets from each what one process alone would
get. Inside, the work is divided by examples; the first process, which leads, writes files and shows bars.
What they hand each other passes through here: every hand-over has a number and a name, and each side says
that it has come there before anything is sent. So processes that do different things are told so, and one
that waits knows whether the other is slow, which it may be for hours, or gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from matlens.arguments import plain_number, require_whole
from matlens.errors import InputError, printable

if TYPE_CHECKING:
    from torch import Tensor

_SHORTEST_LOOK, _LONGEST_LOOK = 0.0005, 0.05  # seconds between two looks at what the others have said
_LOOKS = 4  # in which a process is seen to be silent, at least, before it counts as gone
_END = "end"  # what the leading process says when all have ended, and itself has too
_LONGEST_WORD = 1000  # characters of what a process says about its end
_GOES_ON = "Run the same command again, with any number of processes, and it goes on from what is written."


class ProcessLost(InputError):
    """Another process is gone or has failed: what was written by then is left to go on with."""


class Processes:
    """The processes that share the work; by default there is one.

    Attributes
    ----------
    rank, size
        The number of this process, from 0, and how many there are.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        store: Any = None,
        transport: Any = None,
        patience: float = 60.0,
    ) -> None:
        self.size = require_whole(size, "The number of processes", least=1)
        self.rank = require_whole(rank, "The number of the process", least=0, most=self.size - 1)
        self._store, self._transport, self._patience = store, transport, patience
        self._number = 0
        # The last beat of each process, how long it has been silent since, and when that was looked at.
        self._seen: dict[int, tuple[bytes, float, float]] = {}

    def __repr__(self) -> str:
        return f"Processes(rank={self.rank}, size={self.size})"

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and shows bars."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its machine."""
        text = os.environ.get("LOCAL_RANK", "")
        return int(text) if text.isdecimal() else self.rank

    @property
    def local_size(self) -> int:
        """How many processes there are on its machine."""
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        return min(int(text), self.size) if text.isdecimal() and int(text) else self.size

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    # What all of them know

    def share(self, value: Any, what: str) -> Any:
        """What the leading process has, as JSON gives it back, in every process.

        Raises
        ------
        InputError
            A process is gone, has failed, or is doing something else.
        """
        if not self.several:
            return value
        key = self._next(what)
        if self.leads:
            value = json.loads(text := json.dumps(value, default=plain_number))
            self._say(key, json.dumps([what, text]))
            return value
        said, text = json.loads(self._hear(key, 0))
        self._require_same(0, said, what)
        return json.loads(text)

    def agree(self, value: Any, what: str) -> None:
        """Refuse to go on where this process was given something else than the leading one.

        Raises
        ------
        InputError
            It was.
        """
        ours = json.loads(json.dumps(value, default=plain_number))
        if self.share(ours, what) != ours:
            raise InputError(
                f"Process {self.rank} was given other arguments than process 0 ({what} differ). Expected the "
                "same calls with the same arguments in every process; their work is divided inside."
            )

    def wait(self, what: str) -> None:
        """Wait until every process has come here; the leading one comes last."""
        if not self.several:
            return
        self.gather({}, what)
        self.share(True, what)

    def finish(self) -> None:
        """Wait at the end until every process has come there; the leading one comes last.

        Each says first that it has ended, so that none of those that are still at work waits for it.

        Raises
        ------
        InputError
            A process is gone, has failed, or waits for one that has ended.
        """
        if not self.several:
            return
        self.leave(None)
        if self.leads:
            for rank in range(1, self.size):
                if words := json.loads(self._hear(f"left/{rank}", rank)):
                    raise self._failed(rank, words)
            self._say(_END, "")
        else:
            self._hear(_END, 0)

    # Tensors

    def gather(self, parts: Mapping[str, Tensor], what: str) -> list[dict[str, Tensor]]:
        """What every process has, by rank, in the leading process; the others get an empty list.

        Raises
        ------
        InputError
            A process is gone, has failed, or is doing something else.
        """
        if not self.several:
            return [dict(parts)]
        key = self._next(what)
        if not self.leads:
            self._announce(f"{key}/{self.rank}", what, parts)
            self._hear(f"{key}/{self.rank}/ready", 0)
            self._send(parts, 0)
            return []
        gathered = [dict(parts)]
        for rank in range(1, self.size):
            shapes = self._announced(f"{key}/{rank}", rank, what)
            self._say(f"{key}/{rank}/ready", "")
            gathered.append(self._receive(shapes, rank))
        return gathered

    def share_tensors(self, parts: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """The tensors of the leading process, in every process, on the CPU.

        Raises
        ------
        InputError
            A process is gone, has failed, or is doing something else.
        """
        if not self.several:
            return dict(parts)
        key = self._next(what)
        if not self.leads:
            shapes = self._announced(key, 0, what)
            self._say(f"{key}/{self.rank}/ready", "")
            return self._receive(shapes, 0)
        self._announce(key, what, parts)
        for rank in range(1, self.size):
            self._hear(f"{key}/{rank}/ready", rank)
            self._send(parts, rank)
        return dict(parts)

    def stack(self, rows: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """Rows of all processes, one under the other in the order of the processes, in every process.

        Raises
        ------
        InputError
            A process is gone, has failed, or is doing something else.
        """
        import torch

        gathered = self.gather(rows, what)
        whole = {name: torch.cat([part[name].cpu() for part in gathered]) for name in rows if gathered}
        return self.share_tensors(whole, what)

    def unite(self, parts: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """Tensors of all processes, each of which has some of its own, in every process.

        Raises
        ------
        InputError
            A process is gone, has failed, or is doing something else.
        """
        gathered = self.gather(parts, what)
        whole = {name: part for of_process in gathered for name, part in of_process.items()}
        return self.share_tensors(whole, what)

    # Beginning and end

    def beat(self) -> None:
        """Let the others know that this process lives."""
        self._store.set(f"beat/{self.rank}", str(time.monotonic()))

    def leave(self, error: BaseException | None) -> None:
        """Say how this process has ended, so that the others need not wait for it."""
        if self.several:
            words = "" if error is None else printable(f"{type(error).__name__}: {error}", most=_LONGEST_WORD)
            if isinstance(error, InputError):
                words = printable(str(error), most=_LONGEST_WORD)
            with suppress(RuntimeError):  # what the store was in is gone, and they know
                self._store.set(f"left/{self.rank}", json.dumps(words))

    def word_of(self, rank: int) -> str | None:
        """What a process has said when it ended: nothing where all was well; ``None`` while it is at work."""
        key = f"left/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def depart(self) -> None:
        """Say that this process reads no other's words any more."""
        with suppress(RuntimeError):
            self._store.set(f"gone/{self.rank}", "")

    def has_departed(self, rank: int) -> bool:
        """Whether a process reads no other's words any more."""
        return bool(self._store.check([f"gone/{rank}"]))

    # Inside

    def _next(self, what: str) -> str:
        self._number += 1
        return f"{self._number}"

    def _require_same(self, rank: int, said: str, what: str) -> None:
        if said != what:
            raise InputError(
                f"Process {rank} is at '{said}' while process {self.rank} is at '{what}'. Expected the same "
                "calls in the same order in every process; what one of them does alone goes into "
                "'with processes.alone()'."
            )

    def _announce(self, key: str, what: str, parts: Mapping[str, Tensor]) -> None:
        shapes = [[name, list(of.shape), str(of.dtype).removeprefix("torch.")] for name, of in parts.items()]
        self._say(key, json.dumps([what, shapes]))

    def _announced(self, key: str, rank: int, what: str) -> list[tuple[str, list[int], str]]:
        said, shapes = json.loads(self._hear(key, rank))
        self._require_same(rank, said, what)
        return shapes

    def _say(self, key: str, text: str) -> None:
        self._carefully(lambda: self._store.set(key, text), 0)

    def _hear(self, key: str, rank: int) -> str:
        """Wait for what a process says, as long as it can still say it."""
        pause = _SHORTEST_LOOK
        self._seen[rank] = b"", 0.0, time.monotonic()
        while not self._carefully(lambda: self._store.check([key]), rank):
            self._require_alive(rank, key)
            time.sleep(pause)
            pause = min(1.3 * pause, _LONGEST_LOOK)
        text: bytes = self._carefully(lambda: self._store.get(key), rank)
        return text.decode()

    def _require_alive(self, awaited: int, key: str) -> None:
        for rank in range(self.size):
            words = self._carefully(partial(self.word_of, rank), rank) if rank != self.rank else None
            if words:
                raise self._failed(rank, words)
            # What it said last may have come since.
            ended = words is not None and rank == awaited and key != _END
            if ended and not self._carefully(lambda: self._store.check([key]), rank):
                raise ProcessLost(
                    f"Process {rank} of {self.size} has ended while process {self.rank} was waiting for it. "
                    "Expected the same calls in the same order in every process."
                )
        sign = f"beat/{awaited}"
        there = self._carefully(lambda: self._store.check([sign]), awaited)
        beat = self._carefully(lambda: self._store.get(sign), awaited) if there else b""
        last, silent, looked = self._seen[awaited]
        # Of a pause in which this process itself was held up, and with it perhaps all of them, a part counts.
        now = time.monotonic()
        silent = 0.0 if beat != last else silent + min(now - looked, self._patience / _LOOKS)
        self._seen[awaited] = beat, silent, now
        if silent > self._patience:
            raise self._gone(awaited, f"nothing has been heard of it for {self._patience:g} seconds")

    def _failed(self, rank: int, words: str) -> ProcessLost:
        return ProcessLost(f"Process {rank} of {self.size} has failed: {words}")

    def _gone(self, rank: int, reason: str) -> ProcessLost:
        return ProcessLost(
            f"Process {rank} of {self.size} is gone ({reason}): it was killed, or its machine is "
            f"out of reach. {_GOES_ON}"
        )

    def _carefully(self, ask: Callable[[], Any], rank: int) -> Any:
        try:
            return ask()
        except RuntimeError as error:  # torch.distributed's errors are of this kind
            reason = printable(str(error).partition("\n")[0], most=120)
            raise self._gone(rank, f"the connection is broken: {reason}") from error

    def _send(self, parts: Mapping[str, Tensor], rank: int) -> None:
        for part in parts.values():
            if part.numel():
                self._carefully(partial(self._transport.send, part, rank), rank)

    def _receive(self, shapes: list[tuple[str, list[int], str]], rank: int) -> dict[str, Tensor]:
        import torch

        parts = {}
        for name, shape, dtype in shapes:
            part = torch.empty(shape, dtype=getattr(torch, dtype))
            if part.numel():
                self._carefully(partial(self._transport.receive, part, rank), rank)
            parts[name] = part
        return parts


_ONE = Processes()
_current: ContextVar[Processes] = ContextVar("processes", default=_ONE)


def current() -> Processes:
    """The processes that share the work here; one alone, where nobody has joined several."""
    return _current.get()


@contextmanager
def using(processes: Processes) -> Iterator[Processes]:
    """Share the work among these processes."""
    token = _current.set(processes)
    try:
        yield processes
    finally:
        _current.reset(token)


@contextmanager
def alone() -> Iterator[None]:
    """Do what follows in this process alone, as if there were no others.

    For work that only some of the processes do: between two calls that all of them make.
    """
    with using(_ONE):
        yield
