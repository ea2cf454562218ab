"""A case, the time that it may take, and the judgement of what came of it."""

from __future__ import annotations

import contextlib
import io
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from matlens import InputError

CLEAR, UNCLEAR, SILENT, TRACEBACK, HANG = VERDICTS = ("clear", "unclear", "silent", "traceback", "hang")
EXCLUDED = "what annotations exclude"
SECONDS = 30.0  # that a case may take
_SHORTEST = 20


class Overtime(BaseException):
    """A case has taken too long."""


class Unnamed(Exception):
    """A refusal names neither what was wrong nor where."""


@dataclass(frozen=True)
class Case:
    """Something bad that a user can do.

    Attributes
    ----------
    fault
        The class of what is wrong.
    name
        What is done, in words that find it again.
    run
        Does it.
    right
        Whether what comes back is right, where the library may take the input; by default it may not.
    """

    fault: str
    name: str
    run: Callable[[], Any]
    right: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Judgement:
    """What came of a case: the verdict, and what was said or given back."""

    case: Case
    verdict: str
    words: str


def judge(case: Case, *, seconds: float = SECONDS) -> Judgement:
    """Do what a case does, and judge what came of it."""
    try:
        with time_limit(seconds), quiet():
            result = case.run()
            if case.right is not None and case.right(result):
                return Judgement(case, CLEAR, "taken, and right")
            return Judgement(case, SILENT, f"taken: {_cut(repr(type(result)) + ' ' + _repr(result))}")
    except Overtime:
        return Judgement(case, HANG, f"more than {seconds:g} seconds")
    except InputError as error:
        return Judgement(case, *_judge_message(str(error)))
    except Unnamed as error:
        return Judgement(case, UNCLEAR, str(error))
    except (LookupError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError) as error:
        # What Python, torch, pandas and the system say of a value passes through, but for what an
        # annotation excludes.
        clear = case.fault != EXCLUDED and len(str(error)) >= _SHORTEST
        return Judgement(case, CLEAR if clear else TRACEBACK, _origin(error))
    except (Exception, SystemExit) as error:
        return Judgement(case, TRACEBACK, _origin(error))


def _judge_message(message: str) -> tuple[str, str]:
    if any(ord(character) < 32 and character != "\n" for character in message):
        return UNCLEAR, f"control characters: {_cut(repr(message))}"
    if len(message) < _SHORTEST or "Traceback" in message:
        return UNCLEAR, _cut(message)
    return CLEAR, message


def _origin(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "matlens" in frame.filename]
    where = f" at {frames[-1].filename.rpartition('matlens/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {_cut(str(error))}{where}"


def _repr(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception as error:
        return f"(no repr: {error})"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:157]}..."


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Overtime` in what takes longer; again every second, where something has caught it."""

    def stop(*_: Any) -> None:
        raise Overtime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what is printed, and warnings, to itself."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
