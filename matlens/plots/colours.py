"""Colours and line styles: every method has its own in all figures, from a palette for colour-blind readers.

The palette is that of Okabe and Ito, with two greys.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

BLACK, DARK, GREY = "#000000", "#4d4d4d", "#a6a6a6"
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"

SOLID, DASHED, DOTTED = "-", "--", ":"
STYLES: tuple[Any, ...] = (SOLID, DASHED, DOTTED, "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 4)))
_FREE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, DARK)  # for methods that have no colour of their own
_MARKERS = "osD^v<>"
_WITHOUT_SINKS = re.compile(r"( without sinks|\+?sinks=exclude)$")


class Look(NamedTuple):
    """How a method is drawn: the colour, the style of its line, its marker, and whether that is hollow."""

    colour: str
    line: Any = SOLID
    marker: str = "o"
    hollow: bool = False


MAT, ID = Look(BLUE), Look(VERMILLION, marker="s")
LOOKS = {
    # Linear maps and replacements of sub-modules
    "mat": MAT,
    "id": ID,
    "mat_attn": Look(GREEN, marker="^"),
    "mat_ffn": Look(ORANGE, marker="D"),
    "mat_ln1_ln2": Look(PURPLE, marker="v"),
    # Lenses
    "affine": Look(SKY, marker="^"),
    "ridge=loo+toward=identity": Look(SKY, DOTTED, "v"),
    "weighted": Look(PURPLE, marker="<"),
    "standardise": Look(GREEN, marker="D"),
    "standardise+intercept": Look(GREEN, DOTTED, "d"),
    "shared_map": Look(DARK, marker=">"),
    "scaled": Look(ORANGE, DOTTED, "P"),
    "polished": Look(BLACK),
    "tuned": Look(ORANGE, marker="D"),
    "jacobian": Look(PURPLE, DOTTED, "X"),
}
"""The looks of methods; analyses add those of theirs."""


def method_looks(methods: Iterable[str]) -> dict[str, Look]:
    """Look of each method of one figure: its own in all figures, or one that is free in this one."""
    names = list(dict.fromkeys(methods))
    looks = {name: look for name in names if (look := _own_look(name)) is not None}
    taken = {(look.colour, look.line) for look in looks.values()}
    free = (
        Look(colour, line, marker)
        for line, marker in itertools.cycle(zip(STYLES, _MARKERS, strict=True))
        for colour in _FREE
        if (colour, line) not in taken
    )
    return {name: looks[name] if name in looks else next(free) for name in names}


def _own_look(name: str) -> Look | None:
    if _WITHOUT_SINKS.search(name) and name not in LOOKS:
        look = LOOKS.get(_WITHOUT_SINKS.sub("", name) or "mat")
        return look and look._replace(line=DASHED, hollow=True)
    return LOOKS.get(re.sub(r", \d+ vectors$", "", name))
