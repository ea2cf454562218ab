"""Commands that several processes run together, as torchrun starts them; the main one prints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any, NoReturn

import typer

from matlens import parallel
from matlens.cli.printing import INTERRUPTED, report_errors

_MAIN_FIRST = 2.0  # seconds


@contextmanager
def on_main(what: str) -> Iterator[bool]:
    """Whether this is the main process, which does alone what follows while the others wait."""
    if parallel.is_main():
        with parallel.alone():
            yield True
    else:
        yield False
    parallel.barrier(what)


def ask_main(ask: Callable[[], Any], what: str) -> Any:
    """What the main process finds, in every process."""
    return parallel.broadcast(ask() if parallel.is_main() else None, what)


def start(app: typer.Typer, *, dividing: Sequence[str] = ()) -> NoReturn:
    """Run a command line, as one of several processes where the environment says so, and end the process.

    Parameters
    ----------
    app
        The commands.
    dividing
        Names of those that divide their work over processes. All others are run by the main process alone.
    """
    divides = any(sys.argv[1 : 1 + len(name.split())] == name.split() for name in dividing)

    def run() -> Any:
        return app(standalone_mode=False)

    def run_with_others() -> Any:
        with parallel.distributed():
            code = None
            if parallel.is_main():
                with nullcontext() if divides else parallel.alone():
                    code = run()
            elif divides:
                code = _quietly(run)
            if code == INTERRUPTED:  # which the command line makes of it: the others have to know
                raise KeyboardInterrupt("interrupted")
            return code

    report_errors(run_with_others if parallel.is_launched() else run)
    sys.exit(0)


def _quietly(run: Callable[[], Any]) -> Any:
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            return run()
    except Exception:
        # If the main process failed alike, it prints the error and torchrun ends this process meanwhile.
        time.sleep(_MAIN_FIRST)
        raise
