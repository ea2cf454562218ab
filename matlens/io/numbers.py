"""Numbers as people read them: in a few characters, and with their exponent where they have one."""

from __future__ import annotations

import math

_LARGE = 1e6  # numbers from here on are written with an exponent


def number_text(value: float, digits: int = 3) -> str:
    """Write a number in a few characters that, read again, are the number to the digits shown.

    Parameters
    ----------
    value
        The number. What is no number and what is infinite are ``nan``, ``inf`` and ``-inf``.
    digits
        How many digits stand behind the point. A number that is too large to be written so in a few
        characters, or so small that nothing of it would be left, has as many and an exponent.
    """
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    text = f"{number:.{digits}f}"
    if abs(number) >= _LARGE or (number and not float(text)):
        return f"{number:.{digits}e}"
    return text
