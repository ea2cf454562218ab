"""Colors and styles of methods that only analyses plot, and error bars."""

from __future__ import annotations

from typing import Any

import pandas as pd

from matlens.drawing import (
    BLACK,
    BLUE,
    DARK,
    DASHED,
    DOTTED,
    GREEN,
    GREY,
    ID,
    LOOKS,
    MAT,
    ORANGE,
    PURPLE,
    SKY,
    SOLID,
    VERMILLION,
    Look,
)

LOOKS |= {
    # Schemes
    "R2": Look(BLACK, marker="^"),
    "R2, scored without sinks": Look(PURPLE, DOTTED, "v"),
    "WRR, blocks first": Look(SKY, "none", "o"),
    "WRR, mat first": Look(ORANGE, "none", "D"),
    # Value vectors, updates and controls
    "values": Look(BLUE),
    "dominant": Look(BLUE),
    "random": Look(DARK, DASHED, "s"),
    "shuffled": Look(ORANGE, DOTTED, "D"),
    "ffn": Look(ORANGE),
    "attention": Look(GREEN),
    # Early exit
    "sub-updates rule": Look(ORANGE, marker="o"),
    "rule, equal places": Look(ORANGE, marker="P"),
    "classifiers on x": Look(GREEN, marker="D"),
    "classifiers on o": Look(GREEN, marker="v"),
    "classifiers on x + o": Look(GREEN, marker="*"),
    "fixed layer": Look(DARK, marker="X"),
    "oracle": Look(BLACK, marker="d"),
    "confidence, id": ID,
    "confidence, mat": MAT,
    # Control
    "unchanged": Look(BLACK),
    "picked": Look(BLUE),
    "words": Look(GREEN, marker="D"),
    "graded": Look(ORANGE, marker="^"),
    "Self-Debiasing": Look(PURPLE, marker="s"),
    "WordFilter": Look(VERMILLION, DASHED, "none"),
}
SUMMARIES = {"max": BLUE, "mean": DARK, "min": VERMILLION}
UPDATES = {"saturation": Look(BLUE), "stays": Look(GREY, marker="s"), "falls": Look(VERMILLION, marker="v")}
CLASSES = {"semantic": BLUE, "syntactic": ORANGE, "names": GREEN, "stopwords": GREY}
RAISED, LOWERED, OTHER = BLUE, VERMILLION, GREY
REPLACED = {
    "all": Look(BLACK, DOTTED, "s"),
    "not-first": Look(ORANGE, DASHED, "D", hollow=True),
    "not-sink": Look(GREEN, SOLID, "^"),
    "predicted": Look(PURPLE, "-.", "v"),
}
# Parts of blocks, and methods of pruning
KINDS = {
    "ln1": Look(SKY, marker="o"), "attn": Look(GREEN, marker="^"), "ln2": Look(BLUE, marker="s"),
    "ffn": Look(ORANGE, marker="D"), "block": Look(BLACK, marker="v"), "jump 2": Look(PURPLE, marker="<"),
    "jump 4": Look(VERMILLION, marker=">"), "jump 8": Look(DARK, marker="P"),
}  # fmt: skip
PRUNED = {
    "out": Look(DARK, DOTTED, "x"), "linearpatch": Look(SKY, DOTTED, "v"),
    "linearpatch, rotated": Look(SKY, marker="^"), "replaceme": Look(VERMILLION, marker="s"),
    "jump": Look(BLUE), "refit": Look(ORANGE, marker="D"), "chain": Look(BLACK, marker="v"),
    "jump, chain": Look(PURPLE, marker="<"), "chain from jump": Look(GREEN, DOTTED, ">"),
}  # fmt: skip
READ = {"mat": MAT, "id": ID, "constant": Look(DARK, DOTTED, "x")}


def error_bars(rows: pd.DataFrame, value: str = "value") -> list[Any]:
    """Lengths of the error bars from low to high."""
    return [rows[value] - rows["low"], rows["high"] - rows[value]]
