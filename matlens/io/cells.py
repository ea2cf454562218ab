"""Cells of CSV files that a spreadsheet would run as formulas: escaped when written, restored when read.

Tokens and sentences are foreign text, and a spreadsheet runs a cell that begins with a sign such as ``=``.
Such a cell gets an apostrophe in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pandas as pd

# A sign after what a spreadsheet may skip: spaces, invisible characters, quotes. Or a control character.
_FORMULA = re.compile(
    r"[\s\x00-\x20\x7f-\xa0\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff'\"`‘’“”«»;|]*+"
    r"[=+\-@\uff1d\uff0b\uff0d\uff20\ufe62\ufe63\ufe66\ufe6b\u2212]|'*[\t\r\n]"
)


def escape_formula(text: str) -> str:
    """A cell as it is written, with an apostrophe in front of what a spreadsheet would run."""
    return f"'{text}" if _FORMULA.match(text) else text


def original_cell(text: str) -> str:
    """The text that `escape_formula` was given."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text[1:]) else text


def escaped_table(table: pd.DataFrame) -> pd.DataFrame:
    """A table with all texts escaped, column names included; numbers are unchanged."""
    return _converted(table, escape_formula)


def original_table(table: pd.DataFrame) -> pd.DataFrame:
    """The table that `escaped_table` was given."""
    return _converted(table, original_cell)


def _converted(table: pd.DataFrame, convert: Callable[[str], str]) -> pd.DataFrame:
    def cell(value: Any) -> Any:
        return convert(value) if isinstance(value, str) else value

    def column(values: pd.Series) -> pd.Series:
        return values if pd.api.types.is_numeric_dtype(values.dtype) else values.map(cell)

    converted = table.apply(column) if table.size else table.copy()
    converted.columns = pd.Index(map(cell, table.columns))
    return converted
