"""Sheets that people fill in with a spreadsheet: written, never written over, and read back with complaints.

A sheet is a CSV file with a heading. All cells are texts. Whoever reads a filled sheet checks its cells with
`refuse_lines`, so that the first line with a mistake is named as a spreadsheet numbers it.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from matlens.errors import InputError
from matlens.signatures import checked
from matlens.storage.files import open_regular, system_errors, write_together
from matlens.storage.tables import read_table

_LONGEST_HEADING = 2**20  # bytes in which the separator is looked for


@checked
def write_sheet(path: str | Path, table: pd.DataFrame) -> None:
    """Write a table as a sheet to be filled in.

    Parameters
    ----------
    path
        The CSV file.
    table
        Its lines; columns to be filled in are empty.

    Raises
    ------
    InputError
        There is another sheet, or this one filled in: it is not written over.
    """
    write_sheets({Path(path): table})


def write_sheets(tables: Mapping[Path, pd.DataFrame], pages: Mapping[Path, str] | None = None) -> None:
    """Write several sheets, and pages that belong to them, all or none of them.

    Parameters
    ----------
    tables
        The lines of each sheet.
    pages
        Texts of other files. Nobody fills them in, so they are written over.

    Raises
    ------
    InputError
        There is another sheet, or one of these filled in: it is not written over.
    """
    sheets = {path: _spreadsheet(table) for path, table in tables.items()}
    for path, content in sheets.items():
        with system_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not _holds(path, content):
                raise InputError(
                    f"{path} is there already and holds something else: another sheet, or this one filled "
                    "in. Move it, or write elsewhere."
                )
    with system_errors(next(iter(sheets)).parent):
        write_together(sheets | {path: page.encode() for path, page in (pages or {}).items()})


def _holds(path: Path, content: bytes) -> bool:
    """Whether a file holds just this; what is no plain file is refused."""
    with open_regular(path) as file:
        return file.read(len(content) + 1) == content


def _spreadsheet(table: pd.DataFrame) -> bytes:
    """A CSV file as spreadsheets like it; the mark at its beginning tells them that it is UTF-8."""
    return table.to_csv(index=False, quoting=csv.QUOTE_ALL, lineterminator="\r\n").encode("utf-8-sig")


def read_sheet(path: str | Path, columns: Sequence[str], *, unchanged: Sequence[str] = ()) -> pd.DataFrame:
    """Read a filled sheet, as it was written or as a spreadsheet has saved it.

    The separator can be a semicolon. Lines that are empty are left out, and so are spaces around cells. The
    index of the table is the number of each line in the file, the heading being line 1.

    Parameters
    ----------
    path
        The CSV file.
    columns
        Columns that the sheet must have; others are left out.
    unchanged
        Columns whose cells keep the spaces around them.

    Raises
    ------
    InputError
        The file cannot be read, or columns are missing.
    """
    sheet = read_table(
        path,
        columns,
        what="a filled sheet",
        made_by=f"Expected the sheet as it was written, with the columns {', '.join(columns)}, filled in and "
        "saved as CSV in UTF-8.",
        encoding="utf-8-sig",
        sep=_separator(path),
        skip_blank_lines=False,
        na_filter=False,
    )[list(columns)]
    sheet.index += 2
    stripped = sheet.apply(lambda column: column.str.strip())
    filled = (stripped != "").any(axis=1)
    return stripped.assign(**{column: sheet[column] for column in unchanged})[filled]


def _separator(path: str | Path) -> str:
    try:
        with open_regular(path) as file:
            heading = file.readline(_LONGEST_HEADING)
    except (OSError, InputError):
        return ","  # reading the sheet says why
    return ";" if heading.count(b";") > heading.count(b",") else ","


def refuse_lines(path: str | Path, sheet: pd.DataFrame, wrong: pd.Series, column: str, expected: str) -> None:
    """Refuse a filled sheet if cells of it are wrong, and name the first of their lines.

    Parameters
    ----------
    path
        The file that the sheet is from.
    sheet
        The sheet as `read_sheet` gives it, with a column ``item``, or some of its lines.
    wrong
        Which lines are wrong.
    column
        The column that makes them wrong.
    expected
        What is expected in that column.

    Raises
    ------
    InputError
        There is a wrong line.
    """
    if not wrong.any():
        return
    line, first = sheet.index[wrong][0], sheet[wrong].iloc[0]
    item = "" if column == "item" else f" (item {first['item']})"
    raise InputError(
        f"{path}, line {line}{item}: {column} is {first[column]!r}, and {int(wrong.sum()) - 1} more lines "
        f"are wrong like it. Expected {expected}."
    )
