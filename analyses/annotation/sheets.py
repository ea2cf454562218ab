"""Sheets that people fill in with a spreadsheet: CSV files that are never overwritten."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from matlens import InputError
from matlens.errors import short
from matlens.io import csv_text, read_table, write_files


def write_sheets(texts: Mapping[Path, str]) -> None:
    """Write files together; raises InputError if one exists with other content."""
    for path, text in texts.items():
        if path.is_file() and path.read_bytes() != text.encode():
            raise InputError(
                f"{path} must not exist with other content: move it, it is another or filled-in sheet."
            )
    write_files(texts)


def sheet_text(table: pd.DataFrame) -> str:
    """A table for spreadsheets: quoted CSV with a UTF-8 byte order mark."""
    return "\ufeff" + csv_text(table, quoting=csv.QUOTE_ALL, lineterminator="\r\n")


def read_sheet(path: str | Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read some columns of a filled sheet as text, however a spreadsheet has saved it.

    The separator can be a comma, a semicolon or a tab. Empty lines are skipped.
    """
    made_by = f"Expected the sheet as it was written, with {', '.join(columns)}, saved as CSV in UTF-8."
    with Path(path).open(encoding="utf-8-sig", errors="replace") as file:
        heading = file.readline()
    separator = max(",;\t", key=heading.count)
    sheet = read_table(
        path, columns, what="a filled sheet", made_by=made_by, encoding="utf-8-sig", sep=separator
    )
    sheet = sheet[list(columns)].fillna("")
    filled = (sheet.apply(lambda column: column.str.strip()) != "").any(axis=1)
    return sheet[filled].reset_index(drop=True)


def refuse_rows(path: str | Path, sheet: pd.DataFrame, wrong: pd.Series, column: str, expected: str) -> None:
    """Raise InputError if cells of a column are wrong, and name the first one's item."""
    if wrong.any():
        first = sheet[wrong].iloc[0]
        raise InputError(
            f"{path}, item {first['item']}: {column} must be {expected}, got {short(first[column])}."
        )
