"""The exception and the warning that a user's input can cause, and foreign text made safe to show."""

from __future__ import annotations

import sys
import unicodedata
import warnings

_MOST = 1950  # characters of a message: what is longer echoes something, and others may put words before it
_SHOWN_SPACES = "Zs"  # every other kind of space, and all that cannot be seen, is written by its number


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message says what was wrong, what was expected and what to do. The command line
    prints it without a traceback and exits with code 2; everything else is a defect of ours.
    What cannot be seen in it, such as control characters that a file brought, is written by its number, and
    a message that echoes too much is cut in the middle.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), most=_MOST, keep="\n"))


class InputWarning(UserWarning):
    """What the user gave can be used, but its results are probably not what they seem.

    Each call warns at most once about one thing. Python's own filters silence it, or make an error of it:
    ``warnings.filterwarnings("error", category=matlens.InputWarning)``. The command line prints it as a line.
    """


def warn(message: str) -> None:
    """Issue an `InputWarning` at the line of the user's code that called into matlens."""
    level = 1
    frame = sys._getframe()
    for depth in range(1, sys.getrecursionlimit()):
        if frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
            level = depth + 1  # the caller of the outermost function of ours so far
        if frame.f_back is None:
            break
        frame = frame.f_back
    warnings.warn(printable(message, most=_MOST, keep="\n"), InputWarning, stacklevel=level)


def printable(text: str, *, most: int | None = None, keep: str = "") -> str:
    r"""Write foreign text so that a terminal shows it and does nothing else.

    Control characters, marks that turn the direction of reading, halves of surrogate pairs and whatever else
    cannot be seen are written by their numbers, such as ``\x1b`` and ``\u202e``.

    Parameters
    ----------
    text
        What somebody else wrote: tokens, sentences, names of files, answers of servers.
    most
        Number of characters from which the text is cut in its middle, with a note of how many are left out.
    keep
        Characters that stay as they are, such as a line break.
    """
    if most is not None:
        text = _cut(text, most)
    if not text.isprintable():
        text = "".join(
            c if c.isprintable() or c in keep or unicodedata.category(c) == _SHOWN_SPACES else _number(c)
            for c in text
        )
    return text if most is None else _cut(text, most)


def _number(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    note = f" … ({len(text):,} characters, cut here) … "
    head = max(2 * (most - len(note)) // 3, 0)
    tail = max(most - len(note) - head, 0)
    return text[:head] + note + text[len(text) - tail :] if tail else f"{text[: max(most - 1, 0)]}…"
