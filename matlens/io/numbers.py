"""Numbers in text."""

from __future__ import annotations

import math


def number_text(value: float, digits: int = 3) -> str:
    """A number with some digits after the point, and an exponent where it is huge or would vanish."""
    text = f"{value:.{digits}f}"
    if math.isfinite(value) and (abs(value) >= 1e6 or (value and not float(text))):
        return f"{value:.{digits}e}"
    return text
