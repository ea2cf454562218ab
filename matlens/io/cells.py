"""Cells of tables that a spreadsheet would run as formulas, written so that it does not, and read back.

Tokens, sentences and names are foreign text, and a cell that begins with a sign such as ``=`` is a formula
to most spreadsheets. Such a cell gets an apostrophe before that beginning, as people write it by hand; so
does what would begin a cell where a spreadsheet splits lines at another separator. Reading takes it away.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pandas as pd

# What a spreadsheet may pass over before the sign: spaces, marks that cannot be seen, quotes, and separators.
_PASSED = r"[\s\x00-\x20\x7f-\xa0\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff'\"`‘’“”«»;|]"
_SIGN = r"[=+\-@\uff1d\uff0b\uff0d\uff20\ufe62\ufe63\ufe66\ufe6b\u2212]"
_BEGINNING = re.compile(rf"({_PASSED}++)({_SIGN}?)|\A({_SIGN})")
_SEPARATOR = re.compile(r"[;|\t\r\n]")
_GUARDED_SEPARATOR = re.compile(r"([;|\t\r\n])'")
_CONTROL = re.compile(r"'*[\t\r\n]")


def escape_formula(text: str) -> str:
    """A cell as it is written: what a spreadsheet would run as a formula has an apostrophe before it."""
    return _BEGINNING.sub(_guard, text)


def original_cell(text: str) -> str:
    """The text that `escape_formula` has written."""
    return _BEGINNING.sub(_unguard, text)


def _parts(match: re.Match[str]) -> tuple[str, str]:
    return match[1] or "", match[2] or match[3] or ""


def _guard(match: re.Match[str]) -> str:
    passed, sign = _parts(match)
    begins = match.start() == 0 and (sign or _CONTROL.match(passed))
    if sign:
        passed = _SEPARATOR.sub(r"\g<0>'", passed)
    return ("'" if begins else "") + passed + sign


def _unguard(match: re.Match[str]) -> str:
    passed, sign = _parts(match)
    if match.start() == 0 and passed.startswith("'") and (sign or _CONTROL.match(passed)):
        passed = passed[1:]
    if sign:
        passed = _GUARDED_SEPARATOR.sub(r"\1", passed)
    return passed + sign


def guarded_table(table: pd.DataFrame) -> pd.DataFrame:
    """A table whose texts, headings included, are guarded; numbers stay as they are."""
    return _converted(table, escape_formula)


def original_table(table: pd.DataFrame) -> pd.DataFrame:
    """The table that `guarded_table` has guarded."""
    return _converted(table, original_cell)


def _converted(table: pd.DataFrame, convert: Callable[[str], str]) -> pd.DataFrame:
    def cell(value: Any) -> Any:
        return convert(value) if isinstance(value, str) else value

    def column(values: pd.Series) -> pd.Series:
        is_number = pd.api.types.is_numeric_dtype(values.dtype) or pd.api.types.is_bool_dtype(values.dtype)
        return values if is_number else values.map(cell)

    converted = table.apply(column) if len(table) and len(table.columns) else table.copy()
    converted.columns = pd.Index([cell(name) for name in table.columns])
    return converted
