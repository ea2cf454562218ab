"""Commands that several processes run together, as torchrun starts them: one of them writes and speaks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any, NoReturn

import typer

from matlens.cli.printing import report_errors, run_app
from matlens.processes.group import Processes, alone, current
from matlens.processes.joining import joined, started_by_many

_FAILED, _INTERRUPTED = 2, 130
_HEARING = 5.0  # seconds after which a process whose error nobody has heard of prints it itself


@contextmanager
def leading(what: str) -> Iterator[bool]:
    """Whether this process does alone what follows; the others wait until it is done."""
    processes = current()
    if processes.leads:
        with alone():
            yield True
    else:
        yield False
    processes.wait(what)


def agreed(ask: Callable[[], Any], what: str) -> Any:
    """What the leading process finds, in every process."""
    processes = current()
    return processes.share(ask() if processes.leads else None, what)


def start(app: typer.Typer, *, dividing: Sequence[str] = ()) -> NoReturn:
    """Run a command line, as one of several processes where the environment says so, and end the process.

    Parameters
    ----------
    app
        The commands.
    dividing
        Names of those that divide their work among processes; all others are done by one of them.
    """
    if started_by_many():
        run_with_others(lambda: app(standalone_mode=False), dividing=dividing)
    run_app(app)


def run_with_others(run: Callable[[], Any], *, dividing: Sequence[str]) -> NoReturn:
    """Run a command line in each of several processes, and end the process; only the leading one prints.

    Commands that do not divide their work are done by the leading process alone.

    Parameters
    ----------
    run
        Runs the command, and gives its exit code.
    dividing
        Names of the commands that divide their work.
    """
    divides = any(sys.argv[1 : 1 + len(name.split())] == name.split() for name in dividing)

    def work() -> Any:
        with joined() as processes:
            code = None
            if processes.leads:
                with nullcontext() if divides else alone():
                    code = run()
            elif divides:
                code = _quietly(run, processes)
            if code == _INTERRUPTED:  # which the command line makes of it: the others have to know
                raise KeyboardInterrupt("interrupted")
            return code

    report_errors(work)
    sys.exit(0)


def _quietly(run: Callable[[], Any], processes: Processes) -> Any:
    """Run without a word: what goes wrong is told to the leading process, which prints it."""
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            return run()
    except Exception as error:
        processes.leave(error)
        until = time.monotonic() + _HEARING
        while time.monotonic() < until:
            try:
                if processes.word_of(0):
                    sys.exit(_FAILED)
            except RuntimeError:  # the leading process is gone, and this one has to speak
                break
            time.sleep(0.05)
        raise
