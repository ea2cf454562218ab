"""Run a command line: one-line errors, and output of the main process only."""

from __future__ import annotations

import io
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from matlens import parallel
from matlens.errors import InputError, InputWarning, printable

_BAD_INPUT, _INTERRUPTED, _PIPE_CLOSED = 2, 130, 141
_LONGEST_ECHO = 400  # characters of a message about an option
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


def start(app: typer.Typer, *, dividing: Sequence[str] = ()) -> NoReturn:
    """Run a command line, distributed if `torchrun` started it, and exit.

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
            if code == _INTERRUPTED:  # which the command line makes of it: the others have to know
                raise KeyboardInterrupt("interrupted")
            return code

    report_errors(run_with_others if parallel.is_launched() else run)
    sys.exit(0)


def _quietly(run: Callable[[], Any]) -> Any:
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            return run()
    except Exception:
        # If the main process failed the same way, it prints the error and torchrun ends this process.
        time.sleep(_MAIN_FIRST)
        raise


def report_errors(work: Callable[[], Any]) -> None:
    """Run a command; print errors of the user in one line, and exit with code 2.

    A returned exit code is used. Interruptions print one line, and a closed pipe (such as ``| head``) ends
    the process silently.
    """
    for stream in (sys.stdout, sys.stderr):  # escape characters that a terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    message = ""
    try:
        with _warnings_as_lines():
            code = work()
            sys.stdout and sys.stdout.flush()
        if not isinstance(code, int) or not code:
            return
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except BrokenPipeError:
        code = _PIPE_CLOSED
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
    except (InputError, OSError) as error:
        code, message = _BAD_INPUT, str(error)
    except Exception as error:
        code = _BAD_INPUT
        if "(os error " in str(error):  # of safetensors or tokenizers, such as a full disk
            message = str(error)
        elif hasattr(error, "format_message"):  # typer's word on options that it cannot read
            from typer.rich_utils import rich_format_error

            refusal: Any = error
            refusal.message = printable(refusal.message, limit=_LONGEST_ECHO, keep="\n")
            rich_format_error(refusal)
        else:
            raise
    # Printed only here: while the exception lives, a bar that it came through is open, on an unfinished line.
    if message:
        Console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {message}"), soft_wrap=True)
    elif code == _INTERRUPTED:
        Console(stderr=True).print("Interrupted. Rerun the same command to resume.")
    sys.exit(code)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print each `InputWarning` as one line, without the place in the code that Python puts before it."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def print_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, InputWarning):
                tqdm.write(f"warning: {message}", file=sys.stderr)  # above the bars
            else:
                show(message, category, *where, **more)

        warnings.showwarning = print_warning
        yield
